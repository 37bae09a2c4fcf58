"""What verl's trainer sends of a GRPO batch, pickled. Runs in the environment of requirements/verl.txt and imports
nothing of this project.

python verl_dataproto.py      # {"rows": n, "prompt_tokens": p, "response_tokens": t} in, {"bytes": ...} out
"""

from __future__ import annotations

import json
import pickle
import sys

import numpy as np
import torch
from verl.protocol import DataProto

GENERATED = {"prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask"}
REWARDED = GENERATED | {"token_level_scores"}
SCORED = REWARDED | {"old_log_probs"}
ALL = SCORED | {"ref_log_prob", "token_level_rewards", "advantages", "returns"}
DISPATCHES = (GENERATED, REWARDED, SCORED, ALL)
"""Columns of the whole batch: out of generation, into the two forward passes, into the update."""


def batch(rows: int, prompt: int, response: int) -> DataProto:
    """All columns that the trainer holds in the end."""
    whole = (rows, prompt + response)
    tensors = {
        "prompts": torch.zeros(rows, prompt, dtype=torch.int64),
        "responses": torch.zeros(rows, response, dtype=torch.int64),
        "input_ids": torch.zeros(whole, dtype=torch.int64),
        "attention_mask": torch.ones(whole, dtype=torch.int64),
        "position_ids": torch.zeros(whole, dtype=torch.int64),
        "response_mask": torch.ones(rows, response, dtype=torch.int64),
        **{name: torch.zeros(rows, response) for name in ALL - GENERATED},
    }
    texts = {name: np.array(["12"] * rows, dtype=object) for name in ("uid", "data_source", "reward_model")}
    return DataProto.from_dict(tensors=tensors, non_tensors=texts)


def main() -> None:
    """Answers the one task on stdin."""
    task = json.loads(sys.stdin.read())
    whole = batch(task["rows"], task["prompt_tokens"], task["response_tokens"])
    texts = list(whole.non_tensor_batch)
    print(json.dumps({"bytes": sum(len(pickle.dumps(whole.select(sorted(names), texts))) for names in DISPATCHES)}))


if __name__ == "__main__":
    main()
