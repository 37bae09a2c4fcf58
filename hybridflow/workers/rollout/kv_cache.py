"""Keys and values of the rows being decoded, and the attention that reads them.

Row i of a decode step is slot i, and rows in use are always slots 0 to rows - 1, so that what attention reads is a
plain view of the cache. Each row has its own length; what lies behind it is masked, and is always finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache

ATTENTION = "grouped_sdpa"
GROWTH = 1.5
LENGTH_MULTIPLE = 64


class SlotCache(Cache):
    """A transformers cache of slots, per layer [slots, kv heads, length, head dim]; it grows with what is asked of it.

    Use: `reserve` room and `insert` the prompts of new rows; then for each decode step `begin_step`, and a forward of
    one token a row.
    """

    def __init__(self, max_slots: int, max_length: int) -> None:
        super().__init__(layers=[])
        self._max_slots, self._max_length = max_slots, max_length
        self._slots = self._length = 0
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._rows = self._positions = torch.empty(0, dtype=torch.int64)
        self._width = 0

    def reserve(self, slots: int, length: int) -> None:
        """Room for this many rows of this many positions; grows in steps, so that few of them copy."""
        if slots > self._slots:
            self._slots = min(self._max_slots, max(slots, math.ceil(self._slots * GROWTH)))
        if length > self._length:
            multiples = math.ceil(max(length, self._length * GROWTH) / LENGTH_MULTIPLE)
            self._length = min(self._max_length, multiples * LENGTH_MULTIPLE)

    def insert(self, first: int, count: int, prompts: Any, row: int, length: int) -> None:
        """Copy `length` positions of row `row` of a prefill (a DynamicCache) into `count` slots from `first` on, which
        `reserve` made room for."""
        for layer, prompt in enumerate(prompts.layers):
            for buffers, new in ((self._keys, prompt.keys), (self._values, prompt.values)):
                self._fit(buffers, layer, new)[first : first + count, :, :length] = new[row, :, :length]

    def begin_step(self, positions: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The next forward writes row i at `positions[i]` (int64 [rows]), all of them below `width`.

        Returns the additive mask [rows, 1, 1, width] under which row i attends to positions up to its own.
        """
        self.reserve(len(positions), width)
        self._rows = torch.arange(len(positions), device=positions.device)
        self._positions, self._width = positions, width
        mask = torch.zeros(len(positions), width, dtype=dtype, device=positions.device)
        behind = torch.arange(width, device=positions.device) > positions[:, None]
        return mask.masked_fill_(behind, -math.inf)[:, None, None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by each attention layer: writes the new token of each row, returns views over all rows in use."""
        rows = len(self._rows)
        keys, values = self._fit(self._keys, layer_idx, key_states), self._fit(self._values, layer_idx, value_states)
        keys[self._rows, :, self._positions] = key_states[:, :, 0]
        values[self._rows, :, self._positions] = value_states[:, :, 0]
        return keys[:rows, :, : self._width], values[:rows, :, : self._width]

    def move(self, source: Sequence[int], target: Sequence[int], width: int) -> None:
        """Copy the first `width` positions of the slots `source` over those of `target`."""
        for buffer in (*self._keys, *self._values):
            buffer[list(target), :, :width] = buffer[list(source), :, :width]

    def clear(self, slot: int) -> None:
        """Zero a slot that held NaN: masked positions are multiplied by 0, which only finite values survive."""
        for buffer in (*self._keys, *self._values):
            buffer[slot].zero_()

    def _fit(self, buffers: list[torch.Tensor], layer: int, like: torch.Tensor) -> torch.Tensor:
        """The layer's buffer, grown to the reserved size."""
        if layer == len(buffers):
            buffers.append(like.new_zeros(self._slots, like.shape[1], self._length, like.shape[3]))
        old = buffers[layer]
        if old.shape[0] != self._slots or old.shape[2] != self._length:
            buffers[layer] = like.new_zeros(self._slots, like.shape[1], self._length, like.shape[3])
            buffers[layer][: old.shape[0], :, : old.shape[2]] = old
        return buffers[layer]


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled-dot-product attention, in the form transformers' attention layers call it: [rows, heads, tokens, dim].

    With a mask (a decode step, one token a row) the query heads that share a key head are taken as that head's tokens,
    so that keys and values, which stock code would repeat for each query head, are read in place. Without (prompts,
    from position 0 and padded on the right) it is causal.
    """
    if attention_mask is None:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    else:
        rows, heads, _tokens, dim = query.shape
        grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], dim)
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
        out = out.reshape(rows, heads, 1, value.shape[3])
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, grouped_attention)
