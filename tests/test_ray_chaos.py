"""Faults of whole runs and of whole clusters: the message names who failed and why, nothing is left running, and the
same command goes on to the same result."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

from hybridflow import Actor, Reward, Run, recipe
from hybridflow.batch import Batch
from hybridflow.cli import main
from hybridflow.controller.group import Place
from hybridflow.controller.runtime.ray import pool
from hybridflow.controller.runtime.ray.cluster import SETTINGS, SLOT
from hybridflow.controller.runtime.ray.faults import GONE
from hybridflow.controller.runtime.ray.shards import DIRECTORY
from hybridflow.errors import WorkerError
from hybridflow.layout import ParallelLayout
from hybridflow.trainer.checkpoint import Checkpoints
from tests.crash import arm
from tests.processes import gone_within, hosts_of
from tests.ray_cluster import SLOTS
from tests.ray_roles import Faulty, Large, Plain
from tests.runs import numbers, quick, weights
from tests.test_ray_runtime import rows, runtime_in

REPOSITORY = Path(__file__).parent.parent
DEADLINE_S = 20.0
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
        return subprocess.run(command, cwd=REPOSITORY, timeout=240, check=False).returncode

    for where, step, last in [("call", 3, 2), ("rename", 2 * 2, 3)]:
        assert run(where, step) == -signal.SIGKILL
        processes = (tmp_path / f"died-in-{where}").read_text().split()
        assert len(processes) == 7  # the driver, four hosts, Ray's two
        assert gone_within([int(process) for process in processes], 15.0)
        assert Checkpoints(folder / "checkpoints", 1).steps()[-1] == last
    assert run("nowhere", 0) == 0
    assert numbers(folder) == numbers(uninterrupted)
    assert weights(folder) == weights(uninterrupted)


FILE = """
def digits(response):
    return sum(letter.isdigit() for letter in response) / max(1, len(response))

def picky(logprobs, advantages, rollout_id):
    if WRONG:
        raise ValueError("this loss cannot digest rollout 5")
    return -advantages * logprobs
"""


def test_a_failed_step_of_a_run_repeats_on_one_inline_rank_until_its_file_is_mended(
    ray_cluster: None, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "run", tmp_path / "mine.py"
    file.write_text(FILE.replace("WRONG", "(rollout_id == 5).any()"))
    with pytest.raises(WorkerError, match=r"actor\.step, rank [01] .*: ValueError: this loss cannot digest") as caught:
        quick(tiny_model, folder, *WORDS, f"loss={file}:picky", reward=f"{file}:digits")
    assert f'File "{file}", line 7, in picky' in str(caught.value)
    command = ["replay", str(folder / "failure")]
    assert f"hybridflow {' '.join(command)}" in capsys.readouterr().out
    with pytest.raises(ValueError, match="cannot digest rollout 5") as again:
        main(command)
    assert again.traceback[-1].path == file
    file.write_text(FILE.replace("WRONG", "False"))
    assert main(command) == 0
    assert "actor.step on one rank, with the weights of the start of the run" in (said := capsys.readouterr().out)
    assert "the failure does not repeat here" in said


def apart(fn: Callable[..., Any], *args: Any) -> Any:
    """fn(*args) in a process of its own, which has joined no cluster."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(fn, *args).result()


def test_of_another_nodes_rows_only_those_asked_for_cross_and_a_node_that_dies_is_named(tmp_path: Path) -> None:
    found = apart(_two_nodes, tmp_path)
    assert found["read"] == [found["expected"]] * 4
    assert found["copies"] == [1] * 4  # of each rank's rows: Ray moves whole objects, and has moved none
    assert 0 < 10 * found["bytes of three rows"] < found["bytes of all rows"] < found["bytes of a heavy column"] / 10
    first = found["error"].splitlines()[0]
    assert re.match(rf"faulty\.fail_on, rank {found['far']} \(process \d+ on .*\): ", first)
    assert GONE in first or "its node has died" in first
    assert found["seconds"] < DEADLINE_S + 5.0
    assert found["gone"]
    assert re.match(rf"rows that pool rank \d \(.*\) made are lost: {GONE}", found["lost"])


