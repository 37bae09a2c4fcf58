"""Case 31: no key is read by nobody. Each key is changed, and something that a user can see must change, or be refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from hybridflow import Run, configure
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.recipes import grpo
from hybridflow.trainer.compose import all_keys
from hybridflow.trainer.recipe import execute
from tests.models import character_tokenizer, tiny_model_folder
from tests.runs import QUICK, numbers, weights

REWARDS = """
import multiprocessing, re, time

def digits(response: str):
    in_driver = multiprocessing.parent_process() is None
    return {"reward": len(re.findall(r"\\d", response)) / max(1, len(response)), "in_driver": in_driver}

def length(response: str) -> float:
    return len(response) / 10

def slow(response: str, answer: str) -> float:
    time.sleep(0.3 if answer == "slow" else 0.0)
    return float(len(response))

def fails_once_in_four(answer: str) -> float:
    return 1.0 / (answer != "0")

def as_shout(row: dict) -> dict:
    return {**row, "prompt": row["prompt"] + "!"}
"""
KL = ("algorithm.kl=loss", "algorithm.minibatches=2", "algorithm.kl_coef=0.5")
ADAPTIVE = ("algorithm.kl=reward", "algorithm.kl_target=0.01", "algorithm.kl_horizon=20", "run.steps=4")
MANY_STEPS = ("algorithm.minibatches=4", "algorithm.epochs=2", "training.lr=0.03")
LONG = ("data.path={folder}/long.jsonl",)
SAMPLED = ("validation.sampling.temperature=1.0",)
REFUSED = "refused"


@dataclass(frozen=True)
class Change:
    """One key set to another value over `base`; `sees` reads a run, None: its numbers, files, weights and console."""

    value: str
    base: tuple[str, ...] = ()
    sees: Callable[[Run], object] | str | None = None
    also: tuple[str, ...] = field(default=())  # set together with the key, when the key alone could not be


def deterministic(run: Run) -> bool:
    return torch.are_deterministic_algorithms_enabled()


def checkpointing(run: Run) -> object:
    """Whether activations are recomputed, as the layers themselves have it."""
    return run.stand["checkpointing"]  # type: ignore[attr-defined]


CHANGES: dict[str, Change] = {
    "sampling.n": Change("2"),
    "sampling.temperature": Change("0.7"),
    "sampling.top_p": Change("0.9", sees=REFUSED),
    "sampling.top_k": Change("5", sees=REFUSED),
    "sampling.min_p": Change("0.1", sees=REFUSED),
    "sampling.max_new_tokens": Change("3"),
    "sampling.stop": Change("['1']"),
    "sampling.banned_tokens": Change("[5,6,7,8,9,10,11,12]"),
    "algorithm.epochs": Change("2"),
    "algorithm.minibatches": Change("2"),
    "algorithm.aggregation": Change("sequence_mean_token_mean"),
    "algorithm.entropy_coef": Change("0.1"),
    "algorithm.kl": Change("loss"),
    "algorithm.kl_coef": Change("0.1", base=KL),
    "algorithm.kl_estimator": Change("k2", base=KL),
    "algorithm.kl_target": Change("0.02", base=ADAPTIVE),
    "algorithm.kl_horizon": Change("40", base=ADAPTIVE),
    "algorithm.kl_stop": Change("1e-9", base=MANY_STEPS),
    "algorithm.old_policy": Change("current"),
    "reward.functions": Change("[{folder}/rewards.py:length]"),
    "reward.weights": Change("[2.0]"),
    "reward.workers": Change("1"),
    "reward.timeout_s": Change(
        "0.05", base=("reward.functions=[{folder}/rewards.py:slow]", "reward.workers=1", "reward.max_error_fraction=1")
    ),
    "reward.max_error_fraction": Change(
        "0.1",
        base=("reward.functions=[{folder}/rewards.py:fails_once_in_four]", "reward.max_error_fraction=0.9"),
        sees=REFUSED,
    ),
    "reference.path": Change("{folder}/other", base=KL),
    "validation.sampling.n": Change("2", base=SAMPLED),
    "validation.sampling.temperature": Change("0.5"),
    "validation.sampling.top_p": Change("0.2"),
    "validation.sampling.top_k": Change("2"),
    "validation.sampling.min_p": Change("0.9"),
    "validation.sampling.max_new_tokens": Change("3"),
    "validation.sampling.stop": Change("['1']"),
    "validation.sampling.banned_tokens": Change("[5,6,7,8,9,10,11,12]"),
    "validation.every_steps": Change("1"),
    "validation.before_training": Change("false"),
    "validation.pass_at": Change("[1,2]", base=("validation.sampling.n=2",)),
    "validation.metric": Change("accuracy", sees=REFUSED),
    "validation.patience": Change(
        "1", base=("run.steps=6", "validation.every_steps=1", "training.lr=1e-9", "validation.sampling.temperature=0")
    ),
    "run.dir": Change("{folder}/elsewhere", sees=lambda run: run.folder.name),
    "run.seed": Change("1"),
    "run.steps": Change("3"),
    "run.epochs": Change("2", base=("run.steps=null",)),
    "run.max_hours": Change("1e-9"),
    "run.resume": Change("never", sees=lambda run: run.folder.with_name("run.1").exists()),
    "run.checkpoint_steps": Change("1", base=("validation.every_steps=0",)),
    "run.checkpoints_kept": Change("1", base=("run.checkpoint_steps=1", "run.steps=4", "validation.every_steps=0")),
    "run.export": Change("false"),
    "run.trackers": Change("[tensorboard]"),
    "run.completions_shown": Change("2"),
    "run.deterministic": Change("true", sees=deterministic),
    "model.path": Change("{folder}/other"),
    "model.tokenizer": Change("{folder}/reversed"),
    "model.chat_template": Change("{folder}/template.jinja"),
    "model.trust_remote_code": Change("true", base=("model.path={folder}/remote",), sees="error"),
    "model.attention": Change("flash", sees=REFUSED),
    "model.freeze": Change("['*embed*']"),
    "data.path": Change("{folder}/other.jsonl"),
    "data.task": Change("{'min_terms': 2, 'max_terms': 2}", base=("data.path=reasoning_gym:chain_sum",)),
    "data.kind": Change("examples", sees=REFUSED),
    "data.split": Change("more", base=("data.path={folder}/parts",)),
    "data.validation_path": Change("{folder}/other.jsonl"),
    "data.validation_split": Change("more", base=("data.validation_path={folder}/parts",)),
    "data.validation_rows": Change("2"),
    "data.prompt_key": Change("answer"),
    "data.format": Change("{folder}/rewards.py:as_shout"),
    "data.system_prompt": Change("Sum."),
    "data.rows_per_step": Change("2"),
    "data.max_prompt_tokens": Change("40", base=LONG),
    "data.overlong_prompt": Change("error", base=(*LONG, "data.max_prompt_tokens=40"), sees=REFUSED),
    "data.shuffle": Change("false"),
    "training.lr": Change("1e-3"),
    "training.lr_schedule": Change("cosine"),
    "training.warmup_steps": Change("2", base=("training.lr_schedule=constant_with_warmup",)),
    "training.weight_decay": Change("0.5"),
    "training.adam_betas": Change("[0.5,0.6]"),
    "training.grad_clip": Change("1e-4"),
    "training.precision": Change("bf16"),
    "training.tokens_per_microbatch": Change("64"),
    "training.activation_checkpointing": Change("true", sees=checkpointing),
    "rollout.max_context_tokens": Change("35", base=("data.max_prompt_tokens=34",)),
    "rollout.max_concurrent": Change("2"),
    "advantage.normalize_std": Change("false"),
    "advantage.baseline": Change("none", base=("advantage=reinforce",)),
    "loss.clip_low": Change("1e-4", base=MANY_STEPS),
    "loss.clip_high": Change("1e-4", base=MANY_STEPS),
    "loss.dual_clip": Change("1.001", base=MANY_STEPS),
}
