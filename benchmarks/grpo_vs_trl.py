"""A whole GRPO step against TRL's GRPOTrainer: same weights, prompts, completion lengths, mini-batches and threads.

Both sides run in processes of their own, alternately. A step's prompts are the same on both sides, and so is the number
of sampled tokens (see countdown.py). value: the smallest ratio of median step times on mixed lengths. ok also asks that
no fixed-length case is slower than TRL, that token counts agree, and that the controller costs little beside its calls,
commits included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.countdown import FIXED, MIXED, Lengths, prompts, save_model

ROOT = Path(__file__).resolve().parents[1]
MIXED_TARGET, FIXED_TARGET = 1.5, 1.0
TOKENS_DIFFER_AT_MOST = 0.02
CONTROLLER_AT_MOST = 0.03
ROUNDS = 3  # runs of each side, alternating
WARM_UP_STEPS = 1  # not counted, in each run


@dataclass(frozen=True)
class Task:
    """What both sides read. A step is prompts_per_step x samples rollouts and one optimizer step on them."""

    model: str
    folder: str
    prompts: list[str]
    prompts_per_step: int
    samples: int
    max_new_tokens: int
    steps: int
    lr: float
    threads: int
    seed: int


@dataclass(frozen=True)
class Case:
    """A model size and a kind of lengths. steps: counted ones of a run."""

    hidden: int
    layers: int
    lengths: Lengths
    prompts_per_step: int
    steps: int

    @property
    def target(self) -> float:
        """How many times faster than TRL a step has to be."""
        return MIXED_TARGET if self.lengths is MIXED else FIXED_TARGET


CASES = (
    Case(hidden=128, layers=4, lengths=MIXED, prompts_per_step=8, steps=4),
    Case(hidden=128, layers=4, lengths=FIXED, prompts_per_step=8, steps=4),
    Case(hidden=320, layers=6, lengths=MIXED, prompts_per_step=4, steps=2),
    Case(hidden=320, layers=6, lengths=FIXED, prompts_per_step=4, steps=2),
)
SIDES: dict[str, list[str]] = {
    "hybridflow": [sys.executable, "-m", "benchmarks.grpo_steps"],
    "trl": [str(ROOT / ".venv-trl/bin/python"), str(ROOT / "benchmarks/peers/trl_grpo.py")],
}


def tasks(case: Case, folder: Path) -> Iterator[Task]:
    """One task a round, each with prompts of its own."""
    steps = WARM_UP_STEPS + case.steps
    for seed in range(ROUNDS):
        yield Task(
            model=str(folder / "model"),
            folder=str(folder / "run"),
            prompts=prompts(steps * case.prompts_per_step, case.lengths, seed),
            prompts_per_step=case.prompts_per_step,
            samples=8,
            max_new_tokens=case.lengths.max_new_tokens,
            steps=steps,
            lr=1e-6,
            threads=1,
            seed=seed,
        )


def run(side: str, task: Task, folder: Path) -> dict[str, list[float]]:
    """The counted steps of one run of one side."""
    file = folder / "task.json"
    file.write_text(json.dumps(asdict(task)))
    threads = str(task.threads)
    environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*SIDES[side], str(file)], env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"grpo_vs_trl: the {side} side failed.\n{done.stderr[-4000:]}")
    series = json.loads(done.stdout.strip().splitlines()[-1])
    return {name: values[WARM_UP_STEPS:] for name, values in series.items()}


def measure(case: Case) -> dict[str, Any]:
    """Both sides, alternating; the raw series and what they come to."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = save_model(folder / "model", case.hidden, case.layers, seed=0)
        series: dict[str, dict[str, list[float]]] = {side: {} for side in SIDES}
        for number, task in enumerate(tasks(case, folder)):
            for side in list(SIDES)[:: 1 if number % 2 == 0 else -1]:
                for key, values in run(side, task, folder).items():
                    series[side].setdefault(key, []).extend(values)
    lengths = "mixed" if case.lengths is MIXED else "fixed"
    result = {
        "parameters": parameters,
        "lengths": lengths,
        "target": case.target,
        **_compare(series["hybridflow"], series["trl"]),
    }
    result["ok"] = (
        result["ratio"] >= case.target
        and result["tokens_differ"] <= TOKENS_DIFFER_AT_MOST
        and result["controller"] <= CONTROLLER_AT_MOST
    )
    print(json.dumps({k: v for k, v in result.items() if k not in series}), file=sys.stderr, flush=True)
    return result


def _compare(ours: dict[str, list[float]], trl: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "ratio": median(trl["step_s"]) / median(ours["step_s"]),
        "tokens_differ": abs(sum(ours["tokens"]) / sum(trl["tokens"]) - 1),
        "controller": median(ours["controller"]),
        "hybridflow": ours,
        "trl": trl,
    }


def main() -> None:
    """All cases, and the line."""
    subprocess.run([sys.executable, ROOT / "requirements/environment.py", "trl"], check=True, stdout=sys.stderr)
    cases = [measure(case) for case in CASES]
    value = min(case["ratio"] for case in cases if case["lengths"] == "mixed")
    ok = all(case["ok"] for case in cases)
    print(json.dumps({"name": "grpo_vs_trl", "value": value, "target": MIXED_TARGET, "ok": ok, "cases": cases}))


if __name__ == "__main__":
    main()
