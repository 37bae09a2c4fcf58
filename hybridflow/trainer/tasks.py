"""Keys of `data.task`: those of the reasoning-gym task's own configuration, read off it and checked by it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..errors import ConfigError, did_you_mean

GYM = "reasoning_gym:"


def check_task(path: str, task: Mapping[str, Any]) -> None:
    """The task that `path` names exists and takes these keys and values; other data has no task keys at all.

    Errors: ConfigError naming the key, the task's keys, or what the task itself says against a value.
    """
    if not path.startswith(GYM):
        for key in task:
            raise ConfigError(
                f"data.task.{key} is set, but data.path={path} reads it nowhere: data.task.* is for "
                f"data.path={GYM}TASK."
            )
        return
    name = path.removeprefix(GYM)
    config_class = _configurations(path).get(name)
    if config_class is None:
        raise ConfigError(f"data.path={path}: no such task.{did_you_mean(name, _configurations(path))}")
    keys = [each.name for each in fields(config_class)]
    for key in task:
        if key not in keys:
            raise ConfigError(
                f"data.task.{key}: {path} has no such key.{did_you_mean(key, keys)} Its keys: {', '.join(keys)}."
            )
    _check_values(path, config_class, task)


def _configurations(path: str) -> dict[str, type]:
    """Task name -> its configuration dataclass."""
    try:
        importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(f"data.path={path} needs reasoning-gym: pip install reasoning-gym.") from error
    datasets = importlib.import_module("reasoning_gym.factory").DATASETS
    return {name: config_class for name, (_, config_class) in datasets.items()}


def _check_values(path: str, config_class: type, task: Mapping[str, Any]) -> None:
    """Let the task judge its values; it does so with assertions. A few tasks judge nothing."""
    validate = getattr(config_class(**task), "validate", None)
    if validate is None:
        return
    try:
        validate()
    except (AssertionError, TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value}" for key, value in task.items()) or "its defaults"
        raise ConfigError(f"data.task: {path} refuses {given}: {error}") from error
