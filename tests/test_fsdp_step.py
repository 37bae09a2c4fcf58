"""Loss, gradients and optimizer steps, against plain padded transformers and autograd."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.algorithms.objective import PolicyObjective
from hybridflow.algorithms.registry import Loss
from hybridflow.batch import Batch, concat
from hybridflow.errors import BatchError, ConfigError, EngineError
from hybridflow.workers.training.fsdp import FSDPEngine
from tests.fsdp_oracle import (
    engine,
    gradients,
    largest_difference,
    padded_logprobs,
    plain_gradients,
    plain_model,
    random_batch,
    same,
    weights,
)
from tests.models import FAMILIES, tiny_model_folder

pytestmark = pytest.mark.fsdp

ENTROPY_COEF = 0.05
BATCH = random_batch(14)


def clipped(aggregation: str = "token_mean") -> PolicyObjective:
    return PolicyObjective(Loss("ppo_clip"), AlgorithmConfig(aggregation=aggregation, entropy_coef=ENTROPY_COEF), 32)


def imitation() -> PolicyObjective:
    return PolicyObjective(Loss("sft"), AlgorithmConfig(), 32)


def plain_loss(folder: Path, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """PPO's clipped loss less an entropy bonus, averaged over the sampled tokens of kept rows, and its gradients."""
    model = plain_model(folder)
    logprobs, entropies = padded_logprobs(model, batch)
    terms = []
    for i in range(len(batch)):
        if not batch["keep"][i]:
            continue
        advantage, old = (torch.from_numpy(batch[name][i].copy()).double() for name in ("advantages", "old_logprobs"))
        ratio = (logprobs[i] - old).exp()
        loss = -torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
        loss = torch.where(advantage < 0, torch.minimum(loss, -3.0 * advantage), loss) - ENTROPY_COEF * entropies[i]
        terms.append(loss[torch.from_numpy(batch["response_mask"][i].copy())])
    loss = torch.cat(terms).mean()
    return loss.item(), plain_gradients(model, loss)


@pytest.fixture(scope="module")
def trainer(tiny_model: Path) -> FSDPEngine:
    """One engine for the tests that take no optimizer step."""
    return engine(tiny_model)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> tuple[float, dict[str, Tensor]]:
    return plain_loss(tiny_model, BATCH)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_plain_transformers(family: str, tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, family, tied=family == "qwen2")
    loss, grads = plain_loss(folder, BATCH)
    found, metrics = gradients(engine(folder), BATCH, clipped())
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert largest_difference(found, grads) < 1e-5


@settings(max_examples=12)
@given(budget=st.integers(1, 400), order=st.permutations(range(len(BATCH))))
def test_case_01_neither_the_cut_nor_the_order_changes_loss_or_gradient(
    trainer: FSDPEngine, expected: tuple[float, dict[str, Tensor]], budget: int, order: list[int]
) -> None:
    trainer._config.tokens_per_microbatch = budget
    found, metrics = gradients(trainer, BATCH.take(order), clipped())
    assert metrics["loss"] == pytest.approx(expected[0], abs=1e-5)
    assert largest_difference(found, expected[1]) < 1e-5


@pytest.mark.parametrize("aggregation", ["sequence_mean_token_mean", "sequence_sum_constant", "group_mean"])
def test_case_01_every_aggregation_is_the_same_in_one_micro_batch_and_in_many(
    aggregation: str, trainer: FSDPEngine
) -> None:
    results = []
    for budget in (10_000, 50):
        trainer._config.tokens_per_microbatch = budget
        results.append(gradients(trainer, BATCH, clipped(aggregation)))
    (whole, one), (parts, many) = results
    assert one["microbatches"] == 1 < many["microbatches"]
    assert one["loss"] == pytest.approx(many["loss"], abs=1e-5)
    assert largest_difference(whole, parts) < 1e-5


def test_activation_checkpointing_changes_no_gradient(tiny_model: Path, trainer: FSDPEngine) -> None:
    with_it, _ = gradients(engine(tiny_model, activation_checkpointing=True), BATCH, clipped())
    assert largest_difference(with_it, gradients(trainer, BATCH, clipped())[0]) < 1e-6


def test_bf16_gradients_are_near_those_of_fp32_and_add_up_in_float32(
    tiny_model: Path, expected: tuple[float, dict[str, Tensor]]
) -> None:
    found, metrics = gradients(engine(tiny_model, precision="bf16", tokens_per_microbatch=60), BATCH, clipped())
    assert metrics["loss"] == pytest.approx(expected[0], abs=0.05)
    for name, grad in expected[1].items():
        assert found[name].dtype == torch.float32
        assert (found[name] - grad).norm() < 0.1 * grad.norm(), name


