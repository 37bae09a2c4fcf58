"""Calls of reward functions, each under a time-out, and the process that makes them.

A worker process is plain Python that runs `main` here: it imports neither numpy nor torch, and never the user's
`__main__` again (functions defined there arrive by value). It answers with one message a call, so that whoever waits
knows which call a dead or silent worker was in.
"""

from __future__ import annotations

import asyncio
import bdb
import fcntl
import inspect
import math
import os
import pickle
import reprlib
import signal
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NamedTuple, Self, SupportsFloat

from ..errors import named

FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
MESSAGE_LENGTH = 300  # characters of an exception's text that a reason keeps


@dataclass(frozen=True)
class RewardFunction:
    """A user's function under its name, and the columns it may be given."""

    name: str
    call: Callable[..., Any]
    columns: tuple[str, ...]

    @property
    def is_async(self) -> bool:
        """Whether a call makes a coroutine."""
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(type(self.call).__call__)


Call = tuple[int, Mapping[str, Any]]  # row number, the function's arguments


class Chunk(NamedTuple):
    """Calls of one function, in the order they are made; those of an async function run at the same time."""

    function: int
    calls: Sequence[Call]


class Outcome(NamedTuple):
    """What one call came to. value: NaN if not applicable or in error. extras: a dict's further numbers."""

    row: int
    function: int
    value: float = math.nan
    extras: Mapping[str, float] = {}
    error: str | None = None
    traceback: str | None = None
    timed_out: bool = False


class CallTimeout(BaseException):
    """A call ran out of time. Not an Exception, so that a function's own `except Exception` lets it pass."""


class NotARewardError(Exception):
    """A function returned what is no reward."""


class Alarm:
    """Raises CallTimeout in the main thread after some seconds; None: never. `fired` tells even if it was swallowed."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.fired = False

    def __enter__(self) -> Self:
        if self.seconds is not None:
            signal.signal(signal.SIGALRM, self._fire)  # each time: a function may have set its own
            signal.setitimer(signal.ITIMER_REAL, self.seconds)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _fire(self, number: int, frame: FrameType | None) -> None:
        self.fired = True
        raise CallTimeout


class Caller:
    """Makes the calls of a chunk and emits an outcome for each, whatever the function does short of ending the process.

    timeout_s: None for no time-out. run_async: runs a coroutine to its end, always in the same event loop, so that a
    function may keep a client open from call to call.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        timeout_s: float | None,
        run_async: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._functions = functions
        self._timeout_s = timeout_s
        self._run_async = run_async

    def run(self, chunk: Chunk, emit: Callable[[Outcome], None]) -> None:
        """Make the calls; `emit` gets each outcome as soon as it is known."""
        fn = self._functions[chunk.function]
        if fn.is_async:
            self._run_async(self._call_all(fn.call, chunk, emit))
        else:
            for row, arguments in chunk.calls:
                emit(self._call(fn.call, row, chunk.function, arguments))

    def _call(self, fn: Callable[..., Any], row: int, function: int, arguments: Mapping[str, Any]) -> Outcome:
        alarm = Alarm(self._timeout_s)
        try:
            with alarm:
                returned = fn(**arguments)
            if alarm.fired:  # the function swallowed it and returned all the same
                raise CallTimeout
            return Outcome(row, function, *reward_of(returned))
        except (KeyboardInterrupt, bdb.BdbQuit):  # someone at a breakpoint wants to leave
            raise
        except BaseException as error:
            return self._failure(row, function, error, alarm.fired)

    async def _call_all(self, fn: Callable[..., Any], chunk: Chunk, emit: Callable[[Outcome], None]) -> None:
        async def one(row: int, arguments: Mapping[str, Any]) -> None:
            emit(await self._call_async(fn, row, chunk.function, arguments))

        await asyncio.gather(*(one(row, arguments) for row, arguments in chunk.calls))

    async def _call_async(
        self, fn: Callable[..., Any], row: int, function: int, arguments: Mapping[str, Any]
    ) -> Outcome:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                returned = await fn(**arguments)
            if limit.expired():
                raise CallTimeout
            return Outcome(row, function, *reward_of(returned))
        except (KeyboardInterrupt, bdb.BdbQuit):
            raise
        except BaseException as error:
            return self._failure(row, function, error, limit.expired())

    def _failure(self, row: int, function: int, error: BaseException, timed_out: bool) -> Outcome:
        if timed_out:
            reason = timeout_reason(self._timeout_s)
        elif isinstance(error, NotARewardError):
            return Outcome(row, function, error=str(error))
        else:
            reason = named(error)[:MESSAGE_LENGTH]
        frames = error.__traceback__.tb_next if error.__traceback__ else None  # without this module's own frame
        text = "".join(traceback.format_exception(type(error), error, frames))
        return Outcome(row, function, error=reason, traceback=text, timed_out=timed_out)


