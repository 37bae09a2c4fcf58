"""Link: the one place that calls Ray. Every call is counted, has a deadline, and is watched until it has returned.

A call that fails, whichever it is, ends the run: after a short grace, in which other ranks may say that they failed
first, the first cause is raised and every host is killed, since nothing else frees a rank that waits in a collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from ....errors import HybridFlowError, WorkerError
from .host import State
from .reports import Failure, Report
from .shards import HostKey

GRACE_S = 0.25  # after a failure, for causes that come later
CAUSE_S = 4.0  # after failures in collectives alone, for the rank that caused them to be found dead
ASK_S = 2.0  # for a host to say what it is doing
NEARLY = 0.9
LOOK_S = 0.05  # between two looks at the calls that nobody waits for
PROGRESS_S = 2.0  # between two looks at how far a call is
GONE = "its process does not answer: the node is down, or cut off from this one"
SILENT = "did not return within {timeout:g} s (run.call_timeout_s); it is at\n{stack}"


@dataclass(eq=False)
class HostHandle:
    """A host, as the driver calls it. where: to name it in messages."""

    key: HostKey
    actor: Any
    where: str = ""


@dataclass
class Call:
    """A call that is under way. deadline: when it is looked at; time.monotonic()."""

    number: int
    name: str
    host: HostHandle
    timeout_s: float
    deadline: float

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.name}, rank {self.host.key[1]} ({self.host.where})"


class Link:
    """Calls of one run. timeout_s: of each, from the moment it executes; None: no deadline.

    counted: told kind (arguments, results, fetches), call and bytes of all that passes through the driver, where somebody
    asks; costs a second serialisation. on_failure: called with the failed calls' numbers before the hosts are killed.
    """

    counted: ClassVar[Callable[[str, str, int], None] | None] = None

    def __init__(self, timeout_s: float | None, on_progress: Callable[[int, int], None]) -> None:
        self.timeout_s = timeout_s
        self.hosts: list[HostHandle] = []
        self.on_failure: Callable[[Sequence[int]], None] = lambda numbers: None
        self._on_progress = on_progress
        self._under_way: dict[Any, Call] = {}
        self._reports: dict[Any, Report] = {}
        self._numbers = 0
        self._failed: HybridFlowError | None = None

    # ---- calls
    def submit(
        self, host: HostHandle, method: str, name: str, *args: Any, timeout_s: float | None = None
    ) -> tuple[Any, Any]:
        """Send a call that is reported: (reference of the report, reference of what it made)."""
        if self._failed is not None:
            raise self._failed
        self._numbers += 1
        limit = timeout_s or self.timeout_s or float("inf")
        report, made = self._send(host, method, name, (self._numbers, *args))
        self._under_way[report] = Call(self._numbers, name, host, limit, time.monotonic() + limit)
        return report, made

    def ask(self, host: HostHandle, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a host's control thread and wait. Errors: RayError if it is dead or does not answer in time."""
        value = ray.get(self._send(host, method, method, *args), timeout=timeout_s)
        self._count("results", method, value)
        return value

    def fetched(self, names: Sequence[str], nbytes: int) -> None:
        """Columns were read in the driver."""
        if Link.counted is not None:
            Link.counted("fetches", ", ".join(names), nbytes)

    def wait(self, reports: Sequence[Any]) -> list[Report]:
        """The reports, once all have come. Errors: the first cause, if any call of the run fails meanwhile."""
        looked = time.monotonic()
        while missing := [ref for ref in reports if ref not in self._reports]:
            seconds = max(0.0, min(self._seconds_left(), LOOK_S))
            ready, others = ray.wait(missing, num_returns=len(missing), timeout=seconds, fetch_local=False)
            self._settle(self._ready(0.0) if others else ready)
            overdue = [call for call in self._under_way.values() if time.monotonic() >= call.deadline]
            if overdue:
                self._check_overdue(overdue)
            if time.monotonic() - looked > PROGRESS_S:
                self._show_progress([self._under_way[ref] for ref in reports if ref in self._under_way])
                looked = time.monotonic()
        return [self._reports.pop(ref) for ref in reports]

    def number_of(self, report: Any) -> int:
        """The number of a call that is under way."""
        return self._under_way[report].number

    def kill(self) -> None:
        """End every host at once."""
        for host in self.hosts:
            ray.kill(host.actor)

    def close(self) -> None:
        """Nothing can be called from here on."""
        self._failed = self._failed or HybridFlowError("the run is closed.")
        self.kill()
        self._under_way.clear()
        self._reports.clear()

    # ---- Ray itself
    def _send(self, host: HostHandle, method: str, name: str, *args: Any) -> Any:
        self._count("arguments", name, *args)
        return getattr(host.actor, method).remote(*args)

    def _count(self, kind: str, name: str, *values: Any) -> None:
        if Link.counted is not None:
            context = ray._private.worker.global_worker.get_serialization_context()
            Link.counted(kind, name, sum(context.serialize(value).total_bytes for value in values))

    # ---- watching
    def _ready(self, seconds: float) -> list[Any]:
        """References of calls that have returned or failed; waits for the first."""
        refs = list(self._under_way)
        ready, waiting = ray.wait(refs, num_returns=1, timeout=max(0.0, seconds), fetch_local=False)
        if ready and waiting:
            more, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0, fetch_local=False)
            ready += more
        return list(ready)

    def _seconds_left(self) -> float:
        return min(call.deadline for call in self._under_way.values()) - time.monotonic()

    def _settle(self, ready: Sequence[Any]) -> None:
        """Take the reports of calls that have returned. Errors: the cause, if one failed."""
        failures = self._taken(ready)
        if not failures:
            return
        since = time.monotonic()
        while self._under_way:
            grace = CAUSE_S if all(failure.collective for _, failure in failures) else GRACE_S
            left = since + grace - time.monotonic()
            if left <= 0:
                break
            failures += self._taken(self._ready(left))
        self._fail(failures)

    def _taken(self, ready: Sequence[Any]) -> list[tuple[Call, Failure]]:
        failures = []
        for ref, report in zip(ready, self._got(ready), strict=True):
            call = self._under_way.pop(ref)
            self._count("results", call.name, report)
            self._reports[ref] = report
            if report.failure is not None:
                failures.append((call, report.failure))
        return failures

    def _got(self, refs: Sequence[Any]) -> list[Report]:
        """Reports of calls that have returned, or why there is none."""
        try:
            return list(ray.get(list(refs), timeout=ASK_S))
        except RayError:
            return [_report(ref) for ref in refs]

    def _check_overdue(self, overdue: Sequence[Call]) -> None:
        """Calls that have not executed for their whole time yet get the rest. Errors: the silent ranks, by name."""
        states = {call.number: self._state(call) for call in overdue}
        if all(_executed(call, states[call.number]) < call.timeout_s for call in overdue):
            for call in overdue:
                call.deadline = time.monotonic() + max(0.05, call.timeout_s - _executed(call, states[call.number]))
            return
        # those of its ranks that began a moment later are as silent as the first
        silent = [(call, states.get(call.number) or self._state(call)) for call in self._under_way.values()]
        self._fail([(call, _silence(call, s)) for call, s in silent if _executed(call, s) >= NEARLY * call.timeout_s])

    def _fail(self, failures: Sequence[tuple[Call, Failure]]) -> None:
        """Kill everything and raise the first cause."""
        silent: list[str] = []
        if all(failure.collective for _, failure in failures):
            waiting = [(call, self._state(call)) for call in self._under_way.values()]
            failures = [*failures, *((call, Failure(GONE)) for call, state in waiting if state is None)]
            silent = [f"{call.where} is at\n{state.stack}" for call, state in waiting if state is not None]
        self.on_failure([call.number for call, _ in failures])
        self.kill()
        call, failure = min(failures, key=lambda pair: (pair[1].collective, pair[0].number))
        others = [f"{other.where}: {why.message}" for other, why in failures if other.host is not call.host]
        self._under_way.clear()
        self._failed = _raised(call, failure, [*others, *silent])
        raise self._failed

    def _state(self, call: Call) -> State | None:
        """How a call stands on its host; None if that does not answer."""
        try:
            state: State = self.ask(call.host, "state", call.number, timeout_s=ASK_S)
        except RayError:
            return None
        return state

    def _show_progress(self, calls: Sequence[Call]) -> None:
        """Of the first of these calls."""
        try:
            progress = self.ask(calls[0].host, "progress", calls[0].number, timeout_s=ASK_S) if calls else None
        except RayError:
            return
        if progress is not None:
            self._on_progress(*progress)


