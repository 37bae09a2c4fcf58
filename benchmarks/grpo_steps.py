"""GRPO steps of this project, timed: the counterpart of peers/trl_grpo.py, run in a fresh process like it.

python -m benchmarks.grpo_steps TASK.json      # prints {"step_s": [...], "tokens": [...], "calls_s": [...], ...}
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch

from hybridflow import train
from hybridflow.recipes import grpo


def overrides(task: dict[str, Any]) -> list[str]:
    """The task in this project's words. The reward runs in the driver, as it does in TRL."""
    return [
        f"data.rows_per_step={task['prompts_per_step']}",
        "data.shuffle=false",
        f"sampling.n={task['samples']}",
        f"sampling.max_new_tokens={task['max_new_tokens']}",
        f"training.lr={task['lr']}",
        "training.precision=fp32",
        "training.activation_checkpointing=false",
        "algorithm.old_policy=current",
        "reward.workers=0",
        "validation.every_steps=0",
        f"run.steps={task['steps']}",
        f"run.seed={task['seed']}",
        f"run.dir={task['folder']}",
        "run.resume=never",
        "run.trackers=[]",
        "run.checkpoint_steps=0",
        "run.export=false",
        "run.completions_shown=0",
    ]


def main(task: dict[str, Any]) -> None:
    """Train for task["steps"] steps; seconds, sampled tokens and seconds inside role calls of each.

    commit_s and controller (the share of step and commit that is outside role calls) are of all steps but the last,
    whose commit no later step reports.
    """
    torch.set_num_threads(task["threads"])
    draw = random.Random(task["seed"])

    def noise(response: str) -> float:
        return draw.random()

    rows = [{"prompt": prompt} for prompt in task["prompts"]]
    run = train(grpo, *overrides(task), model=task["model"], data=rows, reward=noise)
    names = {"step_s": "time/step", "tokens": "rollout/tokens", "calls_s": "time/calls"}
    steps = run.metrics()
    series = {name: [step[metric] for step in steps] for name, metric in names.items()}
    series["commit_s"] = [later["time/last_commit"] for later in steps[1:]]
    series["controller"] = [
        1 - calls / (step + commit)
        for step, calls, commit in zip(series["step_s"], series["calls_s"], series["commit_s"], strict=False)
    ]
    print()
    print(json.dumps(series))


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        main(json.load(file))
