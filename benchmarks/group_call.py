"""A call to a worker group against a hand-written Ray call that moves the same data.

Each rank scales one ragged column of rows that lie on it, and keeps the result: the rows stay where they are, and the
driver learns their lengths. The hand-written side is plain actors with two returns, whose references go in a list. Both
work on one cluster, call by call in turns. value: the largest ratio of median seconds over the numbers of ranks and of
tokens; of each, the median of several rounds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1"}

import numpy as np
import ray

from hybridflow.batch import Batch, RowKind, row_ids
from hybridflow.columns import Ragged
from hybridflow.controller.group import Place
from hybridflow.controller.protocols import DP
from hybridflow.controller.runtime.ray.cluster import connect, disconnect
from hybridflow.controller.runtime.ray.runtime import Deadlines, RayRuntime
from hybridflow.controller.trace import Trace
from hybridflow.controller.worker import Worker, remote

TARGET = 1.2
ROWS = 256
ROUNDS, CALLS = 7, 40
WARM_UP_CALLS = 30


@dataclass(frozen=True)
class Case:
    """tokens: of each row."""

    ranks: int
    tokens: int


CASES = [Case(ranks, tokens) for ranks in (2, 4, 8) for tokens in (4, 1000)]


class Scaler(Worker[None]):
    """The worker group's side."""

    role = "scaler"

    @remote(DP)
    def make(self, batch: Batch, tokens: int) -> Batch:
        """Rows of so many tokens."""
        offsets = np.arange(len(batch) + 1) * tokens
        ids = Ragged(np.zeros(offsets[-1], np.int64), offsets)
        return Batch(
            {"response_ids": ids, "rollout_logprobs": ids.with_values(np.ones(offsets[-1], np.float32))}, batch.ids
        )

    @remote(DP)
    def scale(self, batch: Batch) -> Batch:
        """One column from another."""
        column = batch.ragged("rollout_logprobs")
        return Batch({"old_logprobs": column.with_values(column.values * np.float32(2))}, batch.ids)


class Plain:
    """The hand-written side."""

    def make(self, rows: int, tokens: int) -> tuple[Any, dict[str, Any]]:
        """As `Scaler.make`: lengths, and what stays here."""
        offsets = np.arange(rows + 1) * tokens
        columns = {
            "ids": np.zeros(offsets[-1], np.int64),
            "logprobs": np.ones(offsets[-1], np.float32),
            "offsets": offsets,
        }
        return np.diff(offsets), columns

    def scale(self, refs: list[Any]) -> tuple[Any, dict[str, Any]]:
        """As `Scaler.scale`."""
        columns = ray.get(refs)[0]
        offsets = columns["offsets"]
        return np.diff(offsets), {"logprobs": columns["logprobs"] * np.float32(2), "offsets": offsets}


def group_side(case: Case, runtime: RayRuntime) -> Callable[[], object]:
    """One call to a group of so many ranks."""
    group = Scaler(None, "scaler", group=runtime.group("scaler", Scaler, None, Place("scaler", case.ranks)))
    rows = group.make(Batch({"n": np.arange(ROWS)}, row_ids(RowKind.ROLLOUT, np.arange(ROWS))), case.tokens)
    assert set(rows.lengths("response_ids")) == {case.tokens}
    return lambda: len(group.scale(rows))


def plain_side(case: Case) -> tuple[Callable[[], object], list[Any]]:
    """One call to so many actors, and the actors."""
    remote_class: Any = ray.remote(num_cpus=0)(Plain)
    actors = [remote_class.remote() for _ in range(case.ranks)]
    made = [actor.make.options(num_returns=2).remote(ROWS // case.ranks, case.tokens) for actor in actors]
    ray.get([lengths for lengths, _ in made])
    calls = [(actor.scale.options(num_returns=2), [columns]) for actor, (_, columns) in zip(actors, made, strict=True)]

    def call() -> object:
        sent = [method.remote(refs) for method, refs in calls]
        return np.concatenate(ray.get([lengths for lengths, _ in sent]))

    return call, actors


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Both sides in turns."""
    deadlines = Deadlines(call_s=300.0, start_s=300.0)
    runtime = RayRuntime(Trace(), seed=0, deadlines=deadlines, failure_folder=folder, say=print)
    plain, actors = plain_side(case)
    sides = {"group": group_side(case, runtime), "plain": plain}
    rounds = [_round(sides) for _ in range(ROUNDS)]
    runtime.close()
    for actor in actors:
        ray.kill(actor)
    seconds = {side: [each[side] for each in rounds] for side in sides}
    ratios = [each["group"] / each["plain"] for each in rounds]
    result = {**asdict(case), "ratio": median(ratios), "ratios": ratios, "seconds": seconds}
    print(json.dumps({**asdict(case), "ratio": median(ratios)}), file=sys.stderr, flush=True)
    return result


def _round(sides: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each side's calls."""
    for call in sides.values():
        for _ in range(WARM_UP_CALLS):
            call()
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(CALLS):
        for side in list(sides)[:: 1 if number % 2 == 0 else -1]:
            began = time.perf_counter()
            sides[side]()
            seconds[side].append(time.perf_counter() - began)
    return {side: median(values) for side, values in seconds.items()}


def main() -> None:
    """All cases, and the line."""
    cluster = connect()
    with tempfile.TemporaryDirectory() as folder:
        cases = [measure(case, Path(folder)) for case in CASES]
    disconnect(cluster)
    value = max(case["ratio"] for case in cases)
    print(json.dumps({"name": "group_call", "value": value, "target": TARGET, "ok": value <= TARGET, "cases": cases}))


if __name__ == "__main__":
    main()
