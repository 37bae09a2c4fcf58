"""placement.*: which devices each role runs on, and which runtime that needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..controller.group import Place, Runtime
from ..controller.runtime.inline import InlineRuntime
from ..controller.trace import Trace
from ..controller.worker import Worker
from ..errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from .tree import Config

RUNTIMES = ("auto", "inline", "ray")


@dataclass
class PlacementConfig:
    """Of each role: a number of devices of its own, another role whose devices it shares, or all.

    Roles on the same devices take turns in the order of the calls; roles on different ones run side by side. A role of
    your own shares the actor's.
    """

    actor: str = "all"
    """N | all: every accelerator there is; without accelerators, one rank."""
    critic: str = "actor"
    """N | role | all."""
    reference: str = "actor"
    """N | role | all."""
    reward_model: str = "actor"
    """N | role | all."""

    def __post_init__(self) -> None:
        """Errors: ConfigError for what is neither a number of devices nor a role, and for roles that only name each
        other."""
        for role in (field.name for field in fields(self)):
            self.owner(role)

    def owner(self, role: str) -> tuple[str, str]:
        """The role whose devices `role` is on, and how many those are: a number or `all`."""
        seen = [role]
        while True:
            where = str(getattr(self, seen[-1], "actor"))
            if where == "all" or where.isdigit():
                break
            roles = [field.name for field in fields(self)]
            if where not in roles:
                raise ConfigError(
                    f"placement.{seen[-1]}={where}: give a number of devices, 'all', or one of {', '.join(roles)}."
                    + did_you_mean(where, roles)
                )
            if where in seen:
                raise ConfigError(f"placement: {' -> '.join([*seen, where])} go round in a circle; give one a number.")
            seen.append(where)
        if where == "0":
            raise ConfigError(f"placement.{seen[-1]}=0: it is at least 1.")
        return ("actor" if where == "all" else seen[-1]), where


def place_of(config: Config, name: str, role: type[Worker[Any]], devices: int) -> Place:
    """Where the group `name` of a role runs, on a cluster of so many devices."""
    if not role.needs_device:
        return Place(name, 1, devices=False)
    owner, count = config.placement.owner(name)
    return Place(owner, devices if count == "all" else int(count))


def runtime_of(config: Config) -> str:
    """inline | ray: what run.runtime says or, where that is auto, what the placement and the machine need.

    Errors: ConfigError for run.runtime=inline with more than one device.
    """
    owners = dict(config.placement.owner(field.name) for field in fields(config.placement))
    several = [f"placement.{role}={count}" for role, count in owners.items() if count not in ("all", "1")]
    if len(owners) > 1:
        several.append(" and ".join(f"placement.{role}={count}" for role, count in owners.items()))
    if config.run.runtime == "inline" and several:
        raise ConfigError(f"run.runtime=inline is one rank in this process, but {several[0]}: say run.runtime=ray.")
    if config.run.runtime != "auto":
        return config.run.runtime
    if several or os.environ.get("RAY_ADDRESS"):
        return "ray"
    from ..device import device_count  # brings torch

    return "ray" if device_count() > 1 else "inline"


def make_runtime(config: Config, trace: Trace, say: Callable[[str], None]) -> Runtime:
    """The runtime of a run; nothing is started. Errors: ConfigError for keys that an inline run does not read."""
    run = config.run
    if runtime_of(config) == "inline":
        _refuse_ray_keys(config)
        return InlineRuntime(trace)
    from ..controller.runtime.ray.runtime import Deadlines, RayRuntime  # Ray is imported only where it is used

    return RayRuntime(
        trace,
        seed=run.seed,
        deadlines=Deadlines(run.call_timeout_s or None, run.start_timeout_s),
        failure_folder=Path(run.dir) / "failure",
        say=say,
        debug=debugged(run.debug),
    )


def debugged(value: str) -> tuple[str, int] | None:
    """run.debug as group and rank; None for `none`. Errors: ConfigError."""
    if value == "none":
        return None
    group, _, rank = value.partition(":")
    if not group or not rank.isdigit():
        raise ConfigError(f"run.debug={value}: give ROLE:RANK, as in actor:3, or none.")
    return group, int(rank)


def check_debugged(value: str, ranks: Mapping[str, int]) -> None:
    """Errors: ConfigError if run.debug names none of these groups, or a rank that its group lacks."""
    if (found := debugged(value)) is None:
        return
    group, rank = found
    if group not in ranks:
        raise ConfigError(f"run.debug={value}: the groups are {', '.join(ranks)}.{did_you_mean(group, ranks)}")
    if rank >= ranks[group]:
        raise ConfigError(f"run.debug={value}: {group} has ranks 0 to {ranks[group] - 1}.")


def _refuse_ray_keys(config: Config) -> None:
    for key in ("run.call_timeout_s", "run.start_timeout_s", "run.debug"):
        if key in config.said:
            remedy = "set breakpoints" if key == "run.debug" else "leave it out"
            raise ConfigError(
                f"{key} is set, but this run is inline, in one process: {remedy}, or say run.runtime=ray."
            )
