"""The transformers rollout engine: the contract of all engines, and what is its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow import Actor, Reward, Run, recipe
from hybridflow.batch import Batch
from hybridflow.columns import FinishReason, Ragged
from hybridflow.engines import ParameterShard, RolloutEngine, Sampling
from hybridflow.errors import ConfigError, EngineError, ModelError
from hybridflow.workers.models.config import ModelConfig
from hybridflow.workers.models.loading import load_causal_lm, load_tokenizer
from hybridflow.workers.rollout.config import TransformersConfig
from hybridflow.workers.rollout.transformers import TransformersRollout
from tests import rollout_contract as contract
from tests.models import tiny_model_folder
from tests.rollout_contract import CHECKS, GREEDY, Check, Subject, drain, prompts_of, reasons, responses, shards_of
from tests.runs import quick

pytestmark = pytest.mark.unit


class Models:
    """Tiny models by the options of `tiny_model_folder`, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._subjects: dict[str, Subject] = {}

    def subject(self, family: str = "qwen2", **options: Any) -> Subject:
        name = "-".join([family, *(f"{key}={value}" for key, value in options.items())])
        if name not in self._subjects:
            self._subjects[name] = _subject(tiny_model_folder(self._folder / name, family, **options))
        return self._subjects[name]


def _subject(folder: Path) -> Subject:
    config = ModelConfig(path=str(folder))

    def build(**options: Any) -> RolloutEngine:
        return engine_over(folder, **options)

    return Subject(build, load_causal_lm(str(folder), config, torch.float32).eval(), load_tokenizer(config))


def engine_over(
    folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any
) -> TransformersRollout:
    return TransformersRollout(ModelConfig(path=str(folder)), TransformersConfig(**options), seed=seed, dtype=dtype)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def subject(models: Models) -> Subject:
    return models.subject()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Check, subject: Subject) -> None:
    check(subject)


@pytest.mark.parametrize(
    "options", [{"family": "qwen3"}, {"family": "llama"}, {"family": "qwen2", "tied": False}], ids=str
)
def test_other_families_sample_as_transformers_does(models: Models, options: dict[str, Any]) -> None:
    subject = models.subject(**options)
    contract.greedy_equals_transformers_token_for_token(subject)
    contract.case_06_rollout_logprobs_are_the_model_s_at_the_sampling_temperature(subject)
    contract.few_rows_at_a_time_give_the_same_as_all_at_once(subject)


def test_heads_that_share_no_key_head_sample_as_transformers_does(models: Models) -> None:
    contract.greedy_equals_transformers_token_for_token(models.subject(heads=4, kv_heads=4))


# ---- weights
def test_whole_tensors_are_adopted_without_a_copy(subject: Subject) -> None:
    engine = subject.started()
    mine = dict(engine.model.named_parameters())
    for shard in shards_of(subject.model):
        assert mine[shard.name].data_ptr() == shard.tensor.data_ptr()
    assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight


def test_a_release_keeps_no_tensor_and_counts_what_other_ranks_sent(subject: Subject) -> None:
    engine = subject.build()
    engine.sync([replace(shard, received=3) for shard in shards_of(subject.model)], 1)
    assert engine.received_bytes == 3 * len(shards_of(subject.model))
    engine.release()
    assert {parameter.device.type for parameter in engine.model.parameters()} == {"meta"}
    assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight
    engine.sync(shards_of(subject.model), 1)
    assert engine.received_bytes == 0


def test_case_21_generation_copies_are_made_once_a_version_and_gone_before_training_goes_on(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, held = list[int](), list[bool]()
    sync = TransformersRollout.sync

    def counted(engine: TransformersRollout, shards: Iterable[ParameterShard], version: int) -> None:
        synced.append(version)
        sync(engine, shards, version)

    monkeypatch.setattr(TransformersRollout, "sync", counted)

    @recipe("algorithm=grpo")
    def watched(run: Run) -> None:
        actor, reward = run.groups(Actor, Reward)

        def look() -> None:
            held.extend(actor.on_ranks(lambda rank: not any(p.is_meta for p in rank._rollout.model.parameters())))

        for _ in run.steps():
            actor.generate(run.prompts(), run.sampling)
            batch = actor.generate(run.prompts(), run.sampling)
            look()
            batch |= reward.score(batch) | actor.old_log_probs(batch)
            look()
            batch |= run.advantages(batch)
            run.record(batch, actor.update(batch))
            look()

    quick(tiny_model, tmp_path / "run", "run.steps=2", "training.precision=bf16", driver=watched)
    assert synced == [0, 1]
    assert held == [True, False, False] * 2


def test_an_in_place_update_of_adopted_weights_is_seen_at_once(models: Models) -> None:
    subject = models.subject(seed=1)
    engine = subject.started()
    before = engine.generate(prompts_of(), GREEDY)
    with torch.no_grad():
        for parameter in subject.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)), alpha=0.05)
    assert responses(engine.generate(prompts_of(), GREEDY)) != responses(before)
    contract.greedy_equals_transformers_token_for_token(subject)


