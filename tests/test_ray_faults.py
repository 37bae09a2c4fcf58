"""A rank that fails, in every way: the message names it and its cause, and nothing is left running."""

from __future__ import annotations

import os
import re
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
from hybridflow.errors import BatchError, HybridFlowError, WorkerError
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
    assert all("gloo" in line for line in others if re.search(r"rank [02] ", line))  # those that said so in time
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


def test_every_look_at_a_call_of_a_run_that_failed_gives_the_first_cause(ray_cluster: None, tmp_path: Path) -> None:
    runtime, group = faulty(tmp_path)
    batch = Batch({"n": np.arange(7)}, row_ids(RowKind.ROLLOUT, np.arange(7)))
    first, second = group.reads(batch), group.refuses(batch)
    for pending in (second, first, second):
        with pytest.raises(WorkerError, match=r"faulty\.reads, rank 0 .*cannot digest row"):
            len(pending)
    runtime.close()


def test_an_error_of_ours_has_the_traceback_of_its_rank_beside_it(ray_cluster: None, tmp_path: Path) -> None:
    runtime, group = faulty(tmp_path)
    batch = Batch({"n": np.arange(7)}, row_ids(RowKind.ROLLOUT, np.arange(7)))
    with pytest.raises(BatchError, match="row 3 does not fit") as caught:
        len(group.refuses(batch))
    assert "in refuses\n" in caught.value.__notes__[0]
    runtime.close()


def test_the_kept_inputs_are_those_of_the_call_that_failed_first(ray_cluster: None, tmp_path: Path) -> None:
    runtime, group = faulty(tmp_path, call_s=60.0)
    batch = Batch({"n": np.arange(7)}, row_ids(RowKind.ROLLOUT, np.arange(7)))
    place, layout = Place("other"), ParallelLayout()
    other = Faulty(layout, "other", group=runtime.group("other", Faulty, layout, place))
    other.processes()
    waits = group.fail_on(batch, "hang", 1)  # ranks 0 and 2 wait in a collective
    with pytest.raises(WorkerError, match=r"^other\.reads, rank 0"):
        len(other.reads(batch))
    assert Replay.load(tmp_path / "failure", pytest.fail).name == "other.reads"
    del waits
    runtime.close()


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
