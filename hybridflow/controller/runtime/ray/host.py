"""Host: a process of a pool, with one device. It holds the workers of every group that is placed on the pool.

Threads: `compute` builds the engines and makes all calls, one at a time in the order they were sent; `data` runs
functions of batches beside the shards; `rows` reads for other nodes; `control` answers whatever those are doing.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from ....batch import Batch
from ....columns import Column
from ...stored import Ints
from ...worker import Worker
from .message import Inputs, folded
from .reports import Failure, Made, Report
from .shards import DIRECTORY, READ_S, HostKey, Peer, kept, rows_of

GROUPS = {"compute": 1, "data": 1, "rows": 2, "control": 4}
FRAMES_SHOWN = 12
IN_COLLECTIVE = "torch/distributed/distributed_c10d"


@dataclass(frozen=True)
class Where:
    """Where a host runs. devices: its accelerators, as Ray numbers them on the node. log: what it writes errors to."""

    node: str
    address: str
    process: int
    devices: tuple[str, ...]
    log: str


@dataclass(frozen=True)
class State:
    """How a call stands on its host. seconds: since it began to execute, None if it has not; stack: of the thread that
    runs it, in the worker's own code; collective: it waits for others."""

    seconds: float | None
    stack: str = ""
    collective: bool = False


@dataclass(frozen=True)
class Rendezvous:
    """How a rank meets the others of its pool. timeout_s: of each collective. threads: of the CPU, for this rank."""

    address: str
    port: int
    rank: int
    ranks: int
    timeout_s: float
    threads: int


class Host:
    """One process, one rank of each group on the pool. Every public method but `run` and `apply` raises what goes wrong
    in the driver as it is; those report it."""

    def __init__(self, key: HostKey) -> None:
        self._key = key
        self._workers: dict[str, Worker[Any]] = {}
        self._under_way: dict[int, tuple[int, float]] = {}  # call -> its thread, and when it began
        self._progress: tuple[int, int] | None = None

    # ---- compute
    @ray.method(concurrency_group="compute", num_returns=2)
    def run(self, message: tuple[Any, ...]) -> tuple[Any, dict[str, Any] | None]:
        """Of a call's number, a task and its arguments: `task(workers, told, *args)`; its `Report`, folded. A batch
        that it returns stays here as the second value."""
        call, task, *args = message
        self._progress = None
        with self._noted(call):
            run = TASKS[task] if isinstance(task, str) else task
            report, blob = _reported(lambda: run(self._workers, self._told, *args))
        return folded(report.wire), blob

    # ---- data
    @ray.method(concurrency_group="data", num_returns=2)
    def apply(self, message: tuple[Any, ...]) -> tuple[Any, dict[str, Any] | None]:
        """As `run`, of a call's number, a function and its inputs."""
        call, fn, *wire = message
        with self._noted(call):
            report, blob = _reported(lambda: _applied(fn, Inputs(*wire)))
        return folded(report.wire), blob

    # ---- control
    @ray.method(concurrency_group="control")
    def where(self) -> Where:
        """Node, address and devices of this process."""
        context = ray.get_runtime_context()
        devices = tuple(str(each) for ids in context.get_accelerator_ids().values() for each in ids)
        log = os.readlink("/proc/self/fd/2")
        return Where(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), devices, log)

    @ray.method(concurrency_group="control")
    def free_port(self) -> int:
        """A port of this node that nobody listens on."""
        return _free_port()

    @ray.method(concurrency_group="control")
    def meet(self, node: str, peers: Mapping[HostKey, Peer]) -> None:
        """The other hosts of the run, whose rows calls here may read."""
        DIRECTORY.node = node
        DIRECTORY.peers.update(peers)

    @ray.method(concurrency_group="control")
    def progress(self, call: int) -> tuple[int, int] | None:
        """(done, total) of a call that is under way, where it says so."""
        return self._progress if call in self._under_way else None

    @ray.method(concurrency_group="control")
    def state(self, call: int) -> State:
        """How a call stands."""
        noted = self._under_way.get(call)
        if noted is None:
            return State(None)
        thread, since = noted
        frames = traceback.extract_stack(sys._current_frames().get(thread))
        ours = max((i for i, frame in enumerate(frames) if frame.filename == __file__), default=-1)
        shown = frames[ours + 1 :][-FRAMES_SHOWN:]
        stack, waits = "".join(traceback.format_list(shown)), any(IN_COLLECTIVE in f.filename for f in shown)
        return State(time.monotonic() - since, stack.rstrip(), waits)

    # ---- rows
    @ray.method(concurrency_group="rows")
    def rows(self, shard: Sequence[Any], names: Sequence[str], rows: Ints | None) -> dict[str, Column]:
        """Rows of a shard that lies on this node, for a process on another one."""
        return rows_of(ray.get(shard[0], timeout=READ_S), names, rows)

    def _told(self, done: int, total: int) -> None:
        self._progress = done, total

    @contextmanager
    def _noted(self, call: int) -> Iterator[None]:
        self._under_way[call] = threading.get_ident(), time.monotonic()
        try:
            yield
        finally:
            del self._under_way[call]


