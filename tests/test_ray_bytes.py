"""What passes through the driver of a Ray run: little of each sample, none of its tokens, and every byte is counted."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray._private import internal_api

from hybridflow.algorithms.registry import register
from hybridflow.batch import Batch, RowKind, concat, row_ids
from hybridflow.controller.group import Place
from hybridflow.controller.runtime.ray.link import Link
from hybridflow.layout import ParallelLayout
from tests.ray_roles import Large, Plain
from tests.runs import quick
from tests.test_ray_runtime import rows, runtime_in

pytestmark = pytest.mark.ray
BUDGET = 256  # bytes per sample and step
SAMPLES = 64


class Counted(Counter[str]):
    """Bytes by kind of message; as a tracker, what each step adds."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def count(self, kind: str, call: str, nbytes: int) -> None:
        self[kind] += nbytes

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(self.total())
        self.clear()

    def close(self) -> None:
        pass


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found = Counted()
    monkeypatch.setattr(Link, "counted", found.count)
    return found


def test_a_step_sends_few_bytes_a_sample_however_long_it_is(
    ray_cluster: None, tiny_model: Path, tmp_path: Path, counted: Counted
) -> None:
    @register("tracker", "bytes_of_steps")
    def tracker(folder: Path, config: Any, first_step: int) -> Counted:
        return counted

    last = []
    for tokens in (4, 40):
        words = ("placement.actor=2", "algorithm.kl=loss", "run.steps=2", "run.trackers=[bytes_of_steps]")
        rollouts = ("data.rows_per_step=8", f"sampling.n={SAMPLES // 8}", f"sampling.max_new_tokens={tokens}")
        counted.clear()
        quick(tiny_model, tmp_path / str(tokens), *words, *rollouts)
        last.append(counted.steps[-1] / SAMPLES)
    assert max(last) <= BUDGET
    assert last[1] <= 1.1 * last[0]


def test_a_ragged_column_that_takes_its_way_through_the_driver_is_seen(
    ray_cluster: None, tmp_path: Path, counted: Counted
) -> None:
    runtime, layout = runtime_in(tmp_path), ParallelLayout(dp=2)
    plain = Plain(layout, "plain", group=runtime.group("plain", Plain, layout, Place("plain", 2)))
    made = plain.repeat(rows(400), 1).select("n", "response_ids")
    assert len(made) == 400
    counted.clear()
    beside = plain.double(made).fetch("twice")
    few = counted.total()
    column = made.fetch("response_ids").ragged("response_ids")
    assert counted["fetches"] >= column.values.nbytes
    counted.clear()
    through = plain.double(Batch({"n": np.arange(400), "response_ids": column}, made.ids)).fetch("twice")
    assert through["twice"].tolist() == beside["twice"].tolist()
    assert counted["arguments"] >= column.values.nbytes > 10 * few
    runtime.close()


def test_case_26_images_of_many_steps_take_no_memory_of_driver_ranks_or_store(
    ray_cluster: None, tmp_path: Path, counted: Counted
) -> None:
    runtime, layout = runtime_in(tmp_path), ParallelLayout(dp=4)
    large = Large(layout, "large", group=runtime.group("large", Large, layout, Place("large", 4)))
    batch = Batch({"n": np.arange(32)}, row_ids(RowKind.ROLLOUT, np.arange(32)))

    def step() -> None:
        made = large.make(batch, 1)
        seen = batch | made | large.look(made)
        kept = concat([seen.take(range(0, 32, 2)), seen.take(range(1, 32, 2))])
        assert large.look(kept.select("large")).fetch()["sum"].tolist() == [1 << 17] * 32

    def memory() -> list[int]:
        return [own_bytes(), *large.on_ranks(lambda worker: own_bytes())]

    for _ in range(5):
        step()
    before = memory()
    counted.clear()
    for _ in range(20):  # 640 MB of images
        step()
    passed, after = counted.total(), memory()
    assert passed < 1 << 20
    assert max(now - then for now, then in zip(after, before, strict=True)) < 32 << 20
    assert until(lambda: store_bytes() < 32 << 20)
    runtime.close()


def own_bytes() -> int:
    """Memory of this process that is nobody else's; the object store is shared."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def store_bytes() -> int:
    """In the object store of the cluster's one node."""
    state = internal_api.get_memory_info_reply(
        internal_api.get_state_from_address(ray.get_runtime_context().gcs_address)
    )
    return int(state.store_stats.object_store_bytes_used)


def until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it becomes true in time."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        os.sched_yield()
    return true()
