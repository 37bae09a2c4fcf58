"""Recipes on a Ray cluster: bit for bit those of one process on one rank, the same to 1e-5 on two, and they learn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow import Run
from hybridflow.recipes import grpo, ppo
from tests.runs import numbers, quick, weights
from tests.test_learning import SETTING as GRPO_LEARNS
from tests.test_learning import gain
from tests.test_ppo import SETTING as PPO_LEARNS

pytestmark = pytest.mark.ray
Driver = Callable[[Run], None]
WORDS = ("algorithm.minibatches=2", "training.lr=1e-3")
WORDS_OF = {
    grpo: (*WORDS, "algorithm.kl=loss"),
    ppo: (*WORDS, "algorithm.kl=reward", "critic.training.lr=3e-3"),
}
OF_RANKS = ("actor/microbatches", "critic/microbatches", "actor/packing_fill", "critic/packing_fill")
"""Metrics that tell how many ranks there are."""


@pytest.mark.parametrize("driver", [grpo, ppo])
def test_one_rank_on_ray_is_one_process_bit_for_bit(
    ray_cluster: None, tiny_model: Path, tmp_path: Path, driver: Driver
) -> None:
    words = ("run.steps=2", *WORDS_OF[driver])
    quick(tiny_model, tmp_path / "inline", *words, driver=driver)
    quick(tiny_model, tmp_path / "ray", *words, "run.runtime=ray", driver=driver)
    assert numbers(tmp_path / "ray") == numbers(tmp_path / "inline")
    assert weights(tmp_path / "ray") == weights(tmp_path / "inline")


@pytest.mark.parametrize(
    ("driver", "placement"),
    [(grpo, ()), (ppo, ("placement.critic=1", "placement.reference=1"))],
    ids=["grpo", "ppo with its critic and reference on devices of their own"],
)
def test_two_ranks_compute_what_one_does(
    ray_cluster: None, tiny_model: Path, tmp_path: Path, driver: Driver, placement: tuple[str, ...]
) -> None:
    words = ("run.steps=1", *WORDS_OF[driver])  # the first step's rollouts are the same on any number of ranks
    quick(tiny_model, tmp_path / "one", *words, driver=driver)
    quick(tiny_model, tmp_path / "two", *words, "placement.actor=2", *placement, driver=driver)
    [one], [two] = numbers(tmp_path / "one"), numbers(tmp_path / "two")
    assert one.keys() == two.keys()
    for name in one.keys() - set(OF_RANKS):
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name


def test_grpo_learns_on_two_ranks(ray_cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    quick(tiny_model, tmp_path / "run", *GRPO_LEARNS, "placement.actor=2")
    assert gain(tmp_path / "run") >= 0.2


def test_ppo_learns_on_two_ranks(ray_cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    words = ("sampling.n=1", "algorithm.kl=none", *PPO_LEARNS, "placement.actor=2")
    quick(tiny_model, tmp_path / "run", *words, driver=ppo)
    assert gain(tmp_path / "run") >= 0.2
