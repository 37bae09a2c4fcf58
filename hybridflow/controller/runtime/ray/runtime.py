"""The Ray runtime: pools of hosts on a cluster, groups on pools, and every call between them through one link."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import ray

from ....batch import Batch
from ....errors import ConfigError, named
from ...group import Place, Runtime
from ...replay import FILE, Replay
from ...trace import Span, Trace
from ...worker import Worker
from .cluster import Cluster, connect, disconnect
from .group import GroupCall, RankCall, RayGroup
from .host import sent_as
from .link import HostHandle, Link
from .message import send_user_files_by_value, sent
from .pool import CONTROL_S, Pool, answer, check_slots
from .reports import Report
from .shards import DIRECTORY, Drive, HostKey

NUMBERS = count(1)  # of the runs of this process
KEEP_S = 3.0  # for each read of what a failed call was given, from hosts of which some may be gone


@dataclass(frozen=True)
class Deadlines:
    """Seconds: of a call, from the moment it executes, and of the start of pools and groups."""

    call_s: float | None = 1800.0
    start_s: float = 600.0


class RayRuntime(Runtime):
    """Groups on a Ray cluster. failure_folder: where a failed call's inputs go. say: told what a user should know.

    debug: (group, rank) of which each call waits for a debugger; then no call has a deadline.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        seed: int,
        deadlines: Deadlines,
        failure_folder: Path,
        say: Callable[[str], None],
        debug: tuple[str, int] | None = None,
    ) -> None:
        self.trace, self.debug = trace, debug
        self._seed, self._deadlines, self._failure_folder, self._say = seed, deadlines, failure_folder, say
        self._pools: dict[str, Pool] = {}
        self._link = Link(None if debug else deadlines.call_s, trace.progress)
        self._link.on_failure = self._keep_inputs
        self._cluster: Cluster | None = None
        self._number = next(NUMBERS)
        self._under_way: dict[int, tuple[GroupCall, Replay]] = {}

    def group(self, name: str, role: type[Worker[Any]], settings: Any, place: Place) -> RayGroup:
        """Errors: ConfigError for a pool of two sizes, or one that grows after the start."""
        pool = self._pools.setdefault(place.pool, Pool(place, self._number))
        if pool.place != place:
            raise ConfigError(
                f"the devices of {place.pool} are {pool.place.ranks}, but {name} asks for {place.ranks} of them: give "
                f"placement.{name} the same number, or the name of the role whose devices it shares."
            )
        if place.devices and not pool.hosts and any(p.hosts for p in self._pools.values() if p.place.devices):
            raise ConfigError(f"group '{name}' needs devices of its own, but the pools have started: declare it first.")
        return RayGroup(name, role, settings, place, self)

    @property
    def devices(self) -> int:
        """Accelerators of the cluster; where it has none, 1."""
        cluster = self._connected()
        return max(1, int(cluster.slots())) if cluster.accelerated else 1

    def start(self, place: Place) -> None:
        """Bring up a group's pool; one with devices, together with all others.

        Errors: ConfigError for what the cluster could never hold.
        """
        send_user_files_by_value()
        if self._pools[place.pool].hosts:
            return
        cluster, until = self._connected(), time.monotonic() + self._deadlines.start_s
        together = [p for p in self._pools.values() if not p.hosts and (place.devices or p.place == place)]
        check_slots(cluster, [pool.place for pool in together])
        if ranks := ", ".join(f"{p.place.ranks} of {p.place.pool}" for p in together if p.place.devices):
            self._say(f"starting ranks on Ray: {ranks}")
        for pool in together:
            pool.create(cluster, self._link, until)
        for pool in together:
            pool.form(self._link, self._seed, until)
        peers = {host.key: DIRECTORY.peers[host.key] for host in self._link.hosts}
        for host in self._link.hosts:
            answer(self._link, host, "meet", peers[host.key].node, peers, timeout_s=CONTROL_S)

    def _connected(self) -> Cluster:
        if self._cluster is None:
            self._cluster = connect()
            DIRECTORY.node = ray.get_runtime_context().get_node_id()
            DIRECTORY.drives[self._number] = Drive(self._apply, self._link.fetched)
        return self._cluster

    # ---- calls
    def submit(
        self, group: RayGroup, rank: int, what: str, task: Callable[..., Any], *args: Any, inputs: Batch | None = None
    ) -> RankCall:
        """Send a task to one rank of a group."""
        host = self._host((group.place.pool, rank, self._number))
        limit = self._deadlines.start_s if what == "start" else None
        report, made = self._link.submit(host, "run", f"{group.name}.{what}", sent_as(task), *args, timeout_s=limit)
        return RankCall(report, made, self._link.number_of(report), host.key, inputs)

    def wait(self, calls: Sequence[RankCall], span: Span) -> list[Report]:
        """The reports of a call's ranks; its span gets its times."""
        try:
            reports = self._link.wait([call.report for call in calls])
        except BaseException as error:
            span.error = type(error).__name__
            self.trace.end(span)
            raise
        for call in calls:
            self._under_way.pop(call.number, None)
        span.start_ns = min(report.start_ns for report in reports)
        end = max(report.start_ns + report.seconds * 1e9 for report in reports)
        span.seconds = (end - span.start_ns) / 1e9
        return reports

    def remember(self, call: GroupCall, replay: Replay) -> None:
        """Keep what a call was given until it has returned."""
        for rank in call.ranks:
            self._under_way[rank.number] = call, replay

    def settle(self) -> None:
        while self._under_way:
            next(iter(self._under_way.values()))[0].result  # noqa: B018  waits

    def close(self) -> None:
        """Ends every host. A cluster that is not our own goes on without us."""
        self._link.close()
        for pool in self._pools.values():
            pool.end()
        if self._cluster is not None:
            DIRECTORY.forget(self._number)
            disconnect(self._cluster)
        self._under_way.clear()
        self._cluster = None

    def _apply(self, host: HostKey, batch: Batch, fn: Callable[..., Any], *args: Any) -> Any:
        """A function of a batch on a host; see `Shard.apply`."""
        shown = next((each for each in args if callable(each)), fn)
        name = getattr(shown, "__name__", "function")
        span = self.trace.begin("apply", name, batch)
        report, made = self._link.submit(self._host(host), "apply", f"apply.{name}", fn, *sent([batch, *args]))
        call = RankCall(report, made, self._link.number_of(report), host, batch)
        [answer] = self.wait([call], span)
        value = call.value(answer)
        self.trace.end(span, value if isinstance(value, Batch) else None)
        return value

    def _host(self, key: HostKey) -> HostHandle:
        return self._pools[key[0]].hosts[key[1]]

    def _keep_inputs(self, number: int) -> None:
        """Of the call that failed, if it was a method's. Whatever goes wrong here must not hide why the run failed."""
        DIRECTORY.drives[self._number].read_s = KEEP_S
        try:
            (self._failure_folder / FILE).unlink(missing_ok=True)
            if number in self._under_way:
                found = self._under_way[number][1]
                found.save(self._failure_folder)
                self._say(f"what {found.name} was given is kept: hybridflow replay {self._failure_folder}")
        except Exception as error:
            self._say(f"what the failed call was given could not be kept: {named(error)}")