Workers = dict[str, Worker[Any]]
Told = Callable[[int, int], None]


# ---- tasks: what `run` is asked to do
def join(workers: Workers, told: Told, group: Rendezvous, seed: int) -> None:
    """Take part in the pool's process group, and seed."""
    from ....device import join_process_group, seed_everything, use_threads

    use_threads(group.threads)
    join_process_group(group.address, group.port, rank=group.rank, ranks=group.ranks, timeout_s=group.timeout_s)
    seed_everything(seed)


def build(workers: Workers, told: Told, name: str, role: type[Worker[Any]], settings: Any, rank: int) -> None:
    """Make the group's worker and what it needs."""
    worker = role(settings, name, rank)
    worker.progress = told
    worker.start()
    workers[name] = worker


def call(workers: Workers, told: Told, name: str, method: str, *wire: Any) -> Any:
    """A method of the group's worker."""
    return _applied(getattr(workers[name], method), Inputs(*wire))


def debug(workers: Workers, told: Told, name: str, method: str, *wire: Any) -> Any:
    """`call`, once somebody has connected with the debugger that this opens; where to is printed."""
    from remote_pdb import RemotePdb

    inputs = Inputs(*wire)
    positional, named = inputs.received()
    function, port = getattr(workers[name], method), _free_port()
    print(f"{name}.{method} waits for a debugger on {ray.util.get_node_ip_address()}: nc 127.0.0.1 {port}", flush=True)
    RemotePdb("127.0.0.1", port, quiet=True).set_trace()  # `s` steps into the call below
    made = function(*positional, **named)
    return inputs.returned(made)


def apply(workers: Workers, told: Told, name: str, fn: Callable[..., Any], *wire: Any) -> Any:
    """A function of the group's worker."""
    return _applied(partial(fn, workers[name]), Inputs(*wire))


def save(workers: Workers, told: Told, name: str, folder: Path) -> None:
    """The rank's part of a checkpoint."""
    workers[name].save_rank(folder)


def load(workers: Workers, told: Told, name: str, folder: Path) -> None:
    """What `save` wrote."""
    workers[name].load_rank(folder)


TASKS: dict[str, Callable[..., Any]] = {task.__name__: task for task in (join, build, call, debug, apply, save, load)}


def sent_as(task: Callable[..., Any]) -> Any:
    """The name of one of these, which is shorter; any other task itself."""
    name = getattr(task, "__name__", "")
    return name if TASKS.get(name) is task else task


# ---- inside
def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def _applied(fn: Callable[..., Any], inputs: Inputs) -> Any:
    positional, named = inputs.received()
    return inputs.returned(fn(*positional, **named))


def _reported(run: Callable[[], Any]) -> tuple[Report, dict[str, Any] | None]:
    start, began = time.time_ns(), time.perf_counter()
    try:
        value = run()
        if not isinstance(value, Batch):
            return Report(start, time.perf_counter() - began, value), None
        made, blob = Made.of(value), {name: kept(value.column(name)) for name in value.names}
        return Report(start, time.perf_counter() - began, made=made), blob
    except BaseException as error:  # SystemExit too: the process is the pool's, not the method's
        return Report(start, time.perf_counter() - began, failure=Failure.of(error)), None
