"""A pool of processes that call reward functions: every call ends within its time-out, and a lost worker loses one row.

Workers are plain Python processes with a pipe each. A process pool of multiprocessing would run the user's script again
in each worker, and ready-made pools answer a dead worker by giving up the pool or the whole task.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import cloudpickle

from ..errors import BatchError, ConfigError, RewardError
from .reward_calls import Call, Caller, Chunk, Outcome, RewardFunction, timeout_reason

START_S = 300.0  # a worker that has not loaded the functions by then is given up: imports from a cold disk take minutes
KILL_GRACE_S = 1.0  # beyond its time-out; a worker that is then still silent is in code that no alarm interrupts

_BOOT = (
    "import sys; sys.path[:] = sys.argv[3:]; from hybridflow.workers.reward_calls import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]))"
)


class Calls(Protocol):
    """Whatever makes calls: `WorkerPool` or `InDriver`. retries: calls made again because their worker was lost."""

    retries: int

    def run(self, chunks: Iterable[Chunk]) -> Generator[Outcome, None, None]:
        """One outcome for every call of the chunks, in the order they end; closing it abandons what is not done."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


class InDriver:
    """Makes calls in this process: breakpoints work, nothing is timed out. Async functions have a thread of their own,
    since in a notebook an event loop runs already in this one."""

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self.retries = 0
        self._runner = asyncio.Runner()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")
        self._caller = Caller(functions, None, lambda work: self._thread.submit(self._runner.run, work).result())

    def run(self, chunks: Iterable[Chunk]) -> Generator[Outcome, None, None]:
        """See Calls."""
        for chunk in chunks:
            outcomes: list[Outcome] = []
            self._caller.run(chunk, outcomes.append)
            yield from outcomes

    def close(self) -> None:
        """Close the event loop."""
        self._thread.submit(self._runner.close).result()


