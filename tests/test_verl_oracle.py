"""GAE and the value loss against verl's own, in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.algorithms.advantages.gae import gae
from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.algorithms.objective import TokenObjective
from hybridflow.algorithms.registry import Loss
from hybridflow.batch import Batch

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(1800)]  # the first test may install the environment

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter of the peer's environment, made if it is not there."""
    subprocess.run([sys.executable, ROOT / "requirements" / "environment.py", "verl"], check=True)
    return ROOT / ".venv-verl" / "bin" / "python"


def padded(rows: list[np.ndarray]) -> list[list[float]]:
    longest = max(map(len, rows))
    return [[*map(float, row), *[0.0] * (longest - len(row))] for row in rows]


def rollouts(seed: int) -> dict[str, list[np.ndarray]]:
    """Rows of unequal lengths. A third of the tokens are tools', but never a row's last one, which has the reward."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, 7)
    columns: dict[str, list[np.ndarray]] = {
        name: [rng.normal(size=n).astype(np.float32) for n in lengths] for name in ("values", "new_values")
    }
    columns["response_mask"] = [np.append(rng.random(n - 1) < 0.67, True) for n in lengths]
    columns["token_rewards"] = [
        np.where(mask, rng.normal(0, 0.05, n), 0).astype(np.float32)
        for mask, n in zip(columns["response_mask"], lengths, strict=True)
    ]
    for rewards in columns["token_rewards"]:
        rewards[-1] += rng.random() < 0.5
    return columns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
@pytest.mark.parametrize("seed", [0, 1])
def test_advantages_returns_and_value_loss_are_verls(python: Path, gamma: float, lam: float, seed: int) -> None:
    rows = rollouts(seed)
    task: dict[str, Any] = {name: padded(column) for name, column in rows.items()}
    told = json.dumps({**task, "gamma": gamma, "lam": lam, "clip_value": 0.3})
    done = subprocess.run(
        [python, ROOT / "tests" / "peers" / "verl_oracle.py"], input=told, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])

    lengths = [len(row) for row in rows["values"]]
    flat = {name: np.concatenate(column) for name, column in rows.items()}
    row_of_token, new_values = np.repeat(np.arange(len(lengths)), lengths), flat.pop("new_values")
    ours = gae(**flat, row_of_token=row_of_token, keep=np.ones(len(lengths), bool), gamma=gamma, lam=lam)
    mask = flat["response_mask"]
    for name, column in ours.items():
        of_rows = [theirs[name][i][:n] for i, n in enumerate(lengths)]
        np.testing.assert_allclose(column[mask], np.concatenate(of_rows)[mask], atol=1e-5)

    objective = TokenObjective(Loss("value_clip", clip_value=0.3), AlgorithmConfig(), 32, "value")
    batch = Batch({"response_ids": [np.arange(n) for n in lengths], "response_mask": rows["response_mask"]})
    per_token, _ = objective(
        {
            "values": torch.from_numpy(new_values),
            "old_values": torch.from_numpy(flat["values"]),
            "returns": torch.from_numpy(ours["returns"]).float(),
            "response_mask": torch.from_numpy(mask),
            "row_of_token": torch.from_numpy(row_of_token),
        }
    )
    assert (objective.weights(batch) * per_token.numpy()).sum() == pytest.approx(theirs["loss"], abs=1e-5)
