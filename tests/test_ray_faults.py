"""A rank that fails, in every way: the message names it and its cause, and nothing is left running."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.batch import Batch, RowKind, row_ids
from hybridflow.controller.group import Place
from hybridflow.controller.replay import Replay
from hybridflow.controller.runtime.ray.runtime import RayRuntime
from hybridflow.errors import HybridFlowError, WorkerError
from hybridflow.layout import ParallelLayout
from tests.ray_roles import Faulty
from tests.test_ray_runtime import runtime_in

pytestmark = [pytest.mark.ray, pytest.mark.chaos]
RANKS = 3
DEADLINE_S = 4.0


def faulty(folder: Path, call_s: float = DEADLINE_S) -> tuple[RayRuntime, Faulty]:
    runtime, layout = runtime_in(folder, call_s=call_s, start_s=120.0), ParallelLayout(dp=RANKS)
    return runtime, Faulty(layout, "faulty", group=runtime.group("faulty", Faulty, layout, Place("faulty", RANKS)))


def gone_within(processes: list[int], seconds: float) -> bool:
    """Zombies count as gone: their parent collects them when it gets to it."""
    until = time.monotonic() + seconds
    while any(running(process) for process in processes):
        if time.monotonic() > until:
            return False
        os.sched_yield()
    return True


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", r"ValueError: NaN in rollout_logprobs, row 17"),
        ("unpicklable", r"UnpicklableError"),
        ("sigkill", r"the process died"),
        ("segfault", r"the process died"),
        ("exit", r"the process died"),
        ("sys.exit", r"SystemExit: 3"),
        ("hang", r"did not return within 4 s \(run\.call_timeout_s\); it is at\n(.*\n)*.*in fault(.*\n)*.*all_reduce"),
    ],
)
def test_case_27_the_first_cause_is_named_and_all_ranks_end(
    ray_cluster: None, tmp_path: Path, how: str, said: str
) -> None:
    runtime, group = faulty(tmp_path)
    processes = group.on_ranks(lambda worker: __import__("os").getpid())
    began = time.monotonic()
    with pytest.raises(WorkerError, match=said) as caught:
        group.fail(how, 1)
    assert time.monotonic() - began < DEADLINE_S + 5.0
    assert gone_within(processes, 1.0)
    assert f"faulty.fail, rank 1 (process {processes[1]} on " in str(caught.value)
    with pytest.raises(HybridFlowError, match="rank 1"):
        group.processes()
    runtime.close()


def test_a_failed_calls_inputs_are_kept_for_one_inline_rank(ray_cluster: None, tmp_path: Path) -> None:
    runtime, group = faulty(tmp_path)
    batch = Batch({"n": np.arange(7), "text": [str(i) for i in range(7)]}, row_ids(RowKind.ROLLOUT, np.arange(7)))
    with pytest.raises(WorkerError, match="cannot digest row") as caught:
        len(group.reads(batch))
    runtime.close()
    assert "in reads\n" in str(caught.value)  # the rank's own traceback
    kept = Replay.load(tmp_path / "failure")
    assert kept.name == "faulty.reads" and kept.role is Faulty
    [given] = kept.args
    assert given.array("text").tolist() == [str(i) for i in range(7)]


def test_a_call_that_waits_for_its_turn_is_not_overdue(ray_cluster: None, tmp_path: Path) -> None:
    runtime, group = faulty(tmp_path, call_s=2.0)

    def busy(worker: Any) -> float:
        import time

        until = time.monotonic() + 1.2
        while time.monotonic() < until:
            pass
        return worker.rank

    group.group.start()
    first = [runtime.submit(group.group, 0, "busy", _apply(busy), "faulty") for _ in range(3)]
    reports = runtime.wait(first, runtime.trace.begin("faulty", "busy"))
    assert [report.value for report in reports] == [0, 0, 0]
    runtime.close()


def _apply(fn: Any) -> Any:
    return lambda workers, told, name: fn(workers[name])
