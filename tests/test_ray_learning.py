"""Recipes on a Ray cluster: bit for bit those of one process on one rank, the same to 1e-5 on two, and they learn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybridflow import Run, recipe
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


@pytest.mark.parametrize("driver", [grpo, ppo])
def test_weights_that_two_ranks_learn_from_the_same_rollouts_are_those_of_one(
    ray_cluster: None, tiny_model: Path, tmp_path: Path, driver: Driver
) -> None:
    def steady(worker: Any) -> None:
        """An optimizer that does not magnify rounding where a gradient is almost 0."""
        for group in worker._train._optimization._optimizer.param_groups:
            group["eps"] = 1e-5

    @recipe(*driver.overrides)  # type: ignore[attr-defined]
    def measured(run: Run) -> None:
        declared = run.groups

        def groups(*roles: Any) -> Any:
            made = declared(*roles)
            for handle in made:
                if handle.role in ("actor", "critic"):
                    handle.on_ranks(steady)
            return made

        run.groups = groups  # type: ignore[method-assign]
        driver(run)

    words = ("run.steps=1", "algorithm.minibatches=2", "algorithm.epochs=2", "training.lr=1e-3", "algorithm.kl=loss")
    found = []
    for name, placed in {"one": (), "two": ("run.runtime=ray", "placement.actor=2")}.items():
        quick(tiny_model, tmp_path / name, *words, *placed, driver=measured)
        found.append(load_file(tmp_path / name / "export" / "model.safetensors"))
    start = load_file(tiny_model / "model.safetensors")
    for weight, one in found[0].items():
        torch.testing.assert_close(found[1][weight], one, rtol=0, atol=1e-5)
    assert max(float((found[0][weight] - start[weight]).abs().max()) for weight in start) > 1e-3


def test_grpo_learns_on_two_ranks(ray_cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    quick(tiny_model, tmp_path / "run", *GRPO_LEARNS, "placement.actor=2")
    assert gain(tmp_path / "run") >= 0.2


def test_ppo_learns_on_two_ranks(ray_cluster: None, tiny_model: Path, tmp_path: Path) -> None:
    words = ("sampling.n=1", "algorithm.kl=none", *PPO_LEARNS, "placement.actor=2")
    quick(tiny_model, tmp_path / "run", *words, driver=ppo)
    assert gain(tmp_path / "run") >= 0.2
