"""Random batches, and what plain padded transformers and autograd say of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hybridflow.batch import Batch
from hybridflow.engines import Objective
from hybridflow.workers.models.config import ModelConfig
from hybridflow.workers.training.config import FSDPConfig
from hybridflow.workers.training.fsdp import FSDPEngine
from hybridflow.workers.training.optimizer import local


def engine(path: Path, *, freeze: Sequence[str] = (), **options: Any) -> FSDPEngine:
    """An engine over the model at `path`, in fp32, that keeps activations. options: those of FSDPConfig and its own."""
    own = {
        name: options.pop(name)
        for name in ("head", "temperature", "banned_tokens", "total_steps", "trainable")
        if name in options
    }
    config = FSDPConfig(**{"precision": "fp32", "activation_checkpointing": False, "lr": 1e-3, **options})
    return FSDPEngine(ModelConfig(path=str(path), freeze=list(freeze)), config, **own)


def random_batch(n: int, seed: int = 0, vocab: int = 99, longest: int = 30) -> Batch:
    """n rollouts of unequal lengths, two to a group. One token in five is a tool's; every fourth row has no sampled
    token, every fifth is rejected (keep = 0)."""
    rng = np.random.default_rng(seed)
    prompts, responses = rng.integers(1, 20, n), rng.integers(1, longest, n)
    mask = [np.zeros(k, bool) if i % 4 == 3 else rng.random(k) < 0.8 for i, k in enumerate(responses)]
    mask[0][0] = True
    return Batch(
        {
            "prompt_ids": [rng.integers(3, vocab, k) for k in prompts],
            "response_ids": [rng.integers(3, vocab, k) for k in responses],
            "response_mask": mask,
            "advantages": [np.full(k, rng.normal(), np.float32) for k in responses],
            "old_logprobs": [rng.normal(-4.5, 0.3, k).astype(np.float32) for k in responses],
            "rollout_id": np.arange(n),
            "group_id": np.arange(n) // 2,
            "keep": np.arange(n) % 5 != 4,
        }
    )


def plain_model(path: Path) -> Any:
    """The model at `path` by transformers' own means."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def padded_logprobs(
    model: Any, batch: Batch, temperature: float = 1.0, banned: Sequence[int] = ()
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probs and entropies of each row's response tokens, from one right-padded forward."""
    rows = [np.concatenate([p, r]) for p, r in zip(batch["prompt_ids"], batch["response_ids"], strict=True)]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.from_numpy(row)
        mask[i, : len(row)] = 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.double() / temperature
    allowed = torch.tensor([i for i in range(logits.shape[-1]) if i not in set(banned)])
    logprobs = torch.full_like(logits, -torch.inf).index_copy(2, allowed, logits[:, :, allowed].log_softmax(-1))
    entropies = -(logits[:, :, allowed].log_softmax(-1) * logits[:, :, allowed].softmax(-1)).sum(-1)
    chosen, entropy = [], []
    for i, (prompt, response) in enumerate(zip(batch["prompt_ids"], batch["response_ids"], strict=True)):
        at = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
        chosen.append(logprobs[i, at].gather(1, torch.from_numpy(response.copy())[:, None]).squeeze(1))
        entropy.append(entropies[i, at])
    return chosen, entropy


def plain_gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of `loss` by autograd."""
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def gradients(of: FSDPEngine, batch: Batch, objective: Objective) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """This rank's gradients and the metrics of a step that stops short of the optimizer."""
    found: dict[str, torch.Tensor] = {}
    optimization = of._optimization
    assert optimization is not None

    def record(norm: float) -> float:
        found.update({name: local(p.grad).clone() for name, p in of._policy.lm.named_parameters()})
        return 0.0

    step: Callable[[float], float] = optimization.step
    optimization.step = record  # type: ignore[method-assign]
    try:
        return found, dict(of.step(batch, objective))
    finally:
        optimization.step = step  # type: ignore[method-assign]


def weights(of: FSDPEngine) -> dict[str, torch.Tensor]:
    """Copies of this rank's parameters."""
    return {shard.name: shard.tensor.clone() for shard in of.parameters()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Over all entries of all tensors."""
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)