def test_master_weights_are_cast_to_the_engine_s_type(subject: Subject) -> None:
    folder = subject.model.config._name_or_path
    engine = engine_over(folder, dtype=torch.bfloat16)
    engine.sync(shards_of(subject.model), 1)
    assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.bfloat16}
    rollouts = engine.generate(prompts_of(), Sampling(n=2, max_new_tokens=8))
    for prompt, response, logprobs in contract.each(prompts_of(), rollouts, 2):
        expected = contract.log_softmax_of(subject.model, prompt, response, 1.0)[
            range(len(response)), response.tolist()
        ]
        np.testing.assert_allclose(logprobs, expected, atol=0.2)


def test_case_20_weights_in_a_reused_buffer_are_refused(subject: Subject) -> None:
    shards = shards_of(subject.model)
    norms = [shard for shard in shards if shard.name.endswith("layernorm.weight")][:2]
    reused = [replace(shard, tensor=norms[0].tensor) if shard is norms[1] else shard for shard in shards]
    with pytest.raises(EngineError, match="a buffer was reused"):
        subject.started().sync(reused, 2)


def test_part_of_a_parameter_is_refused(subject: Subject) -> None:
    whole = shards_of(subject.model)
    half = ParameterShard(whole[0].name, whole[0].shape, (0, 0), whole[0].tensor[:50])
    with pytest.raises(EngineError, match=r"embed_tokens\.weight' came in part"):
        subject.started().sync([half, *whole[1:]], 2)


def test_a_parameter_that_comes_twice_is_refused(subject: Subject) -> None:
    whole = shards_of(subject.model)
    with pytest.raises(EngineError, match="came twice"):
        subject.started().sync([*whole, replace(whole[0], tensor=whole[0].tensor.clone())], 2)


def test_rollouts_in_flight_go_on_over_a_sync_and_say_which_version_sampled_each_token(subject: Subject) -> None:
    engine = subject.started(max_concurrent=2)
    engine.submit(prompts_of([5]), replace(GREEDY, max_new_tokens=3))
    engine.submit(prompts_of([5], first_group=1), Sampling(n=3, max_new_tokens=10))
    stream = engine.completed()
    next(stream)
    engine.sync(shards_of(subject.model), 2)
    versions = {tuple(row) for part in stream for row in part.ragged("policy_version")}
    assert versions == {(1,) * 3 + (2,) * 7, (2,) * 10}


def test_samples_that_wait_over_a_sync_start_from_the_new_weights(subject: Subject) -> None:
    engine, prompts = subject.started(max_concurrent=1), prompts_of([9])
    changed = [replace(shard, tensor=shard.tensor.roll(1, 0)) for shard in shards_of(subject.model)]
    engine.submit(prompts, replace(GREEDY, n=2))
    stream = engine.completed()
    before = responses(next(stream))
    engine.sync(changed, 2)
    after = [ids for part in stream for ids in responses(part)]
    assert before == responses(subject.started().generate(prompts, GREEDY))
    assert after == responses(engine.generate(prompts, GREEDY)) != before


def test_a_failed_sync_stops_rollouts_in_flight_and_a_good_one_lets_them_go_on(subject: Subject) -> None:
    engine = subject.started()
    engine.submit(prompts_of(), GREEDY)
    with pytest.raises(EngineError, match="did not come"):
        engine.sync([], 2)
    with pytest.raises(EngineError, match="sync it"):
        next(engine.completed())
    engine.sync(shards_of(subject.model), 3)
    assert responses(drain(engine)) == responses(subject.started().generate(prompts_of(), GREEDY))


def test_case_10_nan_in_one_row_ends_that_row_with_its_tokens_and_no_other(models: Models) -> None:
    subject = models.subject(tied=False)
    free = responses(subject.started().generate(prompts_of(), GREEDY))
    poison = free[3][6]
    weights = {shard.name: shard.tensor.clone() for shard in shards_of(subject.model)}
    weights["model.embed_tokens.weight"][poison] = torch.nan
    engine = subject.build(max_concurrent=4)
    engine.sync([replace(shard, tensor=weights[shard.name]) for shard in shards_of(subject.model)], 1)
    prompts = prompts_of()
    rollouts = engine.generate(prompts, GREEDY)
    for prompt, whole, cut, reason in zip(
        prompts.ragged("prompt_ids"), free, responses(rollouts), reasons(rollouts), strict=True
    ):
        fed = [*prompt.tolist(), *whole[:-1]]
        bad = [max(0, at - len(prompt) + 1) for at, token in enumerate(fed) if token == poison]
        assert cut == (whole[: bad[0]] if bad else whole)
        assert reason == (FinishReason.ERROR if bad else FinishReason.LENGTH)
    assert FinishReason.LENGTH in reasons(rollouts)


