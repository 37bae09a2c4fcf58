"""Going on where a run stopped: from which checkpoint, whether it is this run's, what the driver has to remember."""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .checkpoint import Checkpoints, verify

DRIVER_FILE = "driver.pkl"
FREE = (  # may differ between a run and its resumption: they change how a run goes, not what it computes
    "run.",
    "validation.",
    "rollout.",
    "data.validation_",
    "reward.workers",
    "reward.timeout_s",
    "reward.max_error_fraction",
    "training.tokens_per_microbatch",
    "training.activation_checkpointing",
)
BOUND = ("run.seed", "run.deterministic")  # exceptions to FREE


@dataclass(frozen=True)
class DriverState:
    """All that the controller itself must remember; weights and optimizer are the workers' own files."""

    step: int
    config: dict[str, Any]
    data: str
    cursor: dict[str, Any]
    handles: dict[str, dict[str, Any]]
    stateful: dict[str, Any]
    metrics_bytes: int
    seconds: float
    random: Any
    numpy: Any

    def write(self, checkpoint: Path) -> None:
        with (checkpoint / DRIVER_FILE).open("wb") as file:
            pickle.dump(self, file)

    @staticmethod
    def read(checkpoint: Path) -> DriverState:
        with (checkpoint / DRIVER_FILE).open("rb") as file:
            state = pickle.load(file)
        if not isinstance(state, DriverState):
            raise CheckpointError(f"{checkpoint / DRIVER_FILE} is not a run's state.")
        return state

    def restore_random(self) -> None:
        """The driver's own random generators, which a user's code may draw from."""
        random.setstate(self.random)
        np.random.set_state(self.numpy)


def checkpoint_to_resume(resume: str, checkpoints: Checkpoints) -> Path | None:
    """The verified checkpoint that run.resume names. Errors: CheckpointError if it isn't there, or damaged."""
    if resume == "never":
        return None
    found = checkpoints.latest() if resume == "auto" else Path(resume)
    if found is not None:
        verify(found)
    return found


def check_same_run(saved: DriverState, config: Mapping[str, Any], data: str, checkpoint: Path) -> None:
    """Errors: CheckpointError listing every key by which the checkpoint's run differs in what it computes."""
    old, new = flat(saved.config), flat(config)
    differing = [key for key in sorted(old.keys() | new.keys()) if not _free(key) and old.get(key) != new.get(key)]
    lines = [f"{key}: {old.get(key, 'unset')} there, {new.get(key, 'unset')} here" for key in differing]
    if saved.data != data:
        lines.append("the training data's content")
    if lines:
        raise CheckpointError(
            f"{checkpoint} belongs to a run with another setting:\n  "
            + "\n  ".join(lines)
            + "\nGive the same settings "
            "to go on, another run.dir for a new run, or run.resume=never to start over (the old folder is kept aside)."
        )


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested configuration as {"model.path": ...}."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


def move_aside(folder: Path) -> Path:
    """Rename a folder to the first free `folder.N`; nothing of an earlier run is ever overwritten."""
    number = next(n for n in range(1, 1_000_000) if not folder.with_name(f"{folder.name}.{n}").exists())
    return Path(shutil.move(folder, folder.with_name(f"{folder.name}.{number}")))


def random_state() -> tuple[Any, Any]:
    """Python's and numpy's generators, for DriverState."""
    return random.getstate(), np.random.get_state()


def _free(key: str) -> bool:
    return key.startswith(FREE) and key not in BOUND
