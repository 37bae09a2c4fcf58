"""Bytes that a GRPO step sends through the driver, on 8 ranks, counted where Ray is called.

Counted are serialised arguments, results and fetches of every call of the recipe: prompts, sampling, a Python reward,
both forward passes, advantages, update, completions. value: the most bytes per sample and step of short responses, long
ones, and long ones in four mini-batches; all of a case have the same length. ok also asks that the length makes no
difference, and that the kernel's counters of the driver's own sockets, without what they carry when nothing happens,
are of the same order: they see Ray's own fields too. verl is the pickled size of what its trainer sends of the same
batch, a DataProto each time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

from hybridflow import train
from hybridflow.algorithms.registry import register
from hybridflow.controller.runtime.ray.link import Link
from hybridflow.recipes import grpo
from hybridflow.workers.models.tiny import save_tiny_model

ROOT = Path(__file__).resolve().parents[1]
TARGET = 256
LENGTHS_DIFFER_AT_MOST = 0.05
SAME_ORDER = 10
RANKS, PROMPTS, SAMPLES = 8, 32, 8
WARM_UP_STEPS, STEPS = 1, 2
IDLE_S = 2.0
END = 3  # the id that ends a turn, which is never sampled here

Sockets = dict[str, int]
"""Local and remote address -> bytes sent and received."""


@dataclass(frozen=True)
class Case:
    """new_tokens: of each response."""

    new_tokens: int
    minibatches: int = 1


SHORT, LONG, MINIBATCHES = CASES = (Case(16), Case(128), Case(128, minibatches=4))


@dataclass
class Meter:
    """A run's tracker: what passed in each step, by kind and call, and what the kernel saw of it."""

    steps: list[Counter[tuple[str, str]]] = field(default_factory=list)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    kernel: list[float] = field(default_factory=list)

    def count(self, kind: str, call: str, nbytes: int) -> None:
        """One message."""
        self.now[kind, call] += nbytes
        self.calls[kind, call] += 1

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The step is over."""
        self.steps.append(self.now)
        if len(self.steps) > WARM_UP_STEPS:
            seconds = time.perf_counter() - self.began
            self.kernel.append(moved(self.sockets, sockets()) - self.idle * seconds)
        elif len(self.steps) == WARM_UP_STEPS:
            before, began = sockets(), time.perf_counter()
            time.sleep(IDLE_S)
            self.idle = moved(before, sockets()) / (time.perf_counter() - began)
            self.calls.clear()
        self.now, self.began, self.sockets = Counter(), time.perf_counter(), sockets()

    def close(self) -> None:
        """Nothing is open."""

    now: Counter[tuple[str, str]] = field(default_factory=Counter)
    began: float = 0.0
    sockets: Sockets = field(default_factory=dict)
    idle: float = 0.0
    """Bytes a second."""


METER = Meter()


@register("tracker", "driver_bytes")
def meter(folder: Path, config: Mapping[str, object], first_step: int) -> Meter:
    """The meter of the run that begins."""
    return METER


def sockets() -> Sockets:
    """Of this process, from its TCP_INFO; empty where there is no `ss`."""
    if not shutil.which("ss"):
        return {}
    lines = subprocess.run(["ss", "-tinpHO"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {
        " ".join(line.split()[3:5]): sum(int(n) for n in re.findall(r"bytes_(?:sent|received):(\d+)", line))
        for line in lines
        if f"pid={os.getpid()}," in line
    }


def moved(before: Sockets, after: Sockets) -> int:
    """Bytes between two looks; what a socket carried that was closed meanwhile is missed."""
    return sum(total - before.get(name, 0) for name, total in after.items())


def length(response: str, answer: str) -> float:
    """A reward that differs within a group."""
    return len(set(response)) / 10 + (answer in response)


def measure(case: Case) -> dict[str, Any]:
    """Bytes per sample and step of one run, in all and of each call."""
    global METER
    METER = Meter()
    Link.counted = METER.count
    rows = [{"prompt": f"{i} + {j} =", "answer": str(i + j)} for i in range(16) for j in range(16)]
    words = [
        f"placement.actor={RANKS}",
        f"data.rows_per_step={PROMPTS}",
        f"sampling.n={SAMPLES}",
        f"sampling.max_new_tokens={case.new_tokens}",
        f"sampling.banned_tokens=[{END}]",
        "algorithm.kl=loss",
        f"algorithm.minibatches={case.minibatches}",
        "training.activation_checkpointing=false",
        "reward.workers=0",
        f"run.steps={WARM_UP_STEPS + STEPS}",
        "run.trackers=[driver_bytes]",
        "run.checkpoint_steps=0",
        "run.export=false",
        "run.completions_shown=0",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_tiny_model(folder / "model", seed=0, hidden=64)
        run = train(grpo, *words, f"run.dir={folder / 'run'}", model=model, data=rows, reward=length)
    assert all(step["rollout/length_mean"] == case.new_tokens for step in run.metrics())
    samples = STEPS * PROMPTS * SAMPLES
    counted = sum(METER.steps[WARM_UP_STEPS:], Counter[tuple[str, str]]())
    result = {
        **asdict(case),
        "bytes": counted.total() / samples,
        "kernel": sum(METER.kernel) / samples if METER.sockets else None,
        "idle_bytes_a_second": METER.idle,
        "by_kind": {kind: _of_kind(counted, kind) / samples for kind in ("arguments", "results", "fetches")},
        "by_call": {
            f"{kind} of {METER.calls[kind, call] // STEPS} {call}": nbytes / samples
            for (kind, call), nbytes in counted.most_common()
        },
    }
    print(json.dumps(result), file=sys.stderr, flush=True)
    return result


def _of_kind(counted: Counter[tuple[str, str]], kind: str) -> int:
    return sum(nbytes for (of, _), nbytes in counted.items() if of == kind)


def verl(case: Case) -> float:
    """Bytes per sample and step of its trainer."""
    command = [ROOT / ".venv-verl/bin/python", ROOT / "benchmarks/peers/verl_dataproto.py"]
    task = {"rows": PROMPTS * SAMPLES, "prompt_tokens": 8, "response_tokens": case.new_tokens}
    done = subprocess.run(command, input=json.dumps(task), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit("driver_bytes: the verl side failed; its message is above.")
    return int(json.loads(done.stdout.strip().splitlines()[-1])["bytes"]) / (PROMPTS * SAMPLES)


def main() -> None:
    """All cases, and the line."""
    subprocess.run([sys.executable, ROOT / "requirements/environment.py", "verl"], check=True, stdout=sys.stderr)
    results = {case: measure(case) for case in CASES}
    value = max(each["bytes"] for each in results.values())
    apart = abs(results[LONG]["bytes"] / results[SHORT]["bytes"] - 1)
    kernel = [each["kernel"] / each["bytes"] for each in results.values() if each["kernel"] is not None]
    same_order = all(1 / SAME_ORDER <= ratio <= SAME_ORDER for ratio in kernel)
    line = {
        "name": "driver_bytes",
        "value": value,
        "target": TARGET,
        "ok": value <= TARGET and apart <= LENGTHS_DIFFER_AT_MOST and same_order,
        "lengths_differ": apart,
        "verl": verl(LONG),
        "cases": list(results.values()),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
