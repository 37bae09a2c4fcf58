"""What the engine's forward says of tokens, against plain padded transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.algorithms.objective import PolicyObjective
from hybridflow.algorithms.registry import Loss
from hybridflow.batch import Batch
from hybridflow.errors import BatchError, ConfigError, EngineError
from hybridflow.workers.models.config import ModelConfig
from hybridflow.workers.training.config import FSDPConfig
from hybridflow.workers.training.fsdp import FSDPEngine
from tests.fsdp_oracle import engine, padded_logprobs, plain_model, random_batch, same, weights
from tests.models import FAMILIES, tiny_model_folder

pytestmark = pytest.mark.fsdp

BANNED = (5, 17, 99)


def flat(rows: list[torch.Tensor]) -> np.ndarray:
    return torch.cat(rows).detach().numpy()


def without(batch: Batch, ids: tuple[int, ...]) -> Batch:
    """The batch with these ids replaced by another one."""
    responses = batch.ragged("response_ids")
    values = np.where(np.isin(responses.values, ids), 50, responses.values)
    return batch.drop("response_ids") | Batch({"response_ids": responses.with_values(values)})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("temperature", "banned"), [(1.0, ()), (0.7, BANNED)])
def test_case_06_log_probs_are_those_of_plain_transformers_at_the_sampling_temperature(
    family: str, temperature: float, banned: tuple[int, ...], tmp_path: Path
) -> None:
    folder = tiny_model_folder(tmp_path, family, tied=family != "llama")
    batch = without(random_batch(9), banned)
    found = engine(folder, temperature=temperature, banned_tokens=banned, tokens_per_microbatch=90).forward(
        batch, ["logprobs", "entropy"]
    )
    logprobs, entropies = padded_logprobs(plain_model(folder), batch, temperature, banned)
    sampled = batch["response_mask"].values
    np.testing.assert_allclose(found["logprobs"].values, np.where(sampled, flat(logprobs), 0), atol=1e-5)
    np.testing.assert_allclose(found["entropy"].values, np.where(sampled, flat(entropies), 0), atol=1e-5)


def test_a_temperature_of_zero_counts_as_one(tiny_model: Path) -> None:
    batch = random_batch(3)
    greedy, plain = (engine(tiny_model, temperature=t).forward(batch, ["logprobs"]) for t in (0.0, 1.0))
    np.testing.assert_array_equal(greedy["logprobs"].values, plain["logprobs"].values)


def test_case_06_the_cut_into_micro_batches_changes_no_log_prob(tiny_model: Path) -> None:
    batch = random_batch(12)
    found = [engine(tiny_model, tokens_per_microbatch=n).forward(batch, ["logprobs"]) for n in (1, 64, 16384)]
    for other in found[1:]:
        np.testing.assert_allclose(other["logprobs"].values, found[0]["logprobs"].values, atol=1e-5)


def test_a_row_sees_nothing_of_its_neighbours(tiny_model: Path) -> None:
    batch = random_batch(8)
    changed = batch.drop("prompt_ids") | Batch({"prompt_ids": [batch["prompt_ids"][0]] + [[7, 8, 9]] * 7})
    scorer = engine(tiny_model)
    first, second = (scorer.forward(b, ["logprobs"])["logprobs"] for b in (batch, changed))
    np.testing.assert_allclose(first[0], second[0], atol=1e-6)
    assert not np.allclose(first[1], second[1], atol=1e-2)


def test_columns_are_aligned_with_the_batch_and_carry_its_row_ids(tiny_model: Path) -> None:
    batch = Batch({"prompt_ids": [[4, 5], [6], [7]], "response_ids": [[8, 9], [], [10]]}, np.array([30, 10, 20]))
    scored = engine(tiny_model).forward(batch, ["logprobs"])
    joined = batch | scored
    assert joined["logprobs"].lengths.tolist() == [2, 0, 1]
    assert (joined["logprobs"].values < 0).all()
    assert engine(tiny_model).forward(batch.take([]), ["logprobs"])["logprobs"].lengths.tolist() == []


def test_case_10_a_nan_is_an_error_that_names_row_and_token(tmp_path: Path) -> None:
    broken = engine(tiny_model_folder(tmp_path, tied=False))
    next(shard for shard in broken.parameters() if shard.name == "model.embed_tokens.weight").tensor[9] = torch.nan
    batch = Batch({"prompt_ids": [[4], [4, 9]], "response_ids": [[5, 6], [8, 7]], "group_id": [3, 8]})
    place = r"response token 0 \(id 8\) of row 1 \(group_id 8\), and at 1 others"
    with pytest.raises(EngineError, match=f"logprobs is nan at {place}"):
        broken.forward(batch, ["logprobs"])


def test_a_banned_token_in_a_response_is_an_error_that_says_so(tiny_model: Path) -> None:
    batch = Batch({"prompt_ids": [[4], [4]], "response_ids": [[5, 6], [7, 8]]})
    with pytest.raises(EngineError, match=r"response token 1 \(id 8\) of row 1.*sampling.banned_tokens"):
        engine(tiny_model, banned_tokens=[8]).forward(batch, ["logprobs"])


def test_an_unknown_output_is_an_error(tiny_model: Path) -> None:
    with pytest.raises(BatchError, match="no output"):
        engine(tiny_model).forward(random_batch(2), ["logits"])


def test_bf16_stays_near_fp32_and_keeps_float32_masters(tiny_model: Path) -> None:
    batch = random_batch(6)
    half = engine(tiny_model, precision="bf16")
    full = engine(tiny_model)
    assert half.compute_dtype == torch.bfloat16
    assert {shard.tensor.dtype for shard in half.parameters()} == {torch.float32}
    assert same(weights(half), weights(full))
    low, high = (e.forward(batch, ["logprobs"])["logprobs"].values for e in (half, full))
    assert 0 < np.abs(low - high).max() < 0.2


def test_precision_auto_is_fp32_on_a_cpu(tiny_model: Path) -> None:
    assert engine(tiny_model, precision="auto").compute_dtype == torch.float32


def test_flash_attention_on_a_cpu_is_a_configuration_error(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.attention=flash needs an accelerator"):
        FSDPEngine(ModelConfig(path=str(tiny_model), attention="flash"), FSDPConfig())
    with pytest.raises(ConfigError, match=r"model.attention=flesh.*Did you mean flash?"):
        FSDPEngine(ModelConfig(path=str(tiny_model), attention="flesh"), FSDPConfig())


def test_a_frozen_engine_scores_and_takes_no_step(tiny_model: Path) -> None:
    batch = random_batch(4)
    frozen = engine(tiny_model, trainable=False)
    np.testing.assert_array_equal(
        frozen.forward(batch, ["logprobs"])["logprobs"].values,
        engine(tiny_model).forward(batch, ["logprobs"])["logprobs"].values,
    )
    with pytest.raises(EngineError, match="is frozen here"):
        frozen.step(batch, PolicyObjective(Loss("sft"), AlgorithmConfig(), 32))