def _two_nodes(folder: Path) -> dict[str, Any]:
    os.environ.update(SETTINGS)
    each = {"num_cpus": 2, "resources": {SLOT: 2}, "object_store_memory": 200 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**each, "include_dashboard": False})
    other = cluster.add_node(**each)
    os.environ["RAY_ADDRESS"] = cluster.address
    runtime, layout, place = runtime_in(folder, call_s=DEADLINE_S), ParallelLayout(dp=4), Place("pool", 4)
    plain = Plain(layout, "plain", group=runtime.group("plain", Plain, layout, place))
    faulty = Faulty(layout, "faulty", group=runtime.group("faulty", Faulty, layout, place))
    batch = rows(400) | Batch({"heavy": np.ones((400, 1000))}, rows(400).ids)
    made = plain.repeat(batch, 1)
    hosts, found = hosts_of(os.getpid()), _rows_across(plain, batch, made)
    found["far"] = next(rank for (_, rank, _), peer in DIRECTORY.peers.items() if peer.node == other.node_id)
    raylet = other.all_processes["raylet"][0].process
    threading.Thread(target=raylet.wait).start()  # else it stays as a zombie, which its workers take to be alive
    began = time.monotonic()
    try:
        len(faulty.fail_on(made, "node", found["far"]))
    except WorkerError as error:
        found["error"], found["seconds"] = str(error), time.monotonic() - began
    found["gone"] = gone_within(hosts, 1.0)
    try:
        made.fetch("text")
    except WorkerError as error:
        found["lost"] = str(error)
    runtime.close()
    ray.shutdown()
    cluster.shutdown()
    return found


def _rows_across(plain: Plain, batch: Batch, made: Batch) -> dict[str, Any]:
    """What every rank, and the driver, reads of the rows of all ranks, and what that moves."""
    shards = made._column("n").rows.shards
    locations = ray.experimental.get_object_locations
    sizes: list[int] = []
    [drive] = DIRECTORY.drives.values()
    drive.fetched = lambda names, nbytes: sizes.append(nbytes)

    def tokens_and_text(worker: Any, rows: Batch) -> tuple[list[list[int]], list[str]]:
        return [tokens.tolist() for tokens in rows.ragged("response_ids")], rows.array("text").tolist()

    found: dict[str, Any] = {"expected": tokens_and_text(None, batch)}
    found["read"] = plain.on_ranks(tokens_and_text, made.select("response_ids", "text"))
    for what, part in {"three rows": made.take([0, 150, 399]), "all rows": made.take(np.arange(400))}.items():
        sizes.clear()
        part.fetch("response_ids")
        found[f"bytes of {what}"] = sum(sizes)
    sizes.clear()
    made.take(np.arange(400)).fetch("heavy")
    found["bytes of a heavy column"] = sum(sizes)
    found["copies"] = [len(locations([shard.ref])[shard.ref]["node_ids"]) for shard in shards]
    return found


def test_a_full_object_store_is_named_with_its_host_and_the_remedy(tmp_path: Path) -> None:
    unsent, error, seconds, gone = apart(_full_store, tmp_path)
    assert re.match("what large.look is given does not fit: the object store of the driver's node is full", unsent)
    assert re.match(r"large\.look, rank 0 \(process \d+ on .*\): what pool rank 0 \(process \d+ on .*\) made", error)
    assert "the object store of its node is full" in error
    assert "data.rows_per_step" in error and "--object-store-memory" in error
    assert seconds < DEADLINE_S + 5.0
    assert gone


def _full_store(folder: Path) -> tuple[str, str, float, bool]:
    os.environ.update(SETTINGS)
    config = {
        "automatic_object_spilling_enabled": False,
        "local_fs_capacity_threshold": 1e-6,  # any disk is too full to take what the store cannot
        "local_fs_monitor_interval_ms": 20,
    }
    ray.init(
        address="local",
        num_cpus=2,
        resources={SLOT: 1},
        object_store_memory=80 << 20,
        include_dashboard=False,
        log_to_driver=False,
        _system_config=config,
    )
    runtime, layout = runtime_in(folder, call_s=DEADLINE_S), ParallelLayout()
    large = Large(layout, "large", group=runtime.group("large", Large, layout, Place("pool")))
    large.look(large.make(rows(2), megabytes=1))
    try:
        large.look(Batch({"large": np.ones((2, 100 << 17))}, rows(2).ids))
    except WorkerError as error:
        unsent = str(error)
    hosts, began = hosts_of(os.getpid()), time.monotonic()
    try:
        len(large.look(large.make(rows(2), megabytes=100)))
    except WorkerError as error:
        said = str(error)
    seconds, gone = time.monotonic() - began, gone_within(hosts, 1.0)
    runtime.close()
    ray.shutdown()
    return unsent, said, seconds, gone


