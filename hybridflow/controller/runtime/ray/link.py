"""Link: the one place that calls Ray. Every call is counted, has a deadline, and is watched until it has returned.

A call that fails, whichever it is, ends the run: after a short grace, in which other ranks may say that they failed
first, the first cause is raised and every host is killed, since nothing else frees a rank that waits in a collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
from ray.exceptions import RayError

from ....errors import HybridFlowError, WorkerError
from .cluster import INLINE_BYTES
from .faults import GONE, failure_of, unsent
from .host import State
from .message import unfolded
from .reports import Blame, Failure, Report
from .shards import HostKey

GRACE_S = 0.25  # after a failure, for causes that come later
CAUSE_S = 4.0  # after failures that are others' fault alone, for the rank that caused them to be found dead
ASK_S = 3.0  # for a host to say what it is doing, whatever holds its interpreter
NEARLY = 0.9
LOOK_S = 0.1  # between two looks at all calls, while those that are waited for do not return
PROGRESS_S = 2.0  # between two looks at how far a call is
LOOKS_S = 0.5  # such a look


@dataclass(eq=False)
class HostHandle:
    """A host, as the driver calls it. where: to name it in messages. log: of its errors, a file on its node."""

    key: HostKey
    actor: Any
    where: str = ""
    log: str = ""


@dataclass
class Call:
    """A call that is under way. deadline: when it is looked at; time.monotonic(). limit: the key behind timeout_s."""

    number: int
    name: str
    host: HostHandle
    timeout_s: float
    deadline: float
    limit: str

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.name}, rank {self.host.key[1]} ({self.host.where})"


class Link:
    """Calls of one run. timeout_s: of each, from the moment it executes; None: no deadline.

    counted: told kind (arguments, results, fetches), call and bytes of all that passes through the driver, where
    somebody asks; costs a second serialisation. on_failure: called with the number of the call that failed first,
    before the hosts are killed.
    """

    counted: ClassVar[Callable[[str, str, int], None] | None] = None

    def __init__(self, timeout_s: float | None, on_progress: Callable[[int, int], None]) -> None:
        self.timeout_s = timeout_s
        self.hosts: list[HostHandle] = []
        self.on_failure: Callable[[int], None] = lambda number: None
        self._on_progress = on_progress
        self._under_way: dict[Any, Call] = {}
        self._reports: dict[Any, Report] = {}
        self._numbers = 0
        self._failed: HybridFlowError | None = None

    # ---- calls
    def submit(
        self, host: HostHandle, method: str, name: str, *args: Any, timeout_s: float | None = None
    ) -> tuple[Any, Any]:
        """Send a call that is reported: (reference of the report, reference of what it made). timeout_s: of a start."""
        if self._failed is not None:
            raise self._failed
        self._numbers += 1
        seconds = timeout_s or self.timeout_s or float("inf")
        limit = "run.start_timeout_s" if timeout_s else "run.call_timeout_s"
        report, made = self._send(host, method, name, (self._numbers, *args))
        self._under_way[report] = Call(self._numbers, name, host, seconds, time.monotonic() + seconds, limit)
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
            if self._failed is not None:
                raise self._failed
            seconds = max(0.0, min(self._seconds_left(), LOOK_S))
            try:
                ready, said = missing, ray.get(missing, timeout=seconds)
            except RayError:  # not all in time, or one of them failed
                ready, said = self._ready(0.0), None
            self._settle(ready, said)
            if self._under_way and self._seconds_left() <= 0:
                self._check_overdue(time.monotonic())
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
            with suppress(RayError):  # what cannot be reached is gone; why the run ends is worth more
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
        try:
            return getattr(host.actor, method).remote(*args)
        except RayError as error:
            raise unsent(error, name) from error

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

    def _settle(self, ready: Sequence[Any], said: Sequence[Any] | None = None) -> None:
        """Take the reports of calls that have returned; `said`, if they were read. Errors: the cause, if one failed."""
        failures = self._taken(ready, said)
        if not failures:
            return
        since = time.monotonic()
        while self._under_way:
            grace = CAUSE_S if all(failure.blame for _, failure in failures) else GRACE_S
            left = since + grace - time.monotonic()
            if left <= 0:
                break
            failures += self._taken(self._ready(left))
        self._fail(failures)

    def _taken(self, ready: Sequence[Any], said: Sequence[Any] | None = None) -> list[tuple[Call, Failure]]:
        failures = []
        for ref, wire in zip(ready, said or self._got(ready), strict=True):
            call, report = self._under_way.pop(ref), Report.of(unfolded(wire))
            self._count("results", call.name, wire)
            if report.made is not None and report.made.nbytes < INLINE_BYTES and Link.counted is not None:
                Link.counted("results", call.name, report.made.nbytes)  # Ray sent the rows along
            if report.failure is not None:
                failures.append((call, report.failure))
            else:
                self._reports[ref] = report
        return failures

    def _got(self, refs: Sequence[Any]) -> list[Any]:
        """Folded reports of calls that have returned, or why there is none."""
        try:
            return list(ray.get(list(refs), timeout=ASK_S))
        except RayError:
            return [_report(ref, self._under_way[ref].host) for ref in refs]

    def _check_overdue(self, now: float) -> None:
        """Calls that have not executed for their whole time yet get the rest. Errors: the silent ranks, by name."""
        calls = list(self._under_way.values())
        standing = list(zip(calls, self._states(calls), strict=True))
        overdue = [(call, _executed(call, state)) for call, state in standing if call.deadline <= now]
        if all(seconds < call.timeout_s for call, seconds in overdue):
            for call, seconds in overdue:
                call.deadline = time.monotonic() + max(0.05, call.timeout_s - seconds)
            return
        # those of its ranks that began a moment later are as silent as the first
        silent = [(call, state) for call, state in standing if _executed(call, state) >= NEARLY * call.timeout_s]
        self._fail([(call, _silence(call, state)) for call, state in silent])

    def _fail(self, failures: Sequence[tuple[Call, Failure]]) -> None:
        """Kill everything and raise the first cause."""
        silent: list[str] = []
        if all(failure.blame for _, failure in failures):
            failed = {call.number for call, _ in failures}
            calls = [call for call in self._under_way.values() if call.number not in failed]
            waiting = list(zip(calls, self._states(calls), strict=True))
            failures = [*failures, *((call, Failure(GONE)) for call, state in waiting if state is None)]
            silent = [f"{call.where} is at\n{state.stack}" for call, state in waiting if state is not None]
        call, failure = min(failures, key=lambda pair: (pair[1].blame, pair[0].number))
        self.on_failure(call.number)
        self.kill()
        others = [f"{other.where}: {why.message}" for other, why in failures if other.host is not call.host]
        self._under_way.clear()
        self._failed = _raised(call, failure, [*others, *silent])
        raise self._failed

    def _states(self, calls: Sequence[Call]) -> list[State | None]:
        """How calls stand on their hosts, all asked at once; None for one that does not answer."""
        refs = [self._send(call.host, "state", "state", call.number) for call in calls]
        answered = set(ray.wait(refs, num_returns=len(refs), timeout=ASK_S)[0]) if refs else set()
        return [_state(ref) if ref in answered else None for ref in refs]

    def _show_progress(self, calls: Sequence[Call]) -> None:
        """Of the first of these calls."""
        try:
            progress = self.ask(calls[0].host, "progress", calls[0].number, timeout_s=LOOKS_S) if calls else None
        except RayError:
            return
        if progress is not None:
            self._on_progress(*progress)


def _report(ref: Any, host: HostHandle) -> Any:
    try:
        return ray.get(ref, timeout=ASK_S)
    except RayError as error:
        return Report(0, 0.0, failure=failure_of(error, host.log))


def _state(ref: Any) -> State | None:
    try:
        state: State = ray.get(ref, timeout=ASK_S)
    except RayError:
        return None
    return state


def _executed(call: Call, state: State | None) -> float:
    """Seconds; all it had, where its host does not answer."""
    return call.timeout_s if state is None else state.seconds or 0.0


def _silence(call: Call, state: State | None) -> Failure:
    late = f"did not return within {round(call.timeout_s, 1):g} s ({call.limit})"
    if state is None:
        return Failure(f"{late}, and its process does not answer")
    return Failure(f"{late}; it is at\n{state.stack}", blame=Blame.COLLECTIVE if state.collective else Blame.OWN)


def _raised(call: Call, failure: Failure, others: Sequence[str]) -> HybridFlowError:
    """The error that the user sees."""
    beside = ["Beside it:", *others] if others else []
    if failure.error is not None:
        failure.error.locate(call.where)
        if not failure.error.of_input and "Traceback" not in failure.error.message:
            failure.error.add_note("\n".join([failure.traceback.rstrip(), *beside]))
        return failure.error
    parts = [failure.message, failure.traceback.rstrip(), *beside]
    return WorkerError("\n".join(part for part in parts if part), where=call.where)
