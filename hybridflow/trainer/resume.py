"""Going on where a run stopped: what the driver has to remember, and whether a checkpoint is this run's."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..algorithms.registry import resolve
from ..errors import CheckpointError
from .config import Config, resolved
from .tree import leaves

DRIVER_FILE = "driver.pkl"
FREE = (  # may differ between a run and its resumption: they change how a run goes, not what it computes
    "run.",
    "validation.",
    "rollout.",
    "placement.",
    "data.path",  # its content is compared
    "data.validation_",
    "reward.workers",
    "reward.timeout_s",
    "reward.max_error_fraction",
    "training.tokens_per_microbatch",
    "training.activation_checkpointing",
    "training.shard_size",
    "training.sequence_parallel",
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
    stopped: str | None
    random: tuple[Any, Any, Any]

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
        import torch

        python, numpy, tensors = self.random
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(tensors)


def random_state() -> tuple[Any, Any, Any]:
    """Python's, numpy's and torch's generators, for DriverState."""
    import torch

    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def comparable(config: Config) -> dict[str, Any]:
    """The configuration with what its paths lead to: a model folder by its content, a file of functions by its text."""
    tree = resolved(config)
    for node, key in (("model", "path"), ("reference", "path"), ("critic", "path"), ("reward", "model")):
        tree[node][key] = _model_content(tree[node][key])
    for kind in ("advantage", "loss"):
        tree[kind]["name"] = _function_content(tree[kind]["name"], kind)
    tree["reward"]["functions"] = [_function_content(spec, "reward") for spec in tree["reward"]["functions"]]
    return tree


def _model_content(path: str | None) -> str | None:
    """A local folder by its configuration and the names and sizes of its weights; anything else by its name."""
    folder = Path(path).expanduser() if path else None
    if folder is None or not folder.is_dir():
        return path
    digest = hashlib.blake2b((folder / "config.json").read_bytes(), digest_size=8)
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
    return f"{folder.name} ({digest.hexdigest()})"


def _function_content(spec: str, kind: str) -> str:
    """A function from a file by the file's content; anything else by its name."""
    return f"{spec} ({resolve(spec, kind).__module__})" if ".py:" in spec else spec


def check_same_run(saved: DriverState, config: Mapping[str, Any], data: str, checkpoint: Path) -> None:
    """Errors: CheckpointError listing every key by which the checkpoint's run differs in what it computes."""
    old, new = dict(leaves(saved.config)), dict(leaves(config))
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


def _free(key: str) -> bool:
    return key.removeprefix("critic.").startswith(FREE) and key not in BOUND
