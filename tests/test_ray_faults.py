"""A rank that fails, in every way: the message names it and its cause, and nothing is left running."""

from __future__ import annotations

import os
import signal
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
from tests.processes import gone_within
from tests.ray_roles import Faulty
from tests.test_ray_runtime import runtime_in

pytestmark = [pytest.mark.ray, pytest.mark.chaos]
RANKS = 3
DEADLINE_S = 4.0


def faulty(folder: Path, call_s: float = DEADLINE_S) -> tuple[RayRuntime, Faulty]:
    runtime, layout = runtime_in(folder, call_s=call_s, start_s=120.0), ParallelLayout(dp=RANKS)
    return runtime, Faulty(layout, "faulty", group=runtime.group("faulty", Faulty, layout, Place("faulty", RANKS)))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", r"ValueError: NaN in rollout_logprobs, row 17"),
        ("unpicklable", r"UnpicklableError"),
        (
            "sigkill",
            r"the process died: killed \(SIGKILL; .*\), or it exited by itself; its last words may be in /.*err,",
        ),
        ("segfault", r"the process died: Segmentation fault\n(.*\n)*.*ray_roles\.py\", line \d+ in fault"),
        ("exit", r"the process died: killed .*, or it exited by itself"),
        ("sys.exit", r"SystemExit: 3"),
        ("stuck", r"did not return within 4 s \(run\.call_timeout_s\), and its process does not answer"),
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


def test_a_rank_that_dies_in_a_collective_is_named_and_not_those_that_saw_it_go(
    ray_cluster: None, tmp_path: Path
) -> None:
    runtime, group = faulty(tmp_path, call_s=60.0)
    processes = group.on_ranks(lambda worker: __import__("os").getpid())
    with pytest.raises(WorkerError) as caught:
        group.die_in_collective(1)
    assert gone_within(processes, 1.0)
    first, *others = str(caught.value).splitlines()
    assert first.startswith(f"faulty.die_in_collective, rank 1 (process {processes[1]} on ")
    assert "the process died" in first
    assert all(any(f"rank {rank} " in line and "gloo" in line for line in others) for rank in (0, 2))
    runtime.close()


def test_processes_that_do_not_answer_are_told_in_time_however_many(ray_cluster: None, tmp_path: Path) -> None:
    runtime, group = faulty(tmp_path)
    processes = group.on_ranks(lambda worker: __import__("os").getpid())
    began = time.monotonic()
    with pytest.raises(
        WorkerError, match=r"rank 0 .*, and its process does not answer\nBeside it:\n.*rank 1.*\n.*rank 2"
    ):
        group.stop()
    assert time.monotonic() - began < DEADLINE_S + 5.0
    for process in processes:  # a stopped process has no say in its end, but this is not what is tested
        os.kill(process, signal.SIGKILL)
    runtime.close()


def test_a_failed_calls_inputs_are_kept_for_one_inline_rank(ray_cluster: None, tmp_path: Path) -> None:
    runtime, group = faulty(tmp_path)
    batch = Batch({"n": np.arange(7), "text": [str(i) for i in range(7)]}, row_ids(RowKind.ROLLOUT, np.arange(7)))
    with pytest.raises(WorkerError, match="cannot digest row") as caught:
        len(group.reads(batch))
    runtime.close()
    assert "in reads\n" in str(caught.value)  # the rank's own traceback
    kept = Replay.load(tmp_path / "failure", pytest.fail)
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
