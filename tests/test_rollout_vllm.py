"""The real vLLM in this process: the contract of all rollout engines, and training with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow import Actor, Batch, Reward, Run, recipe
from hybridflow.engines import RolloutEngine, Sampling
from hybridflow.errors import ConfigError
from hybridflow.workers.models.config import ModelConfig
from hybridflow.workers.models.loading import load_causal_lm, load_tokenizer
from hybridflow.workers.rollout.config import VLLMConfig
from hybridflow.workers.rollout.vllm import VLLMRollout
from tests.models import tiny_model_folder
from tests.rollout_contract import CHECKS, Check, Subject, greedy_by_transformers, log_softmax_of
from tests.runs import numbers, quick, weights

pytestmark = pytest.mark.vllm
LITTLE = {"kv_cache_memory_bytes": 64 << 20}
WORDS = (
    "rollout=vllm",
    "rollout.max_context_tokens=256",
    "data.max_prompt_tokens=64",
    f"rollout.options.kv_cache_memory_bytes={64 << 20}",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32, the smallest that vLLM's attention on a CPU has."""
    return tiny_model_folder(tmp_path_factory.mktemp("models") / "tiny", heads=2, kv_heads=1)


@pytest.fixture(scope="module")
def subject(model: Path) -> Subject:
    config, made = ModelConfig(path=str(model)), dict[tuple[Any, ...], VLLMRollout]()

    def build(*, seed: int = 0, max_context_tokens: int | None = None, max_concurrent: int = 256) -> RolloutEngine:
        key = max_context_tokens, max_concurrent
        if key not in made:
            settings = VLLMConfig("vllm", max_context_tokens or 512, max_concurrent, options=LITTLE)
            made[key] = VLLMRollout(config, settings, seed=seed, dtype=torch.float32)
        engine = made[key]
        engine._seed, engine._ready = seed, False  # as if it were new
        return engine

    lm = load_causal_lm(str(model), config, torch.float32).eval()
    return Subject(build, lm, load_tokenizer(config), renormalises=True, tolerance=1e-4)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check, subject: Subject) -> None:
    check(subject)


def test_after_each_training_step_it_samples_with_the_trained_weights_and_not_those_of_before(
    model: Path, tmp_path: Path
) -> None:
    seen: list[tuple[Batch, Any]] = []

    @recipe("algorithm=grpo")
    def grpo_that_exports(run: Run) -> None:
        actor, reward = run.groups(Actor, Reward)
        for step in run.steps():
            greedy = actor.generate(run.prompts(), Sampling(temperature=0.0, max_new_tokens=8)).fetch()
            actor.export(tmp_path / f"step{step}")
            seen.append((greedy, load_causal_lm(str(tmp_path / f"step{step}"), ModelConfig(), torch.float32).eval()))
            batch = actor.generate(run.prompts(), run.sampling)
            batch |= reward.score(batch) | actor.old_log_probs(batch)
            run.record(batch, actor.update(batch | run.advantages(batch)))

    run = quick(model, tmp_path / "run", *WORDS, "run.steps=4", "training.lr=2e-2", driver=grpo_that_exports)
    for step, (greedy, trained) in enumerate(seen):
        assert set(greedy.ragged("policy_version").values.tolist()) == {step}
        assert errors(greedy, trained) < 1e-4
        assert step == 0 or errors(greedy, seen[step - 1][1]) > 1e-2
        for prompt, response in zip(greedy.ragged("prompt_ids"), greedy.ragged("response_ids"), strict=True):
            assert response.tolist() == greedy_by_transformers(trained, prompt, 8)[: len(response)]
    assert all(0 < row["rollout/logprob_difference_max"] < 1e-4 for row in run.metrics())


def errors(rollouts: Batch, model: Any) -> float:
    """The largest difference of a rollout's log-probabilities from the model's."""
    columns = (rollouts.ragged(name) for name in ("prompt_ids", "response_ids", "rollout_logprobs"))
    return max(
        float(np.abs(log_softmax_of(model, prompt, ids, 1.0)[range(len(ids)), ids.tolist()].numpy() - logprobs).max())
        for prompt, ids, logprobs in zip(*columns, strict=True)
    )


def test_a_run_repeats_bit_for_bit(model: Path, tmp_path: Path) -> None:
    for name in ("first", "again"):
        quick(model, tmp_path / name, *WORDS, "run.steps=2")
    assert numbers(tmp_path / "first") == numbers(tmp_path / "again")
    assert weights(tmp_path / "first") == weights(tmp_path / "again")


def test_two_ranks_on_ray_sample_with_an_engine_each(ray_cluster: None, model: Path, tmp_path: Path) -> None:
    run = quick(model, tmp_path / "run", *WORDS, "run.steps=2", "placement.actor=2")
    assert all(0 < row["rollout/logprob_difference_max"] < 1e-4 for row in run.metrics())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rollout.options.max_num_sequences=4",), r"rollout\.options\.max_num_sequences: vLLM has no such argument"),
        (("rollout.options.max_num_seqs=4",), r"rollout\.options\.max_num_seqs: say rollout\.max_concurrent"),
        (
            ("rollout.options.load_format=auto",),
            r"rollout\.options\.load_format: it is always dummy here; leave it out",
        ),
        (("rollout.memory_fraction=2",), r"rollout\.memory_fraction=2\.0: it is above 0 and at most 1"),
        (("rollout.max_context_tokens=99999",), r"rollout\.max_context_tokens=99999: the model was made for at most"),
    ],
)
def test_what_vllm_cannot_do_is_refused(model: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quick(model, tmp_path / "run", *WORDS[:1], *words)
