"""The Ray cluster of a run: the one at RAY_ADDRESS, one this process has joined already, or one of its own."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass

import ray
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray.exceptions import AuthenticationError

from ....device import is_accelerated
from ....errors import HybridFlowError, named

ACCELERATORS = ("GPU", "NPU", "HPU")
SLOT = "slot"
"""The resource of a machine without accelerators: one for each rank it may hold, whatever the number of its cores."""
SLOTS = 1024
"""Of a cluster of our own on a CPU."""
INLINE_BYTES = 1024  # larger results stay in the object store of their node instead of passing through the driver
ANSWER_S = 5.0  # for a cluster's address to answer
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
        _join(os.environ["RAY_ADDRESS"])
    there = ray.cluster_resources()
    return Cluster(next((name for name in (*ACCELERATORS, SLOT) if there.get(name)), "CPU"), joined)


def _join(address: str) -> None:
    """Errors: HybridFlowError if nothing answers at the address, or it does not let this process in."""
    host, _, port = address.rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
        except OSError as error:
            raise HybridFlowError(
                f"RAY_ADDRESS={address}: nothing answers there ({error}). Start Ray there (ray start --head), or unset "
                "RAY_ADDRESS for a cluster of this machine's own."
            ) from error
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        ray.init(address="auto", logging_level=logging.ERROR)
    except (ConnectionError, AuthenticationError) as error:
        raise HybridFlowError(
            f"RAY_ADDRESS={address}: the Ray cluster there does not let this process in, or is on its way down: "
            f"{named(error).splitlines()[0]} If it wants a token, give this machine the ~/.ray/auth_token of the "
            "head's and set RAY_AUTH_MODE=token; RAY_AUTH_MODE=disabled on all machines does without one."
        ) from error


def disconnect(cluster: Cluster) -> None:
    """Leave it, if the run joined it; one of the run's own ends with that."""
    if cluster.joined and ray.is_initialized():
        ray.shutdown()
