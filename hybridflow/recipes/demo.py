"""The demo: a tiny model is warmed up on two-digit addition by an uncertain teacher, then GRPO makes it right.

python -m hybridflow.recipes.demo --seed 0
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybridflow import Run, configure, train
from hybridflow.recipes.evaluate import evaluate, scores
from hybridflow.recipes.grpo import grpo
from hybridflow.recipes.sft import sft
from hybridflow.trainer.arithmetic import demonstrations
from hybridflow.workers.models.tiny import save_tiny_model

ALPHABET = "0123456789+= #"
NOISE = 0.5  # share of column sums that the warm-up's teacher makes up
GOAL = 0.90  # sampled accuracy on held-out problems that the demo has to reach
WARMUP_STEPS, WARMUP_ROWS = 500, 128

REWARD = "reward.functions=[hybridflow.trainer.arithmetic:after_hashes]"
COMMON = ("run.trackers=[]", "run.checkpoint_steps=0", "training.activation_checkpointing=false")
WARMUP = (
    *COMMON,
    f"run.steps={WARMUP_STEPS}",
    f"data.rows_per_step={WARMUP_ROWS}",
    "training.lr=1e-3",
    "training.lr_schedule=constant_with_warmup",
    "training.warmup_steps=50",
)
GRPO = (
    *COMMON,
    "sampling.max_new_tokens=32",
    "run.steps=140",
    "data.rows_per_step=32",
    "sampling.n=8",
    "algorithm.minibatches=2",
    "training.lr=7e-4",
    "training.lr_schedule=linear",
    "training.warmup_steps=10",
    "validation.every_steps=20",
)
Accuracy = tuple[float, float]  # sampled at temperature 1, greedy


def demo(
    seed: int, folder: Path, overrides: Sequence[str] = (), driver: Callable[[Run], None] = grpo
) -> tuple[Accuracy, Accuracy, list[float]]:
    """Accuracies on the held-out problems before and after `driver`, and the sampled one along the way."""
    model = save_tiny_model(folder / "model", seed, characters=ALPHABET)
    rows = demonstrations(WARMUP_STEPS * WARMUP_ROWS, NOISE, seed)
    words = (f"run.seed={seed}", "run.resume=never")
    train(sft, *WARMUP, *words, f"run.dir={folder / 'warmup'}", model=model, data=rows)
    warm = folder / "warmup" / "export"
    before = accuracy(warm, seed)
    print(f"after the warm-up: sampled accuracy {before[0]:.3f}, greedy {before[1]:.3f}")
    run = train(driver, "data=arithmetic", REWARD, *GRPO, *words, *overrides, f"run.dir={folder / 'grpo'}", model=warm)
    curve = [row["val/reward"] for row in run.metrics() if "val/reward" in row]
    after = accuracy(folder / "grpo" / "export", seed)
    print(f"after GRPO: sampled accuracy {after[0]:.3f}, greedy {after[1]:.3f}")
    return before, after, curve


def accuracy(model: Path, seed: int) -> Accuracy:
    """Share of the held-out problems a model solves: sampled at temperature 1, and greedily."""
    return _solved(model, seed, 1.0), _solved(model, seed, 0.0)


def _solved(model: Path, seed: int, temperature: float) -> float:
    words = (f"model.path={model}", "data=arithmetic", REWARD, f"run.seed={seed}")
    sampling = ("validation.sampling.max_new_tokens=32", f"validation.sampling.temperature={temperature}")
    config = configure(*words, *sampling, recipe=evaluate)
    with Run(config, name="evaluate", trains=False) as run:
        return scores(run)["reward"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo, prints the curve and the verdict; 1 if the goal was missed."""
    import torch  # here, because listing the recipes imports this module

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=None, help="run folder (default: runs/demo-seed SEED)")
    parser.add_argument("overrides", nargs="*", help="overrides of the GRPO run, e.g. run.steps=90")
    given: Any = parser.parse_args(argv)
    folder = given.dir or Path(f"runs/demo-seed{given.seed}")
    torch.set_num_threads(1)  # so small a model gains nothing from more, and on a busy machine loses much
    began = time.perf_counter()
    before, after, curve = demo(given.seed, folder, given.overrides)
    print("sampled accuracy along GRPO:", " ".join(f"{value:.2f}" for value in curve))
    print(f"demo: accuracy {before[0]:.2f} -> {after[0]:.2f} in {time.perf_counter() - began:.0f} s")
    if after[0] < GOAL:
        print(f"demo: failed, the goal is {GOAL:.2f}", file=sys.stderr)
    return int(after[0] < GOAL)


if __name__ == "__main__":
    sys.exit(main())