def _report(ref: Any) -> Report:
    try:
        report: Report = ray.get(ref, timeout=ASK_S)
    except GetTimeoutError:
        return Report(0, 0.0, failure=Failure("its report did not arrive"))
    except RayActorError as error:
        return Report(0, 0.0, failure=Failure(f"the process died: {_how(error)}"))
    except RayError as error:
        return Report(0, 0.0, failure=Failure(f"{type(error).__name__}: {_first_line(error)}", str(error)))
    return report


def _executed(call: Call, state: State | None) -> float:
    """Seconds; all it had, where its host does not answer."""
    return call.timeout_s if state is None else state.seconds or 0.0


def _silence(call: Call, state: State | None) -> Failure:
    if state is None:
        return Failure(
            f"did not return within {call.timeout_s:g} s (run.call_timeout_s), and its process does not answer"
        )
    return Failure(SILENT.format(timeout=call.timeout_s, stack=state.stack), collective=state.collective)


def _raised(call: Call, failure: Failure, others: Sequence[str]) -> HybridFlowError:
    """The error that the user sees."""
    if failure.error is not None:
        failure.error.locate(call.where)
        return failure.error
    parts = [failure.message, failure.traceback.rstrip(), *(["Beside it:", *others] if others else [])]
    return WorkerError("\n".join(part for part in parts if part), where=call.where)


def _how(error: RayActorError) -> str:
    """How an actor died, in one line."""
    text = str(error)
    for mark in ("Worker exit detail:", "The actor died because", "The actor is dead because"):
        if mark in text:
            return text.split(mark)[1].split("Some common")[0].strip().splitlines()[0]
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
