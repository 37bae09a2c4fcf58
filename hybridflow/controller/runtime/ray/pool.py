"""Pool: hosts on devices of the cluster, a process each, ranked by node and device."""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ....errors import ConfigError, HybridFlowError
from ...group import Place
from . import host as tasks
from .cluster import SETTINGS, Cluster
from .faults import unstarted
from .host import GROUPS, Host, Rendezvous, Where
from .link import HostHandle, Link
from .shards import DIRECTORY, Peer

CONTROL_S = 60.0  # for a control call to a host that has just begun
COLLECTIVE_S = 86400.0  # where nobody set a deadline


@dataclass
class Pool:
    """The hosts of one place, by rank, in the run of that number. `create`, then `form`, then calls; `end` gives the
    slots back."""

    place: Place
    run: int
    hosts: list[HostHandle] = field(default_factory=list)
    group: PlacementGroup | None = None

    def create(self, cluster: Cluster, link: Link, until: float) -> None:
        """Ask for the processes. Errors: HybridFlowError if the cluster does not give the slots in time."""
        actors = self._on_devices(cluster, until) if self.place.devices else [self._beside_driver()]
        self.hosts = [HostHandle((self.place.pool, index, self.run), actor) for index, actor in enumerate(actors)]
        link.hosts += self.hosts

    def form(self, link: Link, seed: int, until: float) -> None:
        """Rank the processes by node and device, and let them meet in a process group."""
        found: list[tuple[HostHandle, Where]] = [
            (handle, answer(link, handle, "where", timeout_s=max(1.0, until - time.monotonic())))
            for handle in self.hosts
        ]
        found.sort(key=lambda pair: (pair[1].node, [(len(d), d) for d in pair[1].devices], pair[0].key[1]))
        for rank, (handle, where) in enumerate(found):
            handle.key = (self.place.pool, rank, self.run)
            handle.where, handle.log = f"process {where.process} on {where.address}", where.log
            DIRECTORY.peers[handle.key] = Peer(handle.actor, where.node, handle.where)
        self.hosts = [handle for handle, _ in found]
        self._join(link, found[0][1], max(Counter(where.node for _, where in found).values()), seed, until)

    def end(self) -> None:
        """Give the slots back."""
        if self.group is not None:
            remove_placement_group(self.group)

    def _on_devices(self, cluster: Cluster, until: float) -> list[Any]:
        self.group = placement_group([{cluster.resource: 1}] * self.place.ranks, strategy="PACK")
        left = max(0.0, until - time.monotonic())
        if not self.group.wait(left):
            remove_placement_group(self.group)
            raise HybridFlowError(
                f"{self.place.ranks} x {cluster.resource} for {self.place.pool} did not become free within "
                f"{left:.0f} s (run.start_timeout_s): {cluster.free_slots():g} are free of {cluster.described()}. "
                "Another job holds the rest: end it, wait for it, or ask for fewer."
            )
        slots: dict[str, Any] = {cluster.resource: 1}
        cpus, gpus = slots.pop("CPU", 0), slots.pop("GPU", 0)
        return [
            _actor(
                num_cpus=cpus,
                num_gpus=gpus,
                resources=slots,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index),
            ).remote((self.place.pool, index, self.run))
            for index in range(self.place.ranks)
        ]

    def _beside_driver(self) -> Any:
        node = ray.get_runtime_context().get_node_id()
        return _actor(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            (self.place.pool, 0, self.run)
        )

    def _join(self, link: Link, first: Where, hosts_on_node: int, seed: int, until: float) -> None:
        """All ranks at once: the process group forms when the last has come."""
        port: int = answer(link, self.hosts[0], "free_port", timeout_s=CONTROL_S)
        # a collective gives up later than the controller does, which then says who is missing
        wait_s, threads = COLLECTIVE_S if link.timeout_s is None else 2 * link.timeout_s, _threads(hosts_on_node)
        reports = []
        for rank, handle in enumerate(self.hosts):
            group = Rendezvous(first.address, port, rank, len(self.hosts), wait_s, threads)
            name, left = f"{self.place.pool}.join", max(1.0, until - time.monotonic())
            reports.append(link.submit(handle, "run", name, tasks.join, group, seed, timeout_s=left)[0])
        link.wait(reports)


def answer(link: Link, host: HostHandle, method: str, *args: Any, timeout_s: float) -> Any:
    """What a host that starts answers. Errors: WorkerError if it is dead or silent."""
    try:
        return link.ask(host, method, *args, timeout_s=timeout_s)
    except RayError as error:
        raise unstarted(error, host.key[0]) from error


def check_slots(cluster: Cluster, places: Sequence[Place]) -> None:
    """Errors: ConfigError if the cluster could never hold all these places at once."""
    asked = [place for place in places if place.devices]
    total = sum(place.ranks for place in asked)
    if total > cluster.slots():
        each = ", ".join(f"{place.pool} {place.ranks}" for place in asked)
        raise ConfigError(
            f"placement asks for {total} devices ({each}), and this cluster has {cluster.described()}: ask for fewer, "
            "place roles on the same devices (placement.critic=actor), or add nodes."
        )


def _actor(**options: Any) -> Any:
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    variables = {"PYTHONPATH": os.pathsep.join(_own_folders()), "OMP_NUM_THREADS": threads, **SETTINGS}
    remote: Any = ray.remote  # its overloads know no concurrency groups
    return remote(
        max_restarts=0, max_task_retries=0, concurrency_groups=GROUPS, runtime_env={"env_vars": variables}, **options
    )(Host)


def _own_folders() -> list[str]:
    """Where this process finds modules that are not installed, the user's among them: a host looks there too."""
    paths = sysconfig.get_paths()
    installed = tuple({paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    return [path or os.getcwd() for path in sys.path if not path.startswith(installed) and not path.endswith(".zip")]


def _threads(hosts: int) -> int:
    """CPU threads of each of so many hosts of a node, unless the user says."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    return int(said) if said.isdigit() else max(1, (os.cpu_count() or 1) // hosts)
