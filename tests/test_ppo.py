"""PPO with a critic, end to end: it learns, from the reward alone; the critic does what it says."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow import Actor, Batch, Critic, Reward, Run, configure, recipe
from hybridflow.errors import BatchError, ConfigError, ModelError
from hybridflow.recipes import grpo, ppo
from tests.crash import OVERRIDES
from tests.models import character_tokenizer, tiny_model_folder
from tests.runs import QUICK, ROWS, numbers, quick, weights

pytestmark = pytest.mark.fsdp

SETTING = (
    "run.steps=40", "data.rows_per_step=32", "critic.training.lr=1e-2", "algorithm.minibatches=2",
    "run.export=false",
)  # fmt: skip


def gain(folder: Path) -> float:
    """Mean reward of the last ten steps less that of the first ten."""
    rewards = [row["reward/mean"] for row in numbers(folder)]
    return float(np.mean(rewards[-10:]) - np.mean(rewards[:10]))


@recipe("algorithm=ppo", "algorithm.kl=none")
def permuted_rewards(run: Run) -> None:
    """PPO with the rewards permuted over the batch: nothing is left to learn."""
    actor, critic, reward = run.groups(Actor, Critic, Reward)
    for step in run.steps():
        batch = actor.generate(run.prompts(), run.sampling)
        batch |= reward.score(batch)
        order = np.random.default_rng(step)

        def permuted(reward: np.ndarray) -> dict[str, np.ndarray]:
            return {"reward": order.permutation(reward)}  # noqa: B023

        mixed = batch.drop("reward") | batch.map(permuted)
        mixed |= critic.values(mixed) | actor.old_log_probs(mixed)
        mixed |= run.advantages(mixed)
        run.record(batch, critic.update(mixed), actor.update(mixed))


def driven(model: Path, folder: Path, *overrides: str) -> Run:
    """A run to be driven by hand."""
    reward = "reward.functions=[tests.runs:share_of_digits]"
    words = (*QUICK, "algorithm.kl=none", reward, f"run.dir={folder}", *overrides)
    return Run(configure(*words, f"model.path={model}", "data.path=memory", recipe=ppo), name="ppo", rows=ROWS)


def scored(run: Run, n: int = 4) -> tuple[Actor, Critic, Batch]:
    """Two roles and a scored batch of rollouts."""
    actor, critic, reward = run.groups(Actor, Critic, Reward)
    batch = actor.generate(run.prompts(n), run.sampling)
    return actor, critic, batch | reward.score(batch)


# ---- learning
def test_ppo_raises_the_reward_and_its_critic_learns_the_returns(tiny_model: Path, tmp_path: Path) -> None:
    quick(tiny_model, tmp_path / "run", "sampling.n=1", "algorithm.kl=none", *SETTING, driver=ppo)
    assert gain(tmp_path / "run") >= 0.2
    rows = numbers(tmp_path / "run")
    assert np.mean([row["critic/error"] for row in rows[-10:]]) < 0.5 * rows[0]["critic/error"]
    assert {"critic/loss", "critic/grad_norm", "critic/clip_fraction", "actor/clip_fraction"} <= rows[-1].keys()


def test_ppo_with_permuted_rewards_does_not(tiny_model: Path, tmp_path: Path) -> None:
    quick(tiny_model, tmp_path / "run", "sampling.n=1", *SETTING, driver=permuted_rewards)
    assert gain(tmp_path / "run") < 0.2


# ---- the critic
def test_values_are_zero_on_rejected_rows_and_cost_nothing_there(tiny_model: Path, tmp_path: Path) -> None:
    with driven(tiny_model, tmp_path / "run", "critic.training.lr=1e-2") as run:
        _, critic, batch = scored(run)
        batch |= critic.values(batch)
        assert not batch.fetch("values")["values"].values.any()
        batch |= run.advantages(batch)
        critic.update(batch)
        keep = np.arange(len(batch)) % 2 == 0
        again = critic.values(batch.drop("values", "keep") | Batch({"keep": keep}, batch.ids)).fetch()["values"]
        assert all((again[i] != 0).all() == keep[i] and (again[i] != 0).any() == keep[i] for i in range(len(batch)))


def test_an_update_is_the_loop_over_steps_that_it_says(tiny_model: Path, tmp_path: Path) -> None:
    results = []
    for own_loop in (False, True):
        with driven(tiny_model, tmp_path / str(own_loop), "algorithm.epochs=2") as run:
            _, critic, batch = scored(run)
            batch |= critic.values(batch)
            batch |= run.advantages(batch)
            if own_loop:
                for minibatch in batch.minibatches(run.algorithm.minibatches, 2, [run.seed, 0]):
                    critic.step(minibatch)
            else:
                assert critic.update(batch)["critic/steps"] == 8
            results.append(critic.values(batch.drop("values")).fetch()["values"].values)
    np.testing.assert_array_equal(*results)
    assert results[0].any()


def test_a_critic_without_returns_says_what_makes_them(tiny_model: Path, tmp_path: Path) -> None:
    with driven(tiny_model, tmp_path / "run") as run:
        _, critic, batch = scored(run)
        batch |= critic.values(batch)
        with pytest.raises(BatchError, match=r"value_clip needs the column 'returns'; .*advantage=gae"):
            critic.update(batch)


def test_the_policy_rests_while_the_critic_warms_up(tiny_model: Path, tmp_path: Path) -> None:
    words = ("sampling.n=2", "algorithm.critic_warmup_steps=2", "training.lr_schedule=linear", "run.steps=4")
    quick(tiny_model, tmp_path / "run", *words, driver=ppo)
    rows = numbers(tmp_path / "run")
    assert ["actor/loss" in row for row in rows] == [False, False, True, True]
    assert all("critic/loss" in row for row in rows)
    whole, actors, critics = 16, rows[2]["actor/lr"], [row["critic/lr"] for row in rows]
    assert actors == pytest.approx(3e-3 * (1 - 1.5 / 8))  # the mean of the first 4 of 8 optimizer steps
    assert critics[0] == pytest.approx(3e-3 * (1 - 1.5 / whole))


def test_a_critic_reads_the_policys_tokens(tiny_model: Path, tmp_path: Path) -> None:
    other = tiny_model_folder(tmp_path / "other")
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ModelError, match=r"critic\.path=.*other: its tokenizer is another than the policy's"):
        quick(tiny_model, tmp_path / "run", f"critic.path={other}", driver=ppo)


def test_frozen_weights_of_the_policy_are_trained_in_the_critic(tiny_model: Path, tmp_path: Path) -> None:
    def trained(worker: Any) -> set[str]:
        return {name for name, parameter in worker._train._policy.lm.named_parameters() if parameter.requires_grad}

    with driven(tiny_model, tmp_path / "run", "model.freeze=['model.layers.*','*embed*']") as run:
        actor, critic = run.groups(Actor, Critic)
        assert actor.on_ranks(trained) == [{"model.norm.weight"}]
        assert {"score.weight", "model.layers.0.mlp.up_proj.weight"} < critic.on_ranks(trained)[0]


# ---- resuming
def test_a_ppo_run_killed_in_the_critics_step_resumes_to_the_same_weights_and_metrics(
    tiny_model: Path, tmp_path: Path
) -> None:
    whole, folder = tmp_path / "whole" / "run", tmp_path / "run"
    quick(tiny_model, whole, *OVERRIDES, driver=ppo)
    command = [sys.executable, "-m", "tests.crash", str(tiny_model), str(folder), "critic", "4"]
    killed = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, timeout=240)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "died-in-critic").exists()
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-000002"]
    quick(tiny_model, folder, *OVERRIDES, driver=ppo)
    assert numbers(folder) == numbers(whole)
    assert weights(folder) == weights(whole)


# ---- what is refused before anything starts
@pytest.mark.parametrize(
    ("driver", "words", "message"),
    [
        (grpo, ["critic.training.lr=1e-4"], r"^critic\.training\.lr is set, but grpo has no critic\.$"),
        (
            grpo,
            ["algorithm.critic_warmup_steps=3"],
            r"^algorithm\.critic_warmup_steps is set, but grpo has no critic\.$",
        ),
        (grpo, ["advantage=gae"], r"^advantage=gae reads the values of a critic, and grpo has none: take another"),
        (
            ppo,
            ["algorithm.critic_warmup_steps=4", "run.steps=4"],
            r"^algorithm\.critic_warmup_steps=4, but the run has 4 steps: the policy would never learn",
        ),
        (
            ppo,
            ["advantage=reinforce"],
            r"^ppo has a critic, but advantage=reinforce reads no values of it: say advantage",
        ),
        (grpo, ["loss=value_clip"], r"^loss=value_clip is what a role critic learns by, and grpo has none\.$"),
        (
            grpo,
            ["loss=bradley_terry"],
            r"^loss=bradley_terry is what a role reward_model learns by, and grpo has none\.$",
        ),
    ],
)
def test_what_does_not_fit_the_recipe_is_refused(
    driver: object, words: list[str], message: str, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        quick(tiny_model, tmp_path / "run", *words, driver=driver)  # type: ignore[arg-type]
