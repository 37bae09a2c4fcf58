"""verl's advantages and value loss. Runs in the environment of requirements/verl.txt, without this project.

python verl_oracle.py < TASK.json      # lists of rows, padded; prints {"advantages", "returns", "loss"} as JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from verl.trainer.ppo.core_algos import compute_gae_advantage_return, compute_value_loss


def main(task: dict[str, Any]) -> None:
    """Keys: token_rewards, values, new_values, response_mask (rows padded to one length), gamma, lam, clip_value."""
    rewards, values, new_values = (
        torch.tensor(task[name], dtype=torch.float64) for name in ("token_rewards", "values", "new_values")
    )
    mask = torch.tensor(task["response_mask"], dtype=torch.float64)
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, task["gamma"], task["lam"])
    loss, _ = compute_value_loss(new_values, returns, values, mask, task["clip_value"], loss_agg_mode="token-mean")
    json.dump({"advantages": advantages.tolist(), "returns": returns.tolist(), "loss": loss.item()}, sys.stdout)


if __name__ == "__main__":
    main(json.load(sys.stdin))
