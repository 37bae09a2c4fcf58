"""Log-probs and entropies in chunks, against float64 over all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.workers.training import logprobs
from hybridflow.workers.training.logprobs import token_logprobs

pytestmark = pytest.mark.unit

TOKENS, VOCABULARY, HIDDEN = 37, 101, 16
BANNED = [0, 3, 100]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, HIDDEN), torch.randn(VOCABULARY, HIDDEN)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), torch.randint(5, 100, (TOKENS,))


def oracle(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, banned: list[int]
) -> tuple[Tensor, Tensor]:
    allowed = torch.tensor([i for i in range(VOCABULARY) if i not in banned])
    logits = (hidden.double() @ weight.double().t() / temperature)[:, allowed]
    distribution = torch.distributions.Categorical(logits=logits)
    return distribution.log_prob(torch.searchsorted(allowed, targets)), distribution.entropy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("banned", [[], BANNED])
@pytest.mark.parametrize("entropy", [True, False])
def test_chunks_give_the_values_and_gradients_of_full_logits(
    temperature: float, banned: list[int], entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", 8)
    of_logprobs, of_entropies = torch.randn(TOKENS), torch.randn(TOKENS) if entropy else torch.zeros(TOKENS)
    results = []
    for way in range(2):
        hidden, weight, targets = inputs()
        if way == 0:
            ids = torch.tensor(banned) if banned else None
            found, entropies = token_logprobs(
                hidden, weight, targets, temperature=temperature, banned=ids, entropy=entropy, chunk_bytes=1
            )
            assert (entropies is None) == (not entropy)
            entropies = torch.zeros(TOKENS) if entropies is None else entropies
        else:
            found, entropies = oracle(hidden, weight, targets, temperature, banned)
            entropies = entropies if entropy else torch.zeros(TOKENS)
        (found * of_logprobs + entropies * of_entropies).sum().backward()
        results.append((found.double(), entropies.double(), hidden.grad, weight.grad))
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


def test_no_tensor_of_all_tokens_and_the_vocabulary_is_ever_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", 8)

    class Shapes(TorchDispatchMode):
        rows: set[int] = set()  # noqa: RUF012

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dim() == 2 and out.shape[1] == VOCABULARY:
                self.rows.add(len(out))
            return out

    hidden, weight, targets = inputs()
    with Shapes() as seen:
        found, entropies = token_logprobs(hidden, weight, targets, entropy=True, chunk_bytes=1)
        assert entropies is not None
        (found.sum() + entropies.sum()).backward()
    assert seen.rows == {8, TOKENS % 8, HIDDEN}  # the last is the transposed weight


def test_statistics_of_bf16_are_float32() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    found, entropies = token_logprobs(hidden, weight, targets, entropy=True)
    logits = (hidden @ weight.t()).double()
    expected = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(found.double(), expected.log_prob(targets), atol=1e-5, rtol=1e-5)
    assert entropies is not None
    torch.testing.assert_close(entropies.double(), expected.entropy(), atol=1e-5, rtol=1e-5)
    found.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


def test_a_banned_target_has_no_probability() -> None:
    hidden, weight, targets = inputs()
    targets[5] = BANNED[1]
    found, _ = token_logprobs(hidden, weight, targets, banned=torch.tensor(BANNED))
    assert found[5] == -torch.inf
    assert found[torch.arange(TOKENS) != 5].isfinite().all()
