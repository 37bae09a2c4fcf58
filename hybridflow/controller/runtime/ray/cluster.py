"""The Ray cluster of a run: the one at RAY_ADDRESS, one this process has joined already, or one of its own."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import ray

from ....device import is_accelerated

ACCELERATORS = ("GPU", "NPU", "HPU")
SLOT = "slot"
"""The resource of a machine without accelerators: one for each rank it may hold, whatever the number of its cores."""
SLOTS = 1024
"""Of a cluster of our own on a CPU."""
INLINE_BYTES = 1024  # larger results stay in the object store of their node instead of passing through the driver
SETTINGS = {
    "RAY_max_direct_call_object_size": str(INLINE_BYTES),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # a host has an environment of its own: idle workers would serve nobody
}


@dataclass(frozen=True)
class Cluster:
    """resource: what a device slot is called there. joined: for this run, which leaves it at its end."""

    resource: str
    joined: bool

    @property
    def accelerated(self) -> bool:
        """Whether a slot is an accelerator."""
        return self.resource in ACCELERATORS

    def slots(self) -> float:
        """Device slots of the whole cluster."""
        return float(ray.cluster_resources().get(self.resource, 0))

    def free_slots(self) -> float:
        """Those that nobody holds."""
        return float(ray.available_resources().get(self.resource, 0))

    def described(self) -> str:
        """What there is, for messages."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        each = ", ".join(f"{node['NodeManagerAddress']}: {node['Resources'].get(self.resource, 0):g}" for node in nodes)
        return f"{self.slots():g} {self.resource} on {len(nodes)} node{'s' * (len(nodes) > 1)} ({each})"


def connect() -> Cluster:
    """Join the cluster there is, or start one here."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    joined = not ray.is_initialized()
    if joined and not os.environ.get("RAY_ADDRESS"):
        resources: dict[str, float] = {} if is_accelerated() else {SLOT: SLOTS}
        ray.init(
            address="local",
            resources=resources,
            include_dashboard=False,
            logging_level=logging.ERROR,
        )
    elif joined:
        ray.init(address="auto", logging_level=logging.ERROR)
    there = ray.cluster_resources()
    return Cluster(next((name for name in (*ACCELERATORS, SLOT) if there.get(name)), "CPU"), joined)


def disconnect(cluster: Cluster) -> None:
    """Leave it, if the run joined it; one of the run's own ends with that."""
    if cluster.joined and ray.is_initialized():
        ray.shutdown()
