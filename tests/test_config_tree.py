"""The keys of the configuration: all documented, each of them does something, and only where it says."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.engines import Sampling
from hybridflow.trainer.compose import all_keys
from hybridflow.trainer.config import (
    CriticConfig,
    DataConfig,
    PlacementConfig,
    ReferenceConfig,
    RunConfig,
    SamplingConfig,
    ValidationConfig,
    compose,
    resolved,
    to_yaml,
)
from hybridflow.trainer.tree import leaves
from hybridflow.workers.models.config import ModelConfig
from hybridflow.workers.rollout.config import TransformersConfig, VLLMConfig
from hybridflow.workers.scoring import RewardConfig
from hybridflow.workers.training.config import OptimizerConfig

pytestmark = pytest.mark.unit

NODES = (
    ModelConfig,
    DataConfig,
    SamplingConfig,
    OptimizerConfig,
    TransformersConfig,
    VLLMConfig,
    AlgorithmConfig,
    RewardConfig,
    CriticConfig,
    ReferenceConfig,
    ValidationConfig,
    PlacementConfig,
    RunConfig,
)
BASE = ["model=smollm2", "data=arithmetic"]

# key -> another value, and what else must be said for something to read it
CHANGES = {
    "model.path": "folder",
    "model.tokenizer": "folder",
    "model.chat_template": "chat.jinja",
    "model.trust_remote_code": "true",
    "model.attention": "sdpa",
    "model.freeze": "[visual.*]",
    "data.path": "rows.jsonl",
    "data.task": "{min_terms: 3} data.path=reasoning_gym:chain_sum",
    "data.kind": "examples",
    "data.split": "all",
    "data.validation_path": "rows.jsonl",
    "data.validation_split": "held_out",
    "data.validation_rows": "7",
    "data.prompt_key": "question",
    "data.format": "my.py:fn",
    "data.system_prompt": "Think, then answer.",
    "data.rows_per_step": "7",
    "data.max_prompt_tokens": "7",
    "data.overlong_prompt": "error",
    "data.shuffle": "false",
    "sampling.n": "7",
    "sampling.temperature": "0.7",
    "sampling.top_p": "0.7 algorithm=sft",
    "sampling.top_k": "7 algorithm=sft",
    "sampling.min_p": "0.1 algorithm=sft",
    "sampling.max_new_tokens": "7",
    "sampling.stop": "['</s>',7]",
    "sampling.banned_tokens": "[7]",
    "training.lr": "7e-7",
    "training.lr_schedule": "linear",
    "training.warmup_steps": "7",
    "training.weight_decay": "0.1",
    "training.adam_betas": "[0.8,0.9]",
    "training.grad_clip": "0.7",
    "training.precision": "fp32",
    "training.tokens_per_microbatch": "7",
    "training.activation_checkpointing": "false",
    "training.shard_size": "7",
    "training.sequence_parallel": "7",
    "rollout.max_context_tokens": "7000",
    "rollout.max_concurrent": "7",
    "rollout.memory_fraction": "0.7 rollout=vllm",
    "rollout.options": "{max_num_batched_tokens: 9} rollout=vllm",
    "advantage.normalize_std": "false",
    "advantage.baseline": "none advantage=reinforce",
    "advantage.gamma": "0.9 advantage=gae",
    "advantage.lam": "0.9 advantage=gae",
    "advantage.whiten": "false advantage=gae",
    "loss.clip_low": "0.1",
    "loss.clip_high": "0.3",
    "loss.dual_clip": "null",
    "loss.clip_value": "0.1 loss=value_clip",
    "loss.centering": "0.1 loss=bradley_terry",
    "algorithm.epochs": "7",
    "algorithm.minibatches": "7",
    "algorithm.aggregation": "group_mean",
    "algorithm.entropy_coef": "0.1",
    "algorithm.kl": "loss",
    "algorithm.kl_coef": "0.1 algorithm.kl=loss",
    "algorithm.kl_estimator": "k2 algorithm.kl=loss",
    "algorithm.kl_target": "0.1 algorithm.kl=reward",
    "algorithm.kl_horizon": "7 algorithm.kl=reward algorithm.kl_target=1",
    "algorithm.kl_stop": "0.1 algorithm.epochs=2",
    "algorithm.old_policy": "rollout",
    "algorithm.critic_warmup_steps": "7",
    "reward.functions": "[exact,math]",
    "reward.weights": "[0.5] reward.functions=math",
    "reward.model": "folder algorithm=reward_model",
    "reward.workers": "0",
    "reward.timeout_s": "7",
    "reward.max_error_fraction": "0.1",
    "critic.path": "folder",
    "critic.clip_value": "null",
    "reference.path": "folder algorithm.kl=loss",
    "validation.sampling.n": "7",
    "validation.sampling.temperature": "0",
    "validation.sampling.top_p": "0.7",
    "validation.sampling.top_k": "7",
    "validation.sampling.min_p": "0.1",
    "validation.sampling.max_new_tokens": "7",
    "validation.sampling.stop": "[7]",
    "validation.sampling.banned_tokens": "[7]",
    "validation.every_steps": "7",
    "validation.before_training": "false",
    "validation.pass_at": "[1,7] validation.sampling.n=7",
    "validation.metric": "pass@1",
    "validation.patience": "7",
    "run.dir": "runs/x=1, y",
    "run.seed": "7",
    "run.steps": "7",
    "run.epochs": "7",
    "run.max_hours": "0.5",
    "run.resume": "never",
    "run.checkpoint_steps": "7",
    "run.checkpoints_kept": "7",
    "run.export": "false",
    "run.trackers": "[]",
    "run.completions_shown": "0",
    "run.deterministic": "true",
    "run.runtime": "ray",
    "run.call_timeout_s": "60",
    "run.start_timeout_s": "60",
    "run.debug": "actor:1",
    "placement.actor": "2",
    "placement.critic": "1",
    "placement.reference": "all algorithm.kl=loss",
    "placement.reward_model": "critic reward.model=scorer reward.functions=[model]",
}
CHANGES |= {f"critic.{key}": change for key, change in CHANGES.items() if key.startswith("training.")}
FREE_TEXT = ("data.system_prompt", "run.dir")


def flat(words: list[str]) -> dict[str, Any]:
    return dict(leaves(resolved(compose(words))))


def test_every_key_is_tried_here_and_there_are_few() -> None:
    assert sorted(CHANGES) == sorted(all_keys())
    assert len(all_keys()) < 150


@pytest.mark.parametrize("key", CHANGES)
def test_a_key_changes_itself_and_what_follows_it(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text("def fn(row): return row")
    value, *context = [CHANGES[key]] if key in FREE_TEXT else re.split(r" (?=[\w.]+=)", CHANGES[key])
    before, after = flat([*BASE, *context]), flat([*BASE, *context, f"{key}={value}"])
    changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)}
    follower = {f"validation.{key}"} if key.startswith("sampling.") and key != "sampling.n" else set()
    follower |= {f"critic.{key}"} if key.startswith("training.") else set()
    own = {k for k in changed if k == key or k.startswith(f"{key}.")}
    assert own
    assert changed == own | follower


@pytest.mark.parametrize("node", NODES, ids=lambda node: node.__name__)
def test_every_key_is_documented_in_its_dataclass(node: type) -> None:
    body = ast.parse(textwrap.dedent(inspect.getsource(node))).body[0]
    assert isinstance(body, ast.ClassDef)
    documented = {
        before.target.id
        for before, after in itertools.pairwise(body.body)
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
    assert {field.name for field in dataclasses.fields(node)} - {"engine"} == documented


def test_the_documentation_shows_every_node_s_dataclass() -> None:
    text = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
    shown = re.findall(r"^::: (.*)$", text, re.MULTILINE)
    assert set(shown) == {f"{node.__module__}.{node.__qualname__}" for node in NODES}


def test_validation_follows_sampling_until_it_is_set_apart() -> None:
    config = compose([*BASE, "sampling.temperature=0.7", "sampling.stop=[a]", "validation.sampling.max_new_tokens=9"])
    followed = config.validation.sampling
    assert (followed.n, followed.temperature, followed.stop, followed.max_new_tokens) == (1, 0.7, ["a"], 9)
    assert (config.sampling.n, config.sampling.max_new_tokens) == (8, 512)
    apart = compose([*BASE, "sampling.temperature=0.7", "validation.sampling.temperature=0"])
    assert apart.validation.sampling.temperature == 0


def test_the_critic_follows_training_until_it_is_set_apart() -> None:
    config = compose([*BASE, "training.lr=1e-3", "training.adam_betas=[0.5,0.6]", "critic.training.warmup_steps=9"])
    assert config.critic.training.lr == 1e-3 and config.critic.training.adam_betas == [0.5, 0.6]
    assert (config.training.warmup_steps, config.critic.training.warmup_steps) == (0, 9)
    assert isinstance(config.critic.training, type(config.training))
    apart = compose([*BASE, "training.lr=1e-3", "critic.training.lr=1e-4"])
    assert (apart.training.lr, apart.critic.training.lr) == (1e-3, 1e-4)


def test_sampling_is_what_the_engines_take() -> None:
    config = compose([*BASE, "sampling.stop=['</s>',2]", "sampling.banned_tokens=[5]", "sampling.n=3"])
    assert config.sampling.sampling() == Sampling(n=3, stop=("</s>", 2), banned_tokens=(5,))


def test_the_yaml_of_a_configuration_reads_back_as_the_same_values() -> None:
    config = compose([*BASE, "loss=reinforce", "data.system_prompt=1e-6: yes, no", "training.lr=1e-6"])
    assert OmegaConf.to_container(OmegaConf.create(to_yaml(config))) == resolved(config)
    assert "options" not in resolved(config)


def test_composing_imports_neither_torch_nor_the_engines() -> None:
    code = (
        "import sys; from hybridflow.trainer.config import compose, printable; printable([]); "
        "compose(['model=smollm2', 'data=gsm8k', 'reward.functions=math']); "
        "sys.exit(sum(name in sys.modules for name in ('torch', 'transformers', 'ray', 'datasets', 'reasoning_gym')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