def timeout_reason(timeout_s: float | None) -> str:
    """The reason a row is dropped for when its call took too long."""
    return f"TimeoutError after {timeout_s:g} s"


def reward_of(returned: Any) -> tuple[float, dict[str, float]]:
    """The reward (NaN: not applicable) and the further numbers in what a function returned.

    Errors: NotARewardError, which says what was returned, unless that is a finite number, None or a dict with `reward`.
    """
    if isinstance(returned, dict):
        if "reward" not in returned:
            raise NotARewardError(f"returned a dict without the key 'reward': {reprlib.repr(returned)}")
        extras = {str(k): float(v) for k, v in returned.items() if k != "reward" and isinstance(v, SupportsFloat)}
        return reward_of_number(returned["reward"]), extras
    return reward_of_number(returned), {}


def reward_of_number(returned: Any) -> float:
    """A returned number as a float; NaN for None. Errors: NotARewardError."""
    if returned is None:
        return math.nan
    if isinstance(returned, str) or not isinstance(returned, SupportsFloat):
        raise NotARewardError(f"returned the {type(returned).__name__} {reprlib.repr(returned)}, not a number")
    value = float(returned)
    if not abs(value) <= FLOAT32_MAX:
        raise NotARewardError(f"returned {value}, not a finite float32")
    return value


def main(connection_handle: int, lifeline: int) -> None:
    """A worker process: load the functions, then make the calls that come in, until the other side is gone."""
    for handle in (connection_handle, lifeline):
        os.set_inheritable(handle, False)  # programs a function starts must not keep the pipes open
    end_with_parent(lifeline)
    connection = Connection(connection_handle)
    try:
        functions, timeout_s = pickle.loads(connection.recv_bytes())
    except BaseException:
        connection.send(traceback.format_exc())
        return
    connection.send(None)
    caller = Caller(functions, timeout_s, asyncio.Runner().run)
    while True:
        try:
            function, rows, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)  # at once: threads a function left behind must not keep the process
        _answer(connection, caller, function, rows, arguments)


def _answer(connection: Connection, caller: Caller, function: int, rows: list[int], arguments: bytes) -> None:
    def emit(outcome: Outcome) -> None:
        connection.send_bytes(pickle.dumps(tuple(outcome)))

    try:
        calls = list(zip(rows, pickle.loads(arguments), strict=True))
    except Exception as error:  # a value whose class cannot be imported here
        reason = f"the row cannot be loaded in a worker process: {type(error).__name__}: {error}"
        for row in rows:
            emit(Outcome(row, function, error=reason, traceback=traceback.format_exc()))
        return
    caller.run(Chunk(function, calls), emit)


def end_with_parent(lifeline: int) -> None:
    """Let the kernel end this process and its children once the pipe's other end is closed.

    SIGIO ends a process by default on Linux, even one that is inside C code and runs no Python. Elsewhere a worker ends
    when it next waits for calls.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
