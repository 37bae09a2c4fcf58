"""The learning runs: the demo's task with three seeds, and a control whose rewards are permuted within each group.

make learn
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

from hybridflow import Actor, Batch, Reward, Run, Sampling, recipe
from hybridflow.recipes.demo import GOAL, demo
from hybridflow.recipes.grpo import grpo

START_BELOW = 0.5  # sampled accuracy before, and what the control may not exceed after
DRIVERS = {"grpo": grpo}


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


def main() -> int:
    """All runs, a JSON line each, also in FOLDER/learn.jsonl; 1 if one missed its goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", nargs="+", default=[*DRIVERS, "control"])
    parser.add_argument("--folder", type=Path, default=Path("runs/learn"))
    given = parser.parse_args()
    results = []
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in given.runs:
        for seed in given.seeds:
            results.append(learn(name, seed, given.folder))
            print(json.dumps(results[-1]), flush=True)
            with (given.folder / "learn.jsonl").open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
    return int(not all(result["ok"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