def test_case_10_a_slot_that_held_nan_does_not_spoil_its_next_row(models: Models) -> None:
    subject = models.subject(tied=False)
    poison, (first, second, third) = 99, prompts_of([20, 39, 3]).ragged("prompt_ids")
    ids = Ragged.from_rows([first, np.append(second, poison), third])  # NaN lies behind what the third row will reach
    prompts = Batch({"prompt_ids": ids, "group_id": np.arange(3)})
    weights = {shard.name: shard.tensor.clone() for shard in shards_of(subject.model)}
    weights["model.embed_tokens.weight"][poison] = torch.nan
    engine = subject.build(max_concurrent=2)
    engine.sync([replace(shard, tensor=weights[shard.name]) for shard in shards_of(subject.model)], 1)
    plan = replace(GREEDY, max_new_tokens=30, banned_tokens=(poison,))
    healthy = subject.started().generate(prompts.take([0, 2]), plan)
    rollouts = engine.generate(prompts, plan)
    assert responses(rollouts) == [responses(healthy)[0], [], responses(healthy)[1]]
    assert reasons(rollouts)[1] == FinishReason.ERROR


# ---- batching
def test_samples_of_a_group_share_one_prefill(subject: Subject) -> None:
    engine, seen = subject.started(), list[int]()
    hook = engine.model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    engine.generate(prompts_of([30]), Sampling(n=8, max_new_tokens=5))
    hook.remove()
    assert seen == [29] + [8] * 5  # the prompt's last token is decoded, once a sample


def test_a_group_larger_than_the_batch_is_prefilled_once(subject: Subject) -> None:
    engine, seen = subject.started(max_concurrent=3), list[int]()
    hook = engine.model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    engine.generate(prompts_of([30]), Sampling(n=8, max_new_tokens=2))
    hook.remove()
    assert seen == [29] + [3, 3] * 2 + [2, 2]


def test_rows_that_ended_take_no_part_in_a_step(subject: Subject) -> None:
    engine, seen = subject.started(), list[int]()
    for group, tokens in enumerate((2, 5, 3)):
        engine.submit(prompts_of([1], first_group=group), replace(GREEDY, max_new_tokens=tokens))
    hook = engine.model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0].numel()))
    drain(engine)
    hook.remove()
    assert seen == [3, 3, 2, 1, 1]


def test_rollouts_of_different_sampling_share_a_batch(subject: Subject) -> None:
    plans = (GREEDY, Sampling(n=2, temperature=0.7, max_new_tokens=9), Sampling(banned_tokens=(5,), max_new_tokens=7))
    alone, engine = [], subject.started()
    for group, plan in enumerate(plans):
        alone += responses(subject.started().generate(prompts_of([8, 3], first_group=2 * group), plan))
        engine.submit(prompts_of([8, 3], first_group=2 * group), plan)
    assert responses(drain(engine)) == alone


def test_a_slow_reader_loses_nothing(subject: Subject) -> None:
    engine = subject.started()
    engine.submit(prompts_of(), GREEDY)
    seen = [next(engine.completed()).array("group_id").tolist()]
    seen += [part.array("group_id").tolist() for part in engine.completed()]
    assert sorted(group for part in seen for group in part) == list(range(6))


def test_long_prompts_are_prefilled_in_several_forwards(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = responses(subject.started().generate(prompts_of(), GREEDY))
    monkeypatch.setattr("hybridflow.workers.rollout.transformers.PREFILL_TOKENS", 16)
    assert responses(subject.started().generate(prompts_of(), GREEDY)) == expected


# ---- limits
def test_a_context_longer_than_the_model_s_is_refused(subject: Subject) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.max_context_tokens=5000.* 4096"):
        subject.build(max_context_tokens=5000)


def test_a_sliding_window_inside_the_context_is_refused(models: Models) -> None:
    options = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    subject = models.subject(**options)
    with pytest.raises(ModelError, match=r"rollout\.max_context_tokens=16"):
        subject.build()
    prompts = prompts_of([3, 6])
    rollouts = subject.started(max_context_tokens=16).generate(prompts, replace(GREEDY, max_new_tokens=9))
    expected = [contract.greedy_by_transformers(subject.model, prompt, 9) for prompt in prompts.ragged("prompt_ids")]
    assert responses(rollouts) == expected


def test_a_banned_token_outside_the_vocabulary_is_refused(subject: Subject) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.banned_tokens: \[100\]"):
        subject.started().submit(prompts_of(), Sampling(banned_tokens=(3, 100)))


def test_no_rollout_at_a_time_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.max_concurrent=0"):
        TransformersConfig(max_concurrent=0)
