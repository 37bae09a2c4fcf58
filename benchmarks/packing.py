"""A packed update against a padded one: the same weights, rollouts of log-normal lengths, loss and optimizer.

Padded is transformers with sdpa on rows padded to the longest, prompts left and responses right, with the head on
responses alone. value: padded over packed CPU seconds, medians of alternating steps. The target is 0.8 / (1 - padding):
four fifths of what no padding can save. ok also asks for the same loss.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.countdown import save_model
from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.algorithms.objective import PolicyObjective
from hybridflow.algorithms.registry import Loss
from hybridflow.batch import Batch
from hybridflow.workers.models.config import ModelConfig
from hybridflow.workers.training.config import FSDPConfig
from hybridflow.workers.training.fsdp import FSDPEngine

HIDDEN, LAYERS = 128, 4
ROWS, LONGEST = 64, 256
ROUNDS = 7
LOSSES_DIFFER_AT_MOST = 1e-5
LR = 1e-4


def rollouts(seed: int) -> Batch:
    """Prompts and responses of log-normal lengths, with random advantages."""
    draw = np.random.default_rng(seed)

    def lengths(mean: float) -> Any:
        return np.clip(draw.lognormal(np.log(mean), 0.7, ROWS).astype(int), 4, LONGEST)

    prompts, responses = lengths(25), lengths(45)
    return Batch(
        {
            "prompt_ids": [draw.integers(2, 28, n) for n in prompts],
            "response_ids": [draw.integers(2, 28, n) for n in responses],
            "response_mask": [np.ones(n, bool) for n in responses],
            "advantages": [np.full(n, draw.normal(), np.float32) for n in responses],
        }
    )


class Padded:
    """A plain training step: the same surrogate, averaged over response tokens."""

    def __init__(self, folder: Path, batch: Batch) -> None:
        loader: Any = AutoModelForCausalLM
        self.model = loader.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
        self.prompt, self.response = int(prompts.lengths.max()), int(responses.lengths.max())
        shape = (len(batch), self.prompt + self.response)
        self.ids, self.mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        self.advantages = torch.tensor([row[0] for row in batch.ragged("advantages")])
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            at = slice(self.prompt - len(prompt), self.prompt + len(response))
            self.ids[i, at] = torch.from_numpy(np.concatenate([prompt, response]))
            self.mask[i, at] = 1

    def step(self) -> float:
        """The loss before the step."""
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        logits = self.model(
            input_ids=self.ids,
            attention_mask=self.mask,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=self.response + 1,
        ).logits[:, :-1]
        taken: Tensor = logits.log_softmax(-1).gather(-1, self.ids[:, self.prompt :, None]).squeeze(-1)
        learned = self.mask[:, self.prompt :]
        loss = (-self.advantages[:, None] * taken * learned).sum() / learned.sum()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @property
    def padding(self) -> float:
        """Share of the padded batch that is padding."""
        return 1 - self.mask.double().mean().item()


def packed(folder: Path, batch: Batch) -> Callable[[], float]:
    """This project's step on the same rollouts."""
    config = FSDPConfig(lr=LR, precision="fp32", activation_checkpointing=False)
    engine = FSDPEngine(ModelConfig(path=str(folder)), config)
    objective = PolicyObjective(Loss("reinforce"), AlgorithmConfig(), LONGEST)
    return lambda: engine.step(batch, objective)["loss"]


def main() -> None:
    """Prints the benchmark's line."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = save_model(folder, HIDDEN, LAYERS, seed=0)
        batch = rollouts(seed=0)
        padded = Padded(folder, batch)
        steps = {"packed": packed(folder, batch), "padded": padded.step}
    seconds: dict[str, list[float]] = {side: [] for side in steps}
    losses: dict[str, list[float]] = {side: [] for side in steps}
    for _ in range(ROUNDS + 1):
        for side, step in steps.items():
            start = time.process_time()
            losses[side].append(step())
            seconds[side].append(time.process_time() - start)
    ratio = median(seconds["padded"][1:]) / median(seconds["packed"][1:])
    apart = abs(losses["packed"][0] - losses["padded"][0])
    target = 0.8 / (1 - padded.padding)
    line = {
        "name": "packing",
        "value": ratio,
        "target": target,
        "ok": ratio >= target and apart <= LOSSES_DIFFER_AT_MOST,
    }
    raw = {
        "parameters": parameters,
        "padding": padded.padding,
        "losses_differ": apart,
        "cpu_s": seconds,
        "losses": losses,
    }
    print(json.dumps({**line, **raw}))


if __name__ == "__main__":
    main()
