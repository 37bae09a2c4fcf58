"""The language model as the training engine runs it: packed rows in, log-probs and entropies of sampled tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter

from ...batch import Batch
from ...columns import offsets_of
from ...errors import ModelError
from .attention import PACKED, Segments
from .logprobs import ACCELERATOR_CHUNK_BYTES, CHUNK_BYTES, token_logprobs
from .packing import PackedRows, pack, token_slice
from .sequence import gather_slices

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
PROBE = Batch({"prompt_ids": [[1, 2, 3], [4]], "response_ids": [[4, 5], [3, 2]]})
"""Two rows on which the packed forward must agree with the model's own."""


@dataclass(frozen=True)
class PackedTensors:
    """`PackedRows` on the device: all of its tokens, or the slice that this one of the ranks `segments.sequence` runs.

    shares: scored tokens of each of those ranks.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: Segments
    read: Tensor
    targets: Tensor
    scored: Tensor
    responses: int
    shares: list[int]


def to_device(
    rows: PackedRows, device: torch.device, attention: str, sequence: ProcessGroup | None = None
) -> PackedTensors:
    """The micro-batch's tensors, for sdpa or flash; this rank's, if the ranks of `sequence` share them."""
    shares = [len(rows.read)]
    if sequence is not None:
        rows, shares = token_slice(rows, sequence.rank(), sequence.size())

    def move(values: Any) -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    offsets = move(offsets_of(rows.lengths).astype(np.int32)) if attention == "flash" else None
    return PackedTensors(
        input_ids=move(rows.input_ids)[None],
        position_ids=move(rows.position_ids)[None],
        segments=Segments(rows.lengths, offsets, sequence),
        read=move(rows.read),
        targets=move(rows.targets),
        scored=move(rows.scored),
        responses=rows.responses,
        shares=shares,
    )


class PolicyModel(nn.Module):
    """A causal LM whose forward gives log-probs of response tokens, so that no one sees its logits.

    temperature and banned_tokens: those of the sampling distribution. Dropout is off in training, too: the policy that
    learns must be the one that sampled.
    """

    def __init__(self, lm: Any, temperature: float, banned_tokens: Sequence[int], checkpointing: bool) -> None:
        super().__init__()
        self.lm = lm.eval()
        self.temperature = temperature
        banned = torch.tensor(sorted(banned_tokens), dtype=torch.int64) if banned_tokens else None
        self.register_buffer("banned", banned, persistent=False)
        self.banned: Tensor | None
        lm.set_attn_implementation(PACKED)
        if checkpointing:
            for layer in self.layers():
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order."""
        return [module for module in self.lm.modules() if type(module).__name__ in self.lm._no_split_modules]

    def hidden(self, rows: PackedTensors) -> Tensor:
        """Last hidden states [T, hidden size]."""
        output = self.lm.base_model(
            input_ids=rows.input_ids, position_ids=rows.position_ids, use_cache=False, segments=rows.segments
        )
        states: Tensor = output.last_hidden_state[0]
        return states

    def forward(self, rows: PackedTensors, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """float32 (log-probs [R], entropies [R] or None) of all response tokens; 0 for those that are not scored."""
        logprobs, entropies = token_logprobs(
            self.hidden(rows).index_select(0, rows.read),
            self.lm.get_output_embeddings().weight,
            rows.targets,
            temperature=self.temperature,
            banned=self.banned,
            entropy=entropy,
            chunk_bytes=CHUNK_BYTES if rows.read.device.type == "cpu" else ACCELERATOR_CHUNK_BYTES,
        )
        return spread(logprobs, rows), None if entropies is None else spread(entropies, rows)


def packed_policy(lm: Any, temperature: float, banned_tokens: Sequence[int], checkpointing: bool) -> PolicyModel:
    """`lm` as a PolicyModel: on the CPU with its weights, or on the meta device, where only its structure is checked.

    Errors: ModelError if its logits are not those of causal attention inside each packed row and of a plain output
    embedding: sliding windows, recurrent layers, scaled or capped logits, weights stored in another shape.
    """
    check_structure(lm)
    _check_output_embedding(lm)
    if lm.device.type == "meta":
        return PolicyModel(lm, temperature, banned_tokens, checkpointing)
    rows = to_device(pack(PROBE), torch.device("cpu"), "sdpa")
    with torch.no_grad():
        own = [
            lm(input_ids=ids, use_cache=False).logits[0]
            for ids in torch.split(rows.input_ids, rows.segments.lengths, 1)
        ]
        policy = PolicyModel(lm, temperature, banned_tokens, checkpointing)
        packed = policy.hidden(rows) @ lm.get_output_embeddings().weight.t()
    check_packing(lm, own, packed)
    return policy


def check_packing(lm: Any, own: list[Tensor], packed: Tensor) -> None:
    """Errors: ModelError if what a model says of packed rows differs from what it says of each alone, one after the
    other in `own`."""
    expected = torch.cat(own)
    tolerance = 1e-3 if expected.dtype == torch.float32 else 3e-2
    worst = ((packed - expected).abs().max() / expected.abs().max()).item()
    if not worst < tolerance:
        raise ModelError(f"{type(lm).__name__}: packing rows changes its logits by {worst:.1%}; it can't be trained.")


def check_structure(lm: Any) -> None:
    """Errors: ModelError for a model whose rows cannot be packed."""
    name = type(lm).__name__
    others = set(getattr(lm.config, "layer_types", None) or ()) - {"full_attention"}
    if others:
        raise ModelError(f"{name} has layers of type {', '.join(sorted(others))}; only full_attention can be packed.")
    rope = (getattr(lm.config, "rope_parameters", None) or {}).get("rope_type")
    if rope in LENGTH_DEPENDENT_ROPE:
        raise ModelError(f"{name}: with rope_type={rope} positions depend on the longest row beside a row.")
    if not lm._supports_attention_backend:
        raise ModelError(f"{name} does not take another attention function, which packed rows need.")
    if any(isinstance(rule, WeightConverter) for rule in get_model_conversion_mapping(lm, add_legacy=False)):
        raise ModelError(f"{name} is stored in other tensors than it computes with (fused experts); not supported.")


def _check_output_embedding(lm: Any) -> None:
    head = lm.get_output_embeddings()
    if not isinstance(head, nn.Linear) or len(list(head.parameters())) > 1:
        raise ModelError(f"{type(lm).__name__}: its output embedding is no linear map without bias.")


def spread(values: Tensor, rows: PackedTensors) -> Tensor:
    """Values of scored tokens, those of all ranks that share the rows, among zeros for the others."""
    if rows.segments.sequence is not None:
        values = gather_slices(values, rows.shares, rows.segments.sequence)
    if len(values) == rows.responses:
        return values
    return values.new_zeros(rows.responses).index_copy(0, rows.scored, values)
