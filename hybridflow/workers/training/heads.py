"""Heads: what an engine reads off a model's last hidden states.

lm      log-probs (and entropies) of response tokens     at the position before each token
value   values of the states that they were chosen in    at the same positions
score   one score a row                                  at its last token
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...algorithms.objective import OUTPUTS
from ...batch import Batch
from ...errors import BatchError
from ..models.config import ModelConfig
from ..models.loading import empty_causal_lm, load_causal_lm, load_config
from ..models.value_head import empty_scalar_model, load_scalar_config, load_scalar_model
from .packing import Ints, PackedRows, pack
from .policy import PROBE, PackedTensors, PolicyModel, check_packing, check_structure, packed_policy, spread, to_device

Loader = Callable[[str, ModelConfig, torch.dtype], Any]


@dataclass(frozen=True)
class Head:
    """What the name of a head means to an engine.

    outputs: of a forward; the first is always made. of_rows: they are one a row, else one a response token. config: of
    the model at a path; load, empty: that model, with and without weights. wrap: a loaded model as the engine runs it,
    from (model, temperature, banned tokens, activation checkpointing).
    """

    outputs: tuple[str, ...]
    config: Callable[[str, ModelConfig], Any]
    load: Loader
    empty: Loader
    wrap: Callable[[Any, float, Sequence[int], bool], PolicyModel]
    of_rows: bool = False

    def pack(self, rows: Batch, model: Any) -> PackedRows:
        """The rows' tokens that have to run, with the positions that are read."""
        return pack_whole(rows, model.config.pad_token_id) if self.of_rows else pack(rows)

    def lengths(self, rows: Batch) -> Ints:
        """How many tokens of each row have to run."""
        whole: Ints = rows.ragged("prompt_ids").lengths + rows.ragged("response_ids").lengths
        return whole if self.of_rows else whole - 1


class ScalarModel(PolicyModel):
    """A body and its head `score`, whose forward gives the head's number at the positions that are read."""

    def __init__(self, model: Any, checkpointing: bool) -> None:
        super().__init__(model, 1.0, (), checkpointing)

    def forward(self, rows: PackedTensors, entropy: bool = False) -> tuple[Tensor, None]:
        """float32 [R], 0 where nothing is read. The product is float32 too: of a number near 1, bf16 keeps 3 digits."""
        states = self.hidden(rows).index_select(0, rows.read)
        return spread(states.float() @ self.lm.score.weight[0].float(), rows), None


def packed_scalar_model(
    model: Any, temperature: float, banned_tokens: Sequence[int], checkpointing: bool
) -> ScalarModel:
    """`model` as a ScalarModel, which sampling means nothing to. Errors: ModelError as `packed_policy`."""
    check_structure(model)
    if model.device.type == "meta":
        return ScalarModel(model, checkpointing)
    rows = to_device(pack(PROBE), torch.device("cpu"), "sdpa")
    with torch.no_grad():
        own = [
            model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
            for ids in torch.split(rows.input_ids, rows.segments.lengths, 1)
        ]
        scalar = ScalarModel(model, checkpointing)
        check_packing(model, own, scalar.hidden(rows))
    return scalar


SCALAR = load_scalar_config, load_scalar_model, empty_scalar_model, packed_scalar_model
HEADS = {
    "lm": Head(OUTPUTS["lm"], load_config, load_causal_lm, empty_causal_lm, packed_policy),
    "value": Head(OUTPUTS["value"], *SCALAR),
    "score": Head(OUTPUTS["score"], *SCALAR, of_rows=True),
}


def pack_whole(batch: Batch, padding: int | None) -> PackedRows:
    """All tokens of all rows, each row read once: at its last token that is not `padding`, which is where transformers
    reads the score of a sequence; at its first, if all are.

    Errors: BatchError for a row without a token.
    """
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    lengths = prompts.lengths + responses.lengths
    if not lengths.all():
        raise BatchError(f"row {int(lengths.argmin())} has no token, so there is nothing to score.")
    ids = np.concatenate([ids for row in zip(prompts, responses, strict=True) for ids in row])
    starts = np.cumsum(lengths) - lengths
    shown = np.where(ids != padding, np.arange(len(ids)), 0) if padding is not None else np.arange(len(ids))
    return PackedRows(
        input_ids=ids,
        position_ids=np.arange(len(ids)) - np.repeat(starts, lengths),
        lengths=lengths.tolist(),
        read=np.maximum(np.maximum.reduceat(shown, starts), starts),
        targets=np.zeros(len(lengths), np.int64),
        scored=np.arange(len(lengths)),
        responses=len(lengths),
    )
