"""Faults of whole runs and of whole clusters: the message names who failed and why, nothing is left running, and the
same command goes on to the same result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow import Actor, Reward, Run, recipe
from hybridflow.errors import WorkerError
from hybridflow.trainer.checkpoint import Checkpoints
from tests.crash import arm
from tests.processes import gone_within, hosts_of
from tests.runs import numbers, quick, weights

pytestmark = [pytest.mark.ray, pytest.mark.chaos]
DIES_IN = {  # phase -> what the message says of it, in the order of the steps in which they happen
    "generate": "actor.sample, rank 1",
    "reward": "reward.score, rank 0",
    "forward": "actor.score_tokens, rank 1",
    "backward": "actor.step, rank 1",
    "optimizer": "actor.step, rank 1",
    "shard": "actor.save, rank 1",
    "rename": "actor.sync, rank 1",
}
STEPS = len(DIES_IN) + 2
WORDS = (f"run.steps={STEPS}", "run.checkpoint_steps=1", "algorithm.minibatches=2", "placement.actor=2")


@pytest.fixture(scope="module")
def uninterrupted(ray_cluster: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    quick(tiny_model, folder, *WORDS)
    return folder


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that each of the tests interrupts once more."""
    return tmp_path_factory.mktemp("interrupted") / "run"


def mortal(where: str, folder: Path, hosts: list[int]) -> Callable[[Run], None]:
    """GRPO of which one process is killed in a phase of its step; puts its hosts into `hosts` before."""
    step = 1 + list(DIES_IN).index(where)

    @recipe("algorithm=grpo")
    def grpo_that_dies(run: Run) -> None:
        actor, reward = run.groups(Actor, Reward)
        for done in run.steps():
            if done == step:
                hosts[:] = hosts_of(os.getpid())
                group, rank = (reward, 0) if where == "reward" else (actor, 1)
                group.on_ranks(arm, where, folder, ranks=[rank])
            batch = actor.generate(run.prompts(), run.sampling)
            batch |= reward.score(batch)
            batch |= actor.old_log_probs(batch)
            batch |= run.advantages(batch)
            run.record(batch, actor.update(batch))

    return grpo_that_dies


@pytest.mark.parametrize("where", DIES_IN)
def test_a_process_killed_in_any_phase_is_named_and_all_others_end(
    ray_cluster: None, tiny_model: Path, interrupted: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    hosts: list[int] = []
    died = interrupted.parent / f"died-in-{where}"
    if where == "rename":
        publish = Checkpoints._publish

        def dead_before(checkpoints: Checkpoints, partial: Path, final: Path) -> None:
            if died.exists():
                os.kill(int(died.read_text().split()[0]), signal.SIGKILL)
            publish(checkpoints, partial, final)

        monkeypatch.setattr(Checkpoints, "_publish", dead_before)
    with pytest.raises(WorkerError) as caught:
        quick(tiny_model, interrupted, *WORDS, driver=mortal(where, interrupted, hosts))
    assert gone_within(hosts, 1.0)
    process = died.read_text().split()[0]
    assert int(process) in hosts and len(hosts) == 4  # two of the actor, the reward's, the data's
    assert str(caught.value).startswith(f"{DIES_IN[where]} (process {process} on ")
    assert "the process died" in str(caught.value)


def test_a_run_that_was_killed_in_every_phase_is_the_run_that_was_never_killed(
    uninterrupted: Path, tiny_model: Path, interrupted: Path
) -> None:
    quick(tiny_model, interrupted, *WORDS)
    assert numbers(interrupted) == numbers(uninterrupted)
    assert weights(interrupted) == weights(uninterrupted)


def test_a_killed_driver_leaves_nothing_running_and_its_command_goes_on(
    uninterrupted: Path, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    def run(where: str, step: int) -> int:
        """The command, in a process that has a cluster of its own."""
        command = [sys.executable, "-m", "tests.crash", str(tiny_model), str(folder), where, str(step), *WORDS]
        return subprocess.run(command, cwd=Path(__file__).parent.parent, timeout=240, check=False).returncode

    for where, step, last in [("call", 3, 2), ("rename", 2 * 2, 3)]:
        assert run(where, step) == -signal.SIGKILL
        processes = (tmp_path / f"died-in-{where}").read_text().split()
        assert len(processes) > 6  # beside the four hosts, Ray's own
        import time

        t = time.monotonic()
        assert gone_within([int(process) for process in processes], 15.0)
        print("GONE", time.monotonic() - t)
        assert Checkpoints(folder / "checkpoints", 1).steps()[-1] == last
    assert run("nowhere", 0) == 0
    assert numbers(folder) == numbers(uninterrupted)
    assert weights(folder) == weights(uninterrupted)
