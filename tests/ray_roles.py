"""Roles for tests of the Ray runtime: they compute little and fail in every way there is."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import traceback
from typing import Any

import numpy as np

from hybridflow.batch import Batch, RowKind, row_ids
from hybridflow.controller.protocols import ALL_TO_ALL, DP, ONE_TO_ALL, THREE_D, THREE_D_GROUPS, THREE_D_PP_ONLY
from hybridflow.controller.worker import Worker, remote
from hybridflow.errors import BatchError
from hybridflow.layout import ParallelLayout


class Plain(Worker[ParallelLayout]):
    """Its settings are its layout."""

    role = "plain"

    @classmethod
    def arranged(cls, settings: ParallelLayout, ranks: int) -> ParallelLayout:
        return settings

    @remote(DP)
    def double(self, batch: Batch) -> Batch:
        tokens = batch.ragged("response_ids")
        columns = {"twice": batch.array("n") * 2, "advantages": tokens.with_values(tokens.values * 0.5)}
        return Batch(columns, batch.ids, {"rank": float(self.rank)})

    @remote(THREE_D)
    def whose(self, batch: Batch) -> Batch:
        return Batch({"rank": np.full(len(batch), self.rank)}, batch.ids)

    @remote(THREE_D_GROUPS)
    def whose_group(self, batch: Batch) -> Batch:
        return Batch({"rank": np.full(len(batch), self.rank)}, batch.ids)

    @remote(DP)
    def added(self, first: Batch, second: Batch) -> Batch:
        return Batch({"sum": first.array("n") + second.array("n")}, first.ids)

    @remote(DP)
    def repeat(self, batch: Batch, times: int) -> Batch:
        """New rows, as generation makes them."""
        rows = batch.take(np.repeat(np.arange(len(batch)), times))
        number = rows.array("n") * times + np.tile(np.arange(times), len(batch))
        columns = {name: rows.column(name) for name in rows.names}
        return Batch({**columns, "number": number}, row_ids(RowKind.ROLLOUT, number))

    @remote(ONE_TO_ALL)
    def same(self, value: Any) -> Any:
        return value

    @remote(THREE_D_PP_ONLY)
    def stage(self) -> list[int]:
        return [self.rank]

    @remote(ALL_TO_ALL)
    def own(self, value: Any) -> Any:
        return self.rank, value

    @remote(DP)
    def backwards(self, batch: Batch) -> Batch:
        return batch.take(np.arange(len(batch))[::-1]).select("n")


class UnpicklableError(Exception):
    """Holds a lock, which cannot be sent."""

    def __init__(self, message: str) -> None:
        super().__init__(message, threading.Lock())


class Faulty(Worker[ParallelLayout]):
    """One rank fails in `fail`, the others wait for it in a collective."""

    role = "faulty"

    @classmethod
    def arranged(cls, settings: ParallelLayout, ranks: int) -> ParallelLayout:
        return settings

    @remote(ONE_TO_ALL)
    def fail(self, how: str, rank: int) -> None:
        import torch
        import torch.distributed as dist

        if self.rank == rank:
            fault(how)
        dist.all_reduce(torch.ones(3))

    @remote(DP)
    def fail_on(self, batch: Batch, how: str, rank: int) -> Batch:
        """`fail` with rows."""
        Faulty.fail(self, how, rank)
        return Batch({}, batch.ids)

    @remote(ONE_TO_ALL)
    def die_in_collective(self, rank: int) -> None:
        """A rank that dies while it exchanges much with the others."""
        import torch
        import torch.distributed as dist

        if self.rank == rank:
            threading.Thread(target=_die_once_in, args=("all_reduce", threading.get_ident())).start()
        dist.all_reduce(torch.ones(1 << 24))

    @remote(ONE_TO_ALL)
    def stop(self) -> None:
        fault("stopped")

    @remote(ONE_TO_ALL)
    def processes(self) -> int:
        return os.getpid()

    @remote(DP)
    def reads(self, batch: Batch) -> Batch:
        raise ValueError(f"cannot digest row {batch.array('n')[0]}")

    @remote(DP)
    def refuses(self, batch: Batch) -> Batch:
        raise BatchError("row 3 does not fit")


def fault(how: str) -> None:
    """A fault of this process."""
    if how == "raise":
        raise ValueError("NaN in rollout_logprobs, row 17")
    if how == "unpicklable":
        raise UnpicklableError("cannot be sent")
    if how == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "exit":
        os._exit(3)
    if how == "sys.exit":
        sys.exit(3)
    if how == "hang":
        threading.Event().wait()
    if how == "stuck":  # in code that never gives Python's lock back, so that no thread answers
        ctypes.PyDLL(None).pause()
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()  # this thread may run on for a moment
    if how == "node":  # the node's own process goes, and takes its workers with it
        os.kill(os.getppid(), signal.SIGKILL)
        threading.Event().wait()


def _die_once_in(function: str, thread: int) -> None:
    while not any(frame.f_code.co_name == function for frame, _ in traceback.walk_stack(sys._current_frames()[thread])):
        os.sched_yield()
    os.kill(os.getpid(), signal.SIGKILL)


class Large(Worker[ParallelLayout]):
    """Makes more than there is room for."""

    role = "large"

    @remote(DP)
    def make(self, batch: Batch, megabytes: int) -> Batch:
        """So many of each row."""
        return Batch({"large": np.ones((len(batch), megabytes << 17))}, batch.ids)

    @remote(DP)
    def look(self, batch: Batch) -> Batch:
        return Batch({"sum": batch.array("large").sum(1)}, batch.ids)