def test_rejected_rows_and_unsampled_tokens_carry_no_gradient_and_cost_nothing(trainer: FSDPEngine) -> None:
    trainer._config.tokens_per_microbatch = 10_000
    learned = BATCH["keep"] & np.array([mask.any() for mask in BATCH["response_mask"]])
    with_them, metrics = gradients(trainer, BATCH, clipped())
    without_them, alone = gradients(trainer, BATCH.take(np.flatnonzero(learned)), clipped())
    assert same(with_them, without_them)
    assert metrics == alone
    assert metrics["tokens"] == sum(
        mask.sum() for mask, keep in zip(BATCH["response_mask"], BATCH["keep"], strict=True) if keep
    )


def test_what_a_masked_token_holds_does_not_matter(trainer: FSDPEngine) -> None:
    mask = BATCH.ragged("response_mask")
    nan = {
        name: mask.with_values(np.where(mask.values, BATCH[name].values, np.float32(np.nan)))
        for name in ("advantages", "old_logprobs")
    }
    found, metrics = gradients(trainer, BATCH.drop(*nan) | Batch(nan), clipped())
    assert np.isfinite(metrics["loss"])
    assert same(found, gradients(trainer, BATCH, clipped())[0])


def test_rows_of_a_unit_stay_in_one_micro_batch(trainer: FSDPEngine) -> None:
    seen: list[set[int]] = []

    def pairs(logprobs: Tensor, group_id: Tensor) -> Tensor:
        seen.append(set(group_id.tolist()))
        return -logprobs

    trainer._config.tokens_per_microbatch = 60
    objective = PolicyObjective(Loss(pairs), AlgorithmConfig(), 32)
    assert objective.unit == "group_id"
    gradients(trainer, BATCH.drop("keep"), objective)
    assert len(seen) > 1
    assert sum(map(len, seen)) == len(set.union(*seen))


def test_case_07_a_sequence_level_loss_sees_whole_rows(trainer: FSDPEngine) -> None:
    def sequence(logprobs: Tensor, lengths: Tensor, row_of_token: Tensor, response_mask: Tensor) -> Tensor:
        totals = torch.zeros(len(lengths)).index_add(0, row_of_token, logprobs * response_mask)
        counts = torch.zeros(len(lengths)).index_add(0, row_of_token, response_mask.float())
        return -(totals / counts)[row_of_token]

    objective = PolicyObjective(Loss(sequence), AlgorithmConfig(aggregation="sequence_mean_token_mean"), 32)
    losses = []
    for budget in (10_000, 40):
        trainer._config.tokens_per_microbatch = budget
        losses.append(gradients(trainer, BATCH, objective)[1]["loss"])
    imitated = PolicyObjective(Loss("sft"), AlgorithmConfig(aggregation="sequence_mean_token_mean"), 32)
    assert losses == pytest.approx([gradients(trainer, BATCH, imitated)[1]["loss"]] * 2, abs=1e-5)


