"""The attention over the slots of the rollout cache, against transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen2.modeling_qwen2 import eager_attention_forward

from hybridflow.workers.rollout.kv_cache import SlotCache, grouped_attention

pytestmark = pytest.mark.unit


class Layer(torch.nn.Module):
    """What the stock functions read of an attention layer."""

    is_causal = True

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.num_key_value_groups = heads // kv_heads


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("scaling", [None, 0.5])
def test_a_decode_step_attends_as_stock_attention_does(heads: int, kv_heads: int, scaling: float | None) -> None:
    cache, positions = SlotCache(8, 64), torch.tensor([3, 0, 6])
    mask = cache.begin_step(positions, 7, torch.float32)
    inputs = random(3, heads, 1, 8), random(3, kv_heads, 7, 8), random(3, kv_heads, 7, 8)
    mine, _ = grouped_attention(Layer(heads, kv_heads), *inputs, mask, scaling=scaling)
    scale = 8**-0.5 if scaling is None else scaling
    stock, _ = eager_attention_forward(Layer(heads, kv_heads), *inputs, mask, scaling=scale)
    torch.testing.assert_close(mine, stock)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_prompts_attend_as_stock_attention_does(heads: int, kv_heads: int) -> None:
    inputs = random(3, heads, 9, 8), random(3, kv_heads, 9, 8), random(3, kv_heads, 9, 8)
    mine, _ = grouped_attention(Layer(heads, kv_heads), *inputs, None, scaling=0.3)
    stock, _ = sdpa_attention_forward(Layer(heads, kv_heads), *inputs, None, scaling=0.3)
    torch.testing.assert_close(mine, stock)


def test_the_cache_keeps_what_it_holds_as_it_grows_and_no_more_than_it_may() -> None:
    cache = SlotCache(max_slots=5, max_length=100)
    written = []
    for position in range(100):
        rows = 1 + position // 20
        new = random(rows, 2, 1, 4) + position
        cache.begin_step(torch.full((rows,), position), position + 1, torch.float32)
        keys, values = cache.update(new, -new, 0)
        written.append(new[0, :, 0])
        assert keys.shape == (rows, 2, position + 1, 4)
        torch.testing.assert_close(keys[0], torch.stack(written, 1))
        torch.testing.assert_close(values[0], -keys[0])
