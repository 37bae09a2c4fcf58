"""Where a run's numbers go: metrics.jsonl, which is the record, and trackers by name beside it."""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ..algorithms.registry import register
from ..errors import ConfigError


class Tracker(Protocol):
    """The plug-in point for experiment trackers: `@register("tracker")` a class of (folder, config, first step)."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of one step; steps may come again after a resume."""

    def close(self) -> None:
        """Flush and end."""


class MetricsFile:
    """metrics.jsonl: one object a step. Cut back to its committed length on resume, so that no line comes twice."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, metrics: Mapping[str, float]) -> int:
        """Write one line, durable when it returns; the file's length in bytes after it."""
        line = json.dumps({name: _plain(value) for name, value in metrics.items()})
        with self.path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
            return file.tell()

    def cut(self, length: int) -> None:
        """Drop what was written after a commit."""
        if self.path.exists():
            os.truncate(self.path, min(length, self.path.stat().st_size))

    def rows(self) -> list[dict[str, float]]:
        """All lines."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@register("tracker", "tensorboard")
class TensorBoard:
    """Event files in the run folder's `tensorboard/`."""

    def __init__(self, folder: Path, config: Mapping[str, object], first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


@register("tracker", "wandb")
class WeightsAndBiases:
    """Weights & Biases; a resumed run goes on under the same id."""

    def __init__(self, folder: Path, config: Mapping[str, object], first_step: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("run.trackers names wandb, which is not installed: pip install wandb.") from error
        id_file = folder / "wandb-id"  # the same run after a resume, another one in another folder
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex)
        self._run = wandb.init(
            id=id_file.read_text(), name=folder.name, dir=str(folder), config=dict(config), resume="allow"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _plain(value: float) -> float | None:
    """JSON has no NaN: a number that is none becomes null."""
    return value if math.isfinite(value) else None
