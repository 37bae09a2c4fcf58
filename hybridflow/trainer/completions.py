"""Completions to parquet: every rollout of every step, one file a step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..batch import Batch
from ..columns import FinishReason, Kind, kind_of

IDS = ("prompt_ids", "response_ids")
SKIPPED = ("values", "advantages", "returns", "response_mask", "token_rewards")


class Completions:
    """The folder `completions/`: step-000001.parquet and on. A resumed run writes its own steps again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def cut(self, step: int) -> None:
        """Drop what was written after a commit."""
        for file in self.folder.glob("step-*.parquet"):
            if file.stem > f"step-{step:06d}":
                file.unlink()

    def write(self, step: int, rows: Batch) -> None:
        """The rows' text, ids, rewards and user columns, written by a process where they are; per-token numbers other
        than ids stay out. Column `step`, unless the data has one of its own: the file's name says it too."""
        shown = [name for name in rows.names if name in IDS or _kept(rows, name)]
        rows.select(*shown).apply(_write, self.folder, step)


def _write(rows: Batch, folder: Path, step: int) -> None:
    folder.mkdir(exist_ok=True)
    columns = {name: _arrow(rows, name) for name in rows.names}
    columns.setdefault("step", pa.array(np.full(len(rows), step)))
    partial = folder / f".step-{step:06d}.parquet"
    pq.write_table(pa.table(columns), partial)
    partial.replace(folder / f"step-{step:06d}.parquet")


def _kept(rows: Batch, name: str) -> bool:
    return name not in SKIPPED and rows.kind(name) is not Kind.RAGGED


def _arrow(rows: Batch, name: str) -> pa.Array:
    column = rows.column(name)
    if kind_of(column) is Kind.RAGGED:
        return pa.array([ids.tolist() for ids in rows.ragged(name)])
    if name == "finish_reason":
        return pa.array([FinishReason(code).name.lower() for code in rows.array(name)])
    if kind_of(column) is Kind.DENSE and rows.array(name).ndim == 1:
        return pa.array(rows.array(name))
    return pa.array([None if value is None else str(value) for value in rows.array(name)])