def test_metrics_are_means_over_learned_tokens(trainer: FSDPEngine) -> None:
    def measured(logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprobs, {"advantage": advantages, "positive": advantages > 0}

    trainer._config.tokens_per_microbatch = 50
    _, metrics = gradients(trainer, BATCH, PolicyObjective(Loss(measured), AlgorithmConfig(), 32))
    lengths = BATCH["response_ids"].lengths
    learned = BATCH["response_mask"].values & np.repeat(BATCH["keep"], lengths)
    advantages = BATCH["advantages"].values[learned]
    assert metrics["advantage"] == pytest.approx(advantages.mean(), abs=1e-5)
    assert metrics["positive"] == pytest.approx((advantages > 0).mean(), abs=1e-6)
    assert metrics["tokens"] == learned.sum()
    assert 0.5 < metrics["packing_fill"] <= 1


def test_evaluate_gives_each_rows_mean_loss_and_nan_where_nothing_is_learned(
    tiny_model: Path, trainer: FSDPEngine
) -> None:
    trainer._config.tokens_per_microbatch = 60
    before = weights(trainer)
    losses = trainer.evaluate(BATCH, imitation())["loss"]
    logprobs, _ = padded_logprobs(plain_model(tiny_model), BATCH)
    for i, row in enumerate(logprobs):
        mask = torch.from_numpy(BATCH["response_mask"][i].copy())
        if mask.any() and BATCH["keep"][i]:
            assert losses[i] == pytest.approx(-row[mask].mean().item(), abs=1e-5)
        else:
            assert np.isnan(losses[i])
    assert same(weights(trainer), before)


def test_steps_are_those_of_adamw(tiny_model: Path) -> None:
    """Adam magnifies rounding where a gradient is almost 0, so a few entries may differ by more."""
    trainer = engine(tiny_model, weight_decay=0.1, grad_clip=0.05, adam_betas=[0.8, 0.9], lr=1e-3)
    model = plain_model(tiny_model)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.9))
    mask = [torch.from_numpy(row.copy()) for row in BATCH["response_mask"]]
    for _ in range(3):
        metrics = trainer.step(BATCH, imitation())
        logprobs, _ = padded_logprobs(model, BATCH)
        kept = [row[m] for row, m, keep in zip(logprobs, mask, BATCH["keep"], strict=True) if keep]
        optimizer.zero_grad()
        (-torch.cat(kept).mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    ours, plain = weights(trainer), dict(model.named_parameters())
    differences = torch.cat([(ours[name] - plain[name].detach()).abs().flatten() for name in ours])
    assert differences.mean() < 1e-6
    assert (differences > 1e-5).float().mean() < 1e-2


def test_a_batch_without_a_learned_token_skips_its_step(tiny_model: Path) -> None:
    trainer = engine(tiny_model, lr_schedule="linear", total_steps=10)
    before = weights(trainer)
    nothing = BATCH.drop("keep") | Batch({"keep": np.zeros(len(BATCH), bool)})
    for batch in (nothing, BATCH.take([])):
        assert trainer.step(batch, clipped()) == {"skipped": 1.0, "tokens": 0.0, "microbatches": 0.0}
    assert same(weights(trainer), before)
    assert trainer.step(BATCH, clipped())["lr"] == 1e-3
    assert trainer.step(BATCH, clipped())["lr"] == pytest.approx(9e-4)


def test_case_10_a_loss_that_is_not_a_number_names_the_row_and_leaves_the_weights(tiny_model: Path) -> None:
    trainer = engine(tiny_model, tokens_per_microbatch=50)
    before = weights(trainer)
    poisoned = BATCH["advantages"].values.copy()
    poisoned[BATCH["advantages"].offsets[6] + int(np.flatnonzero(BATCH["response_mask"][6])[0])] = np.inf
    bad = BATCH.drop("advantages") | Batch({"advantages": BATCH["advantages"].with_values(poisoned)})
    with pytest.raises(
        EngineError, match=r"optimizer step 1: .* in row 6 \(group_id 3\)\. The weights are those of before"
    ):
        trainer.step(bad, clipped())
    assert same(weights(trainer), before)
    assert same(
        gradients(trainer, BATCH, clipped())[0],
        gradients(engine(tiny_model, tokens_per_microbatch=50), BATCH, clipped())[0],
    )


def test_a_missing_column_is_an_error_and_the_next_step_is_untouched_by_it(tiny_model: Path) -> None:
    trainer = engine(tiny_model)
    with pytest.raises(BatchError, match="needs the column 'old_logprobs'"):
        trainer.step(BATCH.drop("old_logprobs"), clipped())
    assert same(gradients(trainer, BATCH, clipped())[0], gradients(engine(tiny_model), BATCH, clipped())[0])


def test_a_forward_after_a_step_sees_the_new_weights(tiny_model: Path) -> None:
    trainer = engine(tiny_model, lr=1e-2)
    shared = {shard.name: shard.tensor for shard in trainer.parameters()}
    first = trainer.forward(BATCH, ["logprobs"])["logprobs"].values
    trainer.step(BATCH, imitation())
    second = trainer.forward(BATCH, ["logprobs"])["logprobs"].values
    assert np.abs(first - second).max() > 1e-2
    assert same(shared, weights(trainer)), "parameters() must give live tensors"
    with torch.no_grad():
        shared["model.norm.weight"].zero_()
    uniform = trainer.forward(BATCH, ["logprobs"])["logprobs"].values
    np.testing.assert_allclose(uniform[BATCH["response_mask"].values], -np.log(100), rtol=1e-5)


def test_the_same_steps_twice_are_the_same_bit_for_bit(tiny_model: Path) -> None:
    results = []
    for _ in range(2):
        trainer = engine(tiny_model, tokens_per_microbatch=60)
        metrics = [trainer.step(BATCH, clipped()) for _ in range(2)]
        results.append((metrics, weights(trainer)))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


def test_frozen_parameters_stay_and_the_rest_gets_the_same_gradient(tiny_model: Path, trainer: FSDPEngine) -> None:
    part = engine(tiny_model, freeze=["model.layers.0.*", "model.embed_tokens.*"], tokens_per_microbatch=60, lr=1e-2)
    before = weights(part)
    part.step(BATCH, clipped())
    after = weights(part)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if not name.startswith(("model.layers.0.", "model.embed_tokens."))}