def test_two_jobs_share_a_cluster_while_there_is_room_and_the_second_is_told_when_there_is_none(
    uninterrupted: Path, tiny_model: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}

    def job(where: str, step: int, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.crash", str(tiny_model), str(tmp_path / "b" / "run"), where, str(step)]
        return subprocess.Popen([*command, *WORDS, *words], cwd=REPOSITORY, env=environment, stderr=PIPE, text=True)

    others = placement_group([{SLOT: SLOTS - 1}])
    assert others.wait(60)
    refused = job("nowhere", 0, "run.start_timeout_s=2").communicate(timeout=120)[1]
    assert re.search(
        r"2 x slot for actor did not become free within 2 s \(run\.start_timeout_s\): 1 are free of 64 slot on 1 node "
        r"\(.*\)\. Another job holds the rest: end it, wait for it, or ask for fewer\.",
        refused,
    )
    remove_placement_group(others)
    second = job("call", 3)
    quick(tiny_model, tmp_path / "a", *WORDS)
    assert second.wait(timeout=120) == -signal.SIGKILL
    assert gone_within(hosts_of(os.getpid()), 5.0)  # the second's too, though the cluster goes on
    assert job("nowhere", 0).wait(timeout=120) == 0
    for folder in (tmp_path / "a", tmp_path / "b" / "run"):
        assert numbers(folder) == numbers(uninterrupted)
        assert weights(folder) == weights(uninterrupted)


def test_a_cluster_that_does_not_answer_is_told_at_once(tiny_model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.crash", str(tiny_model), str(tmp_path / "run"), "nowhere", "0", *WORDS]
    environment = {**os.environ, "RAY_ADDRESS": address}
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode
    assert f"RAY_ADDRESS={address}: nothing answers there" in run.stderr


def test_a_debugged_rank_waits_for_its_debugger_at_each_call_and_nothing_is_overdue(
    tiny_model: Path, tmp_path: Path
) -> None:
    words = ("placement.actor=2", "run.steps=1", "run.export=false", "run.debug=actor:1", "run.call_timeout_s=0.01")
    command = [sys.executable, "-m", "tests.crash", str(tiny_model), str(tmp_path / "run"), "nowhere", "0", *words]
    run = subprocess.Popen(command, cwd=REPOSITORY, stdout=PIPE, stderr=STDOUT, text=True)
    assert run.stdout is not None
    calls = []
    for line in run.stdout:
        if found := re.search(r"actor\.(\w+) waits for a debugger on [\d.]+: nc (\S+) (\d+)", line):
            with _connected(found[2], int(found[3])) as debugger:
                _prompt(debugger)
                debugger.sendall(b"p method\n")
                calls.append((found[1], _prompt(debugger)))
                debugger.sendall(b"c\n")
    assert run.wait(timeout=120) == 0
    assert calls == [(name, repr(name)) for name in ("sync", "sample", "score_tokens", "step", "step")]


def _connected(address: str, port: int) -> socket.socket:
    """To a debugger that is about to listen."""
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:
            os.sched_yield()


def _prompt(debugger: socket.socket) -> str:
    """What the debugger says before it prompts."""
    said = b""
    while not said.endswith(b"(Pdb) "):
        said += debugger.recv(1000)
    return said.removesuffix(b"(Pdb) ").decode().strip()


def test_processes_that_cannot_start_are_told(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(variable: str, value: str) -> None:
        monkeypatch.setattr(pool, "SETTINGS", {**SETTINGS, variable: value})  # of the hosts, not of this process
        runtime = runtime_in(tmp_path, start_s=6.0)
        plain = Plain(ParallelLayout(), "plain", group=runtime.group("plain", Plain, ParallelLayout(), Place("pool")))
        try:
            plain.stage()
        finally:
            runtime.close()

    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch on this node')")
    with pytest.raises(WorkerError, match=r"a process of pool did not start: .*there is no torch on this node"):
        start("PYTHONPATH", str(tmp_path))
    with pytest.raises(WorkerError, match=r"a process of pool did not start in time \(run\.start_timeout_s\)"):
        start("PYTHONHOME", "/nowhere")