class _Worker:
    """One process: loading, idle (nothing pending), or in the calls that are pending, in their order."""

    def __init__(self, setup: bytes) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        lifeline, ours = os.pipe()
        self._lifeline = os.fdopen(ours, "wb")  # never written: its end is the worker's end, however it comes
        handles = (theirs.fileno(), lifeline)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, *map(str, handles), *sys.path],
            pass_fds=handles,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the driver's affair; a kill reaches what the functions started
        )
        theirs.close()
        os.close(lifeline)
        self.loaded = False
        self.function = 0
        self.pending: dict[int, Mapping[str, Any]] = {}
        self.deadline = time.monotonic() + START_S
        with contextlib.suppress(OSError):  # dead already: seen when it is read from
            self.connection.send_bytes(setup)

    @property
    def busy(self) -> bool:
        return not self.loaded or bool(self.pending)

    @property
    def overdue(self) -> bool:
        return self.busy and self.deadline < time.monotonic() and not self.connection.poll()

    def give(self, chunk: Chunk, call_limit_s: float) -> None:
        message = pickle.dumps((chunk.function, [row for row, _ in chunk.calls], _packed(chunk.calls)))
        self.function, self.pending = chunk.function, dict(chunk.calls)
        with contextlib.suppress(OSError):
            self.connection.send_bytes(message)
        self.deadline = time.monotonic() + call_limit_s

    def end(self) -> str:
        """Kill the process and all it started; says how it ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self.connection.close()
        self._lifeline.close()
        return f"signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"


class WorkerPool:
    """Worker processes, started at once and replaced when lost; the functions are sent to each a single time.

    Inside a worker an alarm ends a call at its time-out. If the worker is still silent a second later, or dies, it is
    replaced: the call it was in is an error, the rest of its chunk goes to others. Async calls share a worker, so there
    the unfinished ones are made again, one a worker at a time, which finds the guilty one.
    Errors: ConfigError for a function that cannot be sent; RewardError if a worker cannot load the functions.
    """

    def __init__(self, functions: Sequence[RewardFunction], workers: int, timeout_s: float) -> None:
        for fn in functions:
            _check_sendable(fn)
        self.retries = 0
        self._functions = functions
        self._timeout_s = timeout_s
        self._setup = cloudpickle.dumps((list(functions), timeout_s))
        self._count = workers
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        self._start_missing()

    def run(self, chunks: Iterable[Chunk]) -> Generator[Outcome, None, None]:
        """See Calls. Workers whose calls are abandoned are ended."""
        queue = deque(chunks)
        try:
            while queue or any(worker.pending for worker in self._workers):
                self._start_missing()
                self._hand_out(queue)
                for key, _ in self._selector.select(self._seconds_left()):
                    yield from self._receive(key.data, queue)
                for worker in [w for w in self._workers if w.overdue]:
                    yield from self._give_up(worker, queue)
            self._start_missing()
        finally:
            for worker in [w for w in self._workers if w.pending]:
                self._remove(worker)

    def close(self) -> None:
        """End all workers."""
        for worker in list(self._workers):
            self._remove(worker)

    def _start_missing(self) -> None:
        for _ in range(self._count - len(self._workers)):
            worker = _Worker(self._setup)
            self._workers.append(worker)
            self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def _remove(self, worker: _Worker) -> str:
        self._workers.remove(worker)
        self._selector.unregister(worker.connection)
        return worker.end()

    def _hand_out(self, queue: deque[Chunk]) -> None:
        for worker in [w for w in self._workers if not w.busy]:
            # an idle worker has nothing to say: what there is to read is its end
            if queue and not worker.connection.poll():
                worker.give(queue.popleft(), self._timeout_s + KILL_GRACE_S)

    def _seconds_left(self) -> float | None:
        deadlines = [worker.deadline for worker in self._workers if worker.busy]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _receive(self, worker: _Worker, queue: deque[Chunk]) -> Iterator[Outcome]:
        try:
            message = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            how = self._remove(worker)
            if not worker.loaded:
                raise RewardError(f"a reward worker ended with {how} while it loaded {self._names()}.") from None
            yield from self._lost(worker, queue, Outcome(0, worker.function, error=f"the worker died ({how})"))
            return
        if worker.loaded:
            outcome = Outcome(*message)
            del worker.pending[outcome.row]
            worker.deadline = time.monotonic() + self._timeout_s + KILL_GRACE_S
            yield outcome
        elif message is not None:
            self._remove(worker)
            raise RewardError(f"a reward worker cannot load {self._names()}:\n{message}")
        else:
            worker.loaded = True

    def _give_up(self, worker: _Worker, queue: deque[Chunk]) -> Iterator[Outcome]:
        self._remove(worker)
        if not worker.loaded:
            raise RewardError(f"a reward worker did not load {self._names()} within {START_S:g} s.")
        error = timeout_reason(self._timeout_s)
        yield from self._lost(worker, queue, Outcome(0, worker.function, error=error, timed_out=True))

    def _lost(self, worker: _Worker, queue: deque[Chunk], outcome: Outcome) -> Iterator[Outcome]:
        """Blame the call that a lost worker was in, as `outcome` says; the calls it was not in go back to the queue."""
        calls: list[Call] = list(worker.pending.items())
        if len(calls) > 1 and self._functions[worker.function].is_async:
            self.retries += len(calls)
            queue.extendleft(Chunk(worker.function, [call]) for call in calls)
        elif calls:
            if calls[1:]:
                queue.appendleft(Chunk(worker.function, calls[1:]))
            yield outcome._replace(row=calls[0][0])

    def _names(self) -> str:
        return ", ".join(fn.name for fn in self._functions)


def _check_sendable(fn: RewardFunction) -> None:
    try:
        cloudpickle.dumps(fn)
    except Exception as error:
        raise ConfigError(
            f"reward {fn.name} cannot be sent to a worker process: {error}. Create what cannot be sent inside the "
            "function, or set reward.workers=0."
        ) from error


def _packed(calls: Sequence[Call]) -> bytes:
    """All arguments, as bytes of their own: a worker that cannot load them can still answer for each row."""
    try:
        return bytes(cloudpickle.dumps([dict(arguments) for _, arguments in calls]))
    except Exception as error:
        names = sorted({name for _, arguments in calls for name in arguments})
        raise BatchError(
            f"a value in one of the columns {names} cannot be sent to a reward worker: {error}. Keep such values out "
            "of the columns, or set reward.workers=0."
        ) from error