def test_a_glob_that_matches_no_parameter_is_a_configuration_error(tiny_model: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model.freeze: 'visual.\*' matches no parameter; there are model.embed_tokens"
    ):
        engine(tiny_model, freeze=["visual.*"])
    with pytest.raises(ConfigError, match="leaves no parameter to train"):
        engine(tiny_model, freeze=["*"])


def test_norms_and_biases_have_no_weight_decay(tiny_model: Path) -> None:
    """lr x decay = 0.5: a step halves what it decays, give or take Adam's own first step, which is lr."""
    trainer = engine(tiny_model, lr=1e-2, weight_decay=50.0)
    before = weights(trainer)
    trainer.step(BATCH, imitation())
    for name, after in weights(trainer).items():
        expected = 0.5 * before[name] if before[name].dim() > 1 else before[name]
        assert (after - expected).abs().max() < 1.01e-2, name


def test_the_learning_rate_follows_a_transformers_schedule(tiny_model: Path) -> None:
    trainer = engine(tiny_model, lr=1.0, lr_schedule="linear", warmup_steps=2, total_steps=6)
    small = BATCH.take([0])
    assert [trainer.step(small, imitation())["lr"] for _ in range(6)] == pytest.approx([0, 0.5, 1, 0.75, 0.5, 0.25])
    warm = engine(tiny_model, lr=1.0, warmup_steps=2)
    assert [warm.step(small, imitation())["lr"] for _ in range(3)] == pytest.approx([0, 0.5, 1])


@pytest.mark.parametrize(
    "name", ["cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "constant_with_warmup"]
)
def test_any_schedule_without_options_of_its_own_is_known(name: str, tiny_model: Path) -> None:
    trainer = engine(tiny_model, lr_schedule=name, total_steps=4)
    assert trainer.step(BATCH.take([0]), imitation())["lr"] <= 1e-3


def test_an_unknown_schedule_or_one_without_its_length_is_a_configuration_error(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"lr_schedule=cosin: it is one of linear, cosine, .*Did you mean cosine?"):
        engine(tiny_model, lr_schedule="cosin")
    with pytest.raises(ConfigError, match=r"lr_schedule=cosine over None steps: .*num_training_steps"):
        engine(tiny_model, lr_schedule="cosine")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp16"}, "training.precision=fp16: it is one of auto, fp32, bf16"),
        ({"grad_clip": -1.0}, "training.grad_clip=-1.0: it is 0 or more"),
        ({"tokens_per_microbatch": 0}, "training.tokens_per_microbatch=0: it is 1 or more"),
        ({"adam_betas": [0.9]}, "training.adam_betas"),
    ],
)
def test_a_value_out_of_range_is_a_configuration_error(
    options: dict[str, object], message: str, tiny_model: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine(tiny_model, **options)


def test_a_clip_of_zero_is_off(tiny_model: Path) -> None:
    norms = []
    for limit in (0.0, 1e-3):
        trainer = engine(tiny_model, grad_clip=limit)
        assert trainer._optimization is not None
        optimization = trainer._optimization
        gradients(trainer, BATCH, clipped())
        trainer.step(BATCH, clipped())
        norms.append(optimization.tensors(trainer._policy.lm)["optimizer.model.norm.weight.exp_avg"].to_local().norm())  # type: ignore[attr-defined]
    assert norms[1] < norms[0] / 100


def test_two_batches_joined_are_one_batch(trainer: FSDPEngine) -> None:
    """The step on a whole batch is the weighted sum of its parts: what several ranks rely on."""
    trainer._config.tokens_per_microbatch = 10_000
    halves = [BATCH.take(np.arange(7)), BATCH.take(np.arange(7, 14))]
    whole, metrics = gradients(trainer, concat(halves), imitation())
    parts = [gradients(trainer, half, imitation()) for half in halves]
    share = [m["tokens"] / metrics["tokens"] for _, m in parts]
    for name, grad in whole.items():
        mixed = share[0] * parts[0][0][name] + share[1] * parts[1][0][name]
        torch.testing.assert_close(grad, mixed, atol=1e-5, rtol=0)
