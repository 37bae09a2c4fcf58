"""Checks of a whole configuration, made before any process starts. Each message names the keys and the remedy.

A node that can judge its own values does so in its dataclass; here are the ranges of the others, and everything that
takes two keys to see.
"""

from __future__ import annotations

import math
from functools import reduce
from pathlib import Path
from typing import Any

from ..algorithms.objective import check_old_policy
from ..algorithms.registry import Loss, resolve
from ..engines import check_sampling
from ..errors import ConfigError, did_you_mean
from ..workers.scoring import COMPONENTS, check_names
from .data_config import DataConfig
from .data_sources import FUNCTION
from .placement import RUNTIMES, debugged, runtime_of
from .tasks import GYM, check_task
from .tree import Config, leaves, resolved

CHOICES: dict[str, tuple[str, ...]] = {
    "model.attention": ("auto", "sdpa", "flash"),
    "data.kind": ("prompts", "examples", "pairs"),
    "data.overlong_prompt": ("drop", "error"),
    "run.runtime": RUNTIMES,
}
AT_LEAST: dict[str, float] = {
    "data.validation_rows": 1,
    "data.rows_per_step": 1,
    "data.max_prompt_tokens": 1,
    "validation.every_steps": 0,
    "validation.patience": 1,
    "run.seed": 0,
    "run.steps": 1,
    "run.epochs": 1,
    "run.max_hours": 0,
    "run.checkpoint_steps": 0,
    "run.checkpoints_kept": 1,
    "run.completions_shown": 0,
    "run.call_timeout_s": 0,
    "run.start_timeout_s": 1,
}
SAMPLING_ONLY_IN_VALIDATION = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}  # key -> the value that leaves it out


def check(config: Config) -> None:
    """Everything that can be seen without data, model or roles. Errors: ConfigError."""
    _check_ranges(config)
    check_sampling(config.sampling, "sampling")
    check_sampling(config.validation.sampling, "validation.sampling")
    check_task(config.data.path, config.data.task)
    _check_plugins(config)
    if config.data.kind == "prompts":
        _check_training_samples(config)
        _check_context(config)
    _check_steps(config)
    _check_validation(config)
    _check_resume(config.run.resume)
    debugged(config.run.debug)
    if config.run.runtime == "inline":
        runtime_of(config)


def check_warmup(config: Config, steps: int) -> None:
    """Errors: ConfigError if a run of so many steps ends before the policy begins to learn."""
    warmup = config.algorithm.critic_warmup_steps
    if warmup >= steps:
        raise ConfigError(
            f"algorithm.critic_warmup_steps={warmup}, but the run has {steps} steps: the policy would never learn. "
            "Lower the one, or raise run.steps or run.epochs."
        )


def _check_ranges(config: Config) -> None:
    for key, value in leaves(resolved(config)):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{key}={value}: a finite number is needed.")
    for key, legal in CHOICES.items():
        value = _at(config, key)
        if value not in legal:
            raise ConfigError(f"{key}={value}: it is one of {', '.join(legal)}.{did_you_mean(value, legal)}")
    for key, least in AT_LEAST.items():
        value = _at(config, key)
        if value is not None and value < least:
            raise ConfigError(f"{key}={value}: it is at least {least:g}.")


def _check_plugins(config: Config) -> None:
    """Every function that the configuration names is there."""
    functions, weights = config.reward.functions, config.reward.weights
    for spec in functions:
        if spec not in COMPONENTS:
            resolve(spec, "reward")
    if "model" in functions and config.reward.model is None:
        raise ConfigError("reward.functions names model, but reward.model is not set: say reward.model=PATH.")
    if functions and weights and len(weights) != len(functions):
        raise ConfigError(
            f"reward.weights has {len(weights)} values, reward.functions has {len(functions)}: give one each, or none "
            "for all 1."
        )
    check_names([spec.rpartition(":")[2] for spec in functions])
    for spec in config.run.trackers:
        resolve(spec, "tracker")
    _check_data_functions(config.data)


def _check_data_functions(data: DataConfig) -> None:
    for key, path in (("data.path", data.path), ("data.validation_path", data.validation_path)):
        if path is not None and FUNCTION.fullmatch(path) and not path.startswith(GYM):
            resolve(path, key)
    if data.format is not None:
        if ":" not in data.format:
            raise ConfigError(f"data.format={data.format}: write package.module:name or path/to/file.py:name.")
        resolve(data.format, "data.format")


def _check_training_samples(config: Config) -> None:
    """Training samples come from the distribution that the trainer's log-probs describe."""
    for key, off in SAMPLING_ONLY_IN_VALIDATION.items():
        value = getattr(config.sampling, key)
        if value != off:
            raise ConfigError(
                f"sampling.{key}={value}: {key} is for validation, validation.sampling.{key}={value}. In training its "
                f"effect on the log-probs would need a correction; leave sampling.{key}={off}."
            )
    if config.sampling.temperature == 0:
        raise ConfigError(
            "sampling.temperature=0 is greedy: all samples of a prompt would be equal, and the trainer divides its "
            "logits by it. Set it above 0; for greedy validation say validation.sampling.temperature=0."
        )
    if config.advantage.name == "grpo" and config.sampling.n < 2:
        raise ConfigError(
            f"advantage=grpo compares samples of one prompt, but sampling.n={config.sampling.n}: every advantage would "
            "be 0. Set sampling.n>=2, or advantage=reinforce."
        )


def _check_context(config: Config) -> None:
    context, prompt = config.rollout.max_context_tokens, config.data.max_prompt_tokens
    if context is not None and context <= prompt:
        raise ConfigError(
            f"rollout.max_context_tokens={context} is prompt and response together, but data.max_prompt_tokens="
            f"{prompt} leaves no room for a response: raise the one or lower the other."
        )


def _check_steps(config: Config) -> None:
    algorithm, rows, n = config.algorithm, config.data.rows_per_step, config.sampling.n
    if config.data.kind == "prompts":
        total, what = rows * n, f"{rows * n} rollouts (data.rows_per_step={rows} prompts x sampling.n={n})"
    else:
        total, what = rows, f"{rows} rows (data.rows_per_step={rows})"
    if algorithm.minibatches > total:
        raise ConfigError(f"algorithm.minibatches={algorithm.minibatches} optimizer steps, but a step has only {what}.")
    check_old_policy(Loss(config.loss.name, **config.loss.options), algorithm)


def _check_validation(config: Config) -> None:
    validation = config.validation
    for k in validation.pass_at:
        if not 1 <= k <= validation.sampling.n:
            raise ConfigError(
                f"validation.pass_at={validation.pass_at}: pass@{k} needs {k} samples of each prompt, but "
                f"validation.sampling.n={validation.sampling.n}. Set validation.sampling.n={max(k, 1)}, or drop {k}."
            )
    if validation.patience is not None and validation.every_steps == 0:
        raise ConfigError(
            f"validation.patience={validation.patience} counts validations, but validation.every_steps=0 makes none: "
            "set validation.every_steps."
        )


def _check_resume(resume: str) -> None:
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        raise ConfigError(
            f"run.resume={resume}: it is auto, never or a checkpoint folder, and there is no folder {resume}."
            f"{did_you_mean(resume, ('auto', 'never'))}"
        )


def _at(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)
