"""The learning runs: the demo's task with three seeds, and a control whose rewards are permuted within each group.

make learn. Curves and a table go to docs/learning.svg and docs/learning.md, from all lines of FOLDER/learn.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from hybridflow import Actor, Batch, Reward, Run, Sampling, recipe
from hybridflow.recipes.demo import GOAL, demo
from hybridflow.recipes.grpo import grpo

START_BELOW = 0.5  # sampled accuracy before, and what the control may not exceed after
DRIVERS = {"grpo": grpo}
STEPS_BETWEEN = 20  # validations of the demo
PAGE = """# Learning on the toy task

`make learn` warms a tiny model (about 0.4 M parameters, character vocabulary) up on two-digit additions by a teacher
that is one too high in half of the column sums, then trains it with an exact-answer reward, for three seeds. Accuracy
is on 512 problems that neither the warm-up nor GRPO saw, sampled at temperature 1 and greedily. In the control run the
rewards are permuted within each group, so that nothing is left to learn from.

![Sampled accuracy along the runs](learning.svg)

| run | seed | sampled accuracy, before -> after | greedy accuracy, before -> after |
|---|---|---|---|
{rows}
"""


@recipe("algorithm=grpo")
def grpo_permuted(run: Run) -> None:
    """GRPO with the rewards permuted within each group: the same numbers, none of the information."""
    actor, reward = run.groups(Actor, Reward)

    def rollout(prompts: Batch, sampling: Sampling) -> Batch:
        batch = actor.generate(prompts, sampling)
        return batch | reward.score(batch)

    for step in run.steps(validate=rollout):
        batch = rollout(run.prompts(), run.sampling)
        batch = batch.drop("reward") | batch.map(permuted, to="reward", seed=[run.seed, step])
        batch |= actor.old_log_probs(batch)
        batch |= run.advantages(batch)
        run.record(batch, actor.update(batch))


def permuted(reward: np.ndarray, group_id: np.ndarray, *, seed: list[int]) -> np.ndarray:
    """The rewards [n] in another order within each group."""
    rng, out = np.random.default_rng(seed), reward.copy()
    for group in np.unique(group_id):
        out[group_id == group] = rng.permutation(reward[group_id == group])
    return out


def learn(name: str, seed: int, folder: Path) -> dict[str, object]:
    """One run; what it reached, and whether that is what it should."""
    driver = grpo_permuted if name == "control" else DRIVERS[name]
    began = time.perf_counter()
    before, after, curve = demo(seed, folder / f"{name}-seed{seed}", driver=driver)
    reached = after[0] < START_BELOW if name == "control" else after[0] > GOAL
    return {
        "name": name,
        "seed": seed,
        "sampled": [before[0], after[0]],
        "greedy": [before[1], after[1]],
        "curve": curve,
        "seconds": round(time.perf_counter() - began),
        "ok": before[0] < START_BELOW and reached,
    }


def write_docs(results: Sequence[dict[str, Any]], docs: Path) -> None:
    """The page `learning.md` with its drawing."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot(xlabel="GRPO step", ylabel="sampled accuracy", ylim=(0, 1))
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(result["name"] for result in results))}
    for result in results:
        label = result["name"] if result["seed"] == results[0]["seed"] else None
        steps = [STEPS_BETWEEN * i for i in range(len(result["curve"]))]
        axes.plot(steps, result["curve"], color=colours[result["name"]], label=label, marker=".")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(docs / "learning.svg", metadata={"Date": None})
    rows = "\n".join(_row(result) for result in results)
    (docs / "learning.md").write_text(PAGE.format(rows=rows))


def _row(result: dict[str, Any]) -> str:
    (sampled, sampled_after), (greedy, greedy_after) = result["sampled"], result["greedy"]
    return (
        f"| {result['name']} | {result['seed']} | {sampled:.3f} -> {sampled_after:.3f} | "
        f"{greedy:.3f} -> {greedy_after:.3f} |"
    )


def main() -> int:
    """All runs, a JSON line each, also in FOLDER/learn.jsonl; 1 if one missed its goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--runs", nargs="*", default=[*DRIVERS, "control"])
    parser.add_argument("--folder", type=Path, default=Path("runs/learn"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    record = given.folder / "learn.jsonl"
    for name in given.runs:
        for seed in given.seeds:
            line = json.dumps(learn(name, seed, given.folder))
            print(line, flush=True)
            with record.open("a") as file:
                file.write(line + "\n")
    lines = map(json.loads, record.read_text().splitlines())
    results = list({(line["name"], line["seed"]): line for line in lines}.values())  # the last of each
    write_docs(results, Path("docs"))
    return int(not all(result["ok"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
