"""GRPO steps of TRL, timed. Runs in the environment of requirements/trl.txt and imports nothing of this project.

python trl_grpo.py TASK.json      # the fields of benchmarks.grpo_vs_trl.Task; prints {"step_s": [...], "tokens": [...]}
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_USAGE_STATS": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimes(TrainerCallback):
    """Seconds from a step's begin to its end: sampling, reward, loss, optimizer."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)


class Noise:
    """A reward that costs nothing and differs within a group. Counts the tokens it is shown."""

    __name__ = "noise"

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.tokens: list[int] = []

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.tokens.append(sum(len(ids) for ids in completion_ids))
        return [self._draw.random() for _ in completion_ids]


def main(task: dict[str, Any]) -> None:
    """Train for task["steps"] steps: one rollout batch and one optimizer step each, without KL."""
    torch.set_num_threads(task["threads"])
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
    times, noise = StepTimes(), Noise(task["seed"])
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=noise,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in task["prompts"]]),
        processing_class=AutoTokenizer.from_pretrained(task["model"], padding_side="left"),
        callbacks=[times],
        args=GRPOConfig(
            output_dir=task["folder"],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=task["prompts_per_step"] * task["samples"],
            num_generations=task["samples"],
            max_completion_length=task["max_new_tokens"],
            shuffle_dataset=False,
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",
            learning_rate=task["lr"],
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            max_steps=task["steps"],
            logging_steps=task["steps"],
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=task["seed"],
        ),
    )
    trainer.train()
    print(json.dumps({"step_s": times.seconds, "tokens": noise.tokens}))


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        main(json.load(file))
