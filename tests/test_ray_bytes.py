"""What passes through the driver of a Ray run: little of each sample, none of its tokens, and every byte is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.algorithms.registry import register
from hybridflow.batch import Batch
from hybridflow.controller.group import Place
from hybridflow.controller.runtime.ray.link import Link
from hybridflow.layout import ParallelLayout
from tests.ray_roles import Plain
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
