"""Balancing of cost over data-parallel ranks against verl's Karmarkar-Karp, on the same costs.

Lengths are log-normal, cut at the longest that a run would allow. verl's parts have equally many rows, as its trainer
asks for. Both sides work alternately, in processes of their own. value: the heaviest part over max(mean, heaviest row),
the largest of all rounds. ok also asks for at most a third of verl's CPU seconds, medians, in each case.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridflow.controller.balance import balanced_parts, cost

ROOT = Path(__file__).resolve().parents[1]
TARGET, TIME_TARGET = 1.02, 1 / 3
ROUNDS = 9
MEDIAN_TOKENS, SPREAD, LONGEST = 1024, 0.8, 8192

Costs = NDArray[np.int64]
Parts = Sequence[Sequence[int] | NDArray[np.int64]]


@dataclass(frozen=True)
class Case:
    """So many rows over so many ranks."""

    rows: int
    ranks: int


CASES = (Case(rows=1024, ranks=8), Case(rows=8192, ranks=512))


class Verl:
    """The peer's process: it imports once and answers one task after another."""

    def __enter__(self) -> Verl:
        command = [ROOT / ".venv-verl/bin/python", ROOT / "benchmarks/peers/verl_balance.py"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def __call__(self, costs: Costs, ranks: int) -> tuple[float, Parts]:
        """CPU seconds and the parts."""
        assert self._process.stdin and self._process.stdout
        print(json.dumps({"costs": costs.tolist(), "parts": ranks}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            sys.exit("dp_balance: the verl side failed; its message is above.")
        said = json.loads(line)
        return said["cpu_s"], said["parts"]


def hybridflow(costs: Costs, ranks: int) -> tuple[float, Parts]:
    """CPU seconds and the parts."""
    start = time.process_time()
    parts = balanced_parts(costs, ranks)
    return time.process_time() - start, parts


def costs_of(rows: int, seed: int) -> Costs:
    """Whole numbers, as verl takes them."""
    draw = np.random.default_rng(seed)
    tokens = np.minimum(draw.lognormal(np.log(MEDIAN_TOKENS), SPREAD, rows), LONGEST).astype(np.int64)
    return np.rint(cost(tokens)).astype(np.int64)


def balance(costs: Costs, parts: Parts) -> float:
    """The heaviest part over max(mean, heaviest row)."""
    assert sorted(row for part in parts for row in part) == list(range(len(costs)))
    heaviest = max(int(costs[np.asarray(part, np.int64)].sum()) for part in parts)
    return float(heaviest / max(costs.sum() / len(parts), costs.max()))


def measure(case: Case, verl: Verl) -> dict[str, Any]:
    """Both sides, alternating, each round on costs of its own; the first round is not counted."""
    sides: dict[str, Callable[[Costs, int], tuple[float, Parts]]] = {"hybridflow": hybridflow, "verl": verl}
    series: dict[str, dict[str, list[float]]] = {side: {"balance": [], "cpu_s": []} for side in sides}
    for seed in range(ROUNDS + 1):
        costs = costs_of(case.rows, seed)
        for side in list(sides)[:: 1 if seed % 2 == 0 else -1]:
            seconds, parts = sides[side](costs, case.ranks)
            series[side]["balance"].append(balance(costs, parts))
            series[side]["cpu_s"].append(seconds)
    counted = {side: {key: values[1:] for key, values in of_side.items()} for side, of_side in series.items()}
    return {
        "rows": case.rows,
        "ranks": case.ranks,
        "balance": max(counted["hybridflow"]["balance"]),
        "balance_of_verl": max(counted["verl"]["balance"]),
        "time_ratio": median(counted["hybridflow"]["cpu_s"]) / median(counted["verl"]["cpu_s"]),
        "time_target": TIME_TARGET,
        **counted,
    }


def main() -> None:
    """All cases, and the line."""
    subprocess.run([sys.executable, ROOT / "requirements/environment.py", "verl"], check=True, stdout=sys.stderr)
    with Verl() as verl:
        cases = [measure(case, verl) for case in CASES]
    value = max(case["balance"] for case in cases)
    ok = value <= TARGET and all(case["time_ratio"] <= TIME_TARGET for case in cases)
    print(json.dumps({"name": "dp_balance", "value": value, "target": TARGET, "ok": ok, "cases": cases}))


if __name__ == "__main__":
    main()
