"""GRPO learns, and learns from the reward alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hybridflow import Actor, Batch, Reward, Run, recipe
from hybridflow.recipes import grpo
from tests.runs import numbers, quick

SETTING = ("run.steps=40", "data.rows_per_step=8", "sampling.n=8", "validation.every_steps=0", "run.export=false")


def gain(folder: Path) -> float:
    """Mean reward of the last ten steps less that of the first ten."""
    rewards = [row["reward/mean"] for row in numbers(folder)]
    return float(np.mean(rewards[-10:]) - np.mean(rewards[:10]))


@recipe("algorithm=grpo")
def shuffled(run: Run) -> None:
    """GRPO with the rewards permuted within each group: nothing is left to learn."""
    actor, reward = run.groups(Actor, Reward)
    for step in run.steps():
        batch = actor.generate(run.prompts(), run.sampling)
        batch |= reward.score(batch)
        order = np.random.default_rng(step)

        def permuted(reward: np.ndarray, group_id: np.ndarray) -> dict[str, np.ndarray]:
            out = reward.copy()
            for group in np.unique(group_id):
                out[group_id == group] = order.permutation(reward[group_id == group])  # noqa: B023
            return {"reward": out}

        mixed = batch.drop("reward") | batch.map(permuted)
        mixed |= actor.old_log_probs(mixed)
        mixed |= run.advantages(mixed)
        run.record(batch, actor.update(mixed))


def test_grpo_raises_the_reward(tiny_model: Path, tmp_path: Path) -> None:
    quick(tiny_model, tmp_path / "run", *SETTING, driver=grpo)
    assert gain(tmp_path / "run") >= 0.2


def test_grpo_with_permuted_rewards_does_not(tiny_model: Path, tmp_path: Path) -> None:
    quick(tiny_model, tmp_path / "run", *SETTING, driver=shuffled)
    assert gain(tmp_path / "run") < 0.2


def test_case_32_a_batch_is_counted_in_prompts_and_rollouts_by_name(tiny_model: Path, tmp_path: Path) -> None:
    run = quick(tiny_model, tmp_path / "run", "run.steps=1")
    rows: Batch = run.last_rows.fetch("group_id")
    assert len(rows) == 16 and len(set(rows["group_id"])) == 4
