"""PolicyObjective: what it reads, what it adds to a loss, and that masked tokens change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.algorithms.objective import PolicyObjective
from hybridflow.algorithms.registry import Loss
from hybridflow.batch import Batch
from hybridflow.columns import Ragged
from hybridflow.engines import Objective
from hybridflow.errors import BatchError, ConfigError

pytestmark = pytest.mark.unit

F64 = torch.float64
LENGTHS = [3, 2, 1]
MASK = [True, False, True, True, True, True]


def objective(loss: Any = "ppo_clip", **config: Any) -> PolicyObjective:
    return PolicyObjective(loss if isinstance(loss, Loss) else Loss(loss), AlgorithmConfig(**config), max_new_tokens=8)


def tensors(**more: Any) -> dict[str, torch.Tensor]:
    """Three rows of 3, 2 and 1 response tokens; the second token of the first row is not the policy's."""
    columns = {
        "logprobs": torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5, -0.2], dtype=F64),
        "old_logprobs": torch.tensor([-1.1, -1.9, -0.7, -2.2, -1.5, -0.3], dtype=F64),
        "ref_logprobs": torch.tensor([-1.3, -1.0, -0.9, -2.0, -1.0, -0.4], dtype=F64),
        "advantages": torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0, 0.5], dtype=F64),
        "entropy": torch.tensor([0.5, 0.6, 0.7, 0.8, 0.9, 1.0], dtype=F64),
        "response_mask": torch.tensor(MASK),
        "lengths": torch.tensor(LENGTHS),
        "row_of_token": torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS)),
    }
    return {**columns, **more}


def without(*names: str, **more: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors(**more).items() if name not in names}


def test_it_is_what_a_training_engine_minimises() -> None:
    conforming: Objective = objective()
    assert conforming.unit == "rollout_id"


def with_groups(logprobs: Any, group_id: Any, entropy: Any, lengths: Any, row_of_token: Any) -> Any:
    return -logprobs


@pytest.mark.parametrize(
    ("loss", "config", "outputs", "columns", "unit"),
    [
        ("sft", {}, {"logprobs"}, ("keep",), "rollout_id"),
        ("ppo_clip", {}, {"logprobs"}, ("keep", "old_logprobs", "advantages"), "rollout_id"),
        ("sft", {"entropy_coef": 0.1}, {"logprobs", "entropy"}, ("keep",), "rollout_id"),
        ("reinforce", {"kl": "loss"}, {"logprobs"}, ("keep", "advantages", "ref_logprobs"), "rollout_id"),
        ("reinforce", {"kl": "reward"}, {"logprobs"}, ("keep", "advantages"), "rollout_id"),
        (with_groups, {}, {"logprobs", "entropy"}, ("keep", "group_id"), "group_id"),
        ("sft", {"aggregation": "group_mean"}, {"logprobs"}, ("keep",), "group_id"),
    ],
)
def test_it_reads_what_the_loss_and_the_configuration_ask_for(
    loss: Any, config: dict[str, Any], outputs: set[str], columns: tuple[str, ...], unit: str
) -> None:
    made = objective(loss, **config)
    assert made.outputs == made.differentiable == outputs
    assert made.columns == columns
    assert made.unit == unit


def test_the_whole_objective_by_hand() -> None:
    made = objective("reinforce", kl="loss", kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01)
    given_ = tensors()
    loss, metrics = made(given_)
    log_ratio = given_["ref_logprobs"] - given_["logprobs"]
    expected = -given_["advantages"] * given_["logprobs"] + 0.1 * log_ratio**2 / 2 - 0.01 * given_["entropy"]
    learned = torch.tensor(MASK)
    torch.testing.assert_close(loss, expected.where(learned, torch.zeros(6, dtype=F64)))
    torch.testing.assert_close(
        metrics["kl_ref"][learned], (log_ratio.exp() - 1 - log_ratio)[learned]
    )  # k3, whatever is used
    torch.testing.assert_close(metrics["entropy"][learned], given_["entropy"][learned])
    assert set(metrics) == {"kl_ref", "entropy"}


def test_a_loss_that_reads_old_log_probs_reports_the_kl_to_the_old_policy() -> None:
    given_ = tensors(logprobs=tensors()["logprobs"].requires_grad_())
    _, metrics = objective()(without("entropy", **given_))
    log_ratio = (given_["logprobs"] - given_["old_logprobs"]).detach()
    learned = torch.tensor(MASK)
    torch.testing.assert_close(metrics["kl_old"][learned], (log_ratio.exp() - 1 - log_ratio)[learned])
    assert set(metrics) == {"kl_old", "ratio", "clip_fraction", "dual_clip_fraction"}
    assert all(m.dtype == F64 and not m.requires_grad and m.shape == (6,) for m in metrics.values())


def test_the_current_policy_stands_for_missing_old_log_probs() -> None:
    logprobs = tensors()["logprobs"].requires_grad_()
    loss, metrics = objective(old_policy="current")(without("old_logprobs", "entropy", logprobs=logprobs))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(gradient, -tensors()["advantages"] * torch.tensor(MASK))
    assert (metrics["kl_old"] == 0).all()


@pytest.mark.parametrize(
    ("config", "missing", "message"),
    [
        ({}, "old_logprobs", r"ppo_clip needs the column 'old_logprobs'; .*actor\.old_log_probs.*old_policy=current"),
        ({}, "advantages", r"ppo_clip needs the column 'advantages'; .*run\.advantages\(batch\) first"),
        ({"kl": "loss"}, "ref_logprobs", r"kl=loss needs the column 'ref_logprobs'; .*ref\.log_probs\(batch\) first"),
    ],
)
def test_a_missing_column_is_named_with_the_remedy(config: dict[str, Any], missing: str, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        objective(**config)(without(missing))


def test_several_steps_on_a_batch_need_old_log_probs_that_stay() -> None:
    with pytest.raises(
        ConfigError, match=r"epochs x algorithm\.minibatches = 4 steps on a batch: .* ratio is always 1"
    ):
        objective(old_policy="current", epochs=2, minibatches=2)
    objective("reinforce", old_policy="current", minibatches=2)  # has no ratio


@pytest.mark.parametrize(
    "wrong", [lambda loss: loss.mean(), lambda loss: loss[:1], lambda loss: (loss, {"x": loss.mean()})]
)
def test_a_loss_that_is_not_one_value_per_token_is_refused(wrong: Any) -> None:
    def mine(logprobs: Any) -> Any:
        return wrong(-logprobs)

    with pytest.raises(BatchError, match=r"mine returned .* of shape \[1?\]; one value for each of 6 response tokens"):
        objective(mine)(tensors())


def test_case_05_a_loss_gets_its_columns_by_name_in_whatever_order_it_lists_them() -> None:
    def shuffled(advantages: Any, response_mask: Any, logprobs: Any, unknown: Any = None) -> Any:
        assert response_mask.dtype == torch.bool
        assert unknown is None
        return -advantages * logprobs

    assert torch.equal(objective(shuffled)(tensors())[0], objective("reinforce")(tensors())[0])


def test_options_of_the_loss_reach_it() -> None:
    narrow = objective(Loss("ppo_clip", clip_low=0.0, clip_high=0.0))(tensors())[1]["clip_fraction"]
    wide = objective(Loss("ppo_clip", clip_low=0.9, clip_high=9.0))(tensors())[1]["clip_fraction"]
    assert narrow.sum() > 0 == wide.sum()


PER_TOKEN = ("logprobs", "old_logprobs", "ref_logprobs", "advantages", "entropy")


@given(
    st.sampled_from(["ppo_clip", "reinforce", "sft"]),
    st.sampled_from(PER_TOKEN),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30, 3.0]),
    st.sampled_from([None, torch.tensor([True, False, True])]),
)
def test_case_04_values_of_masked_tokens_change_neither_loss_nor_gradient(
    loss: str, column: str, value: float, keep: torch.Tensor | None
) -> None:
    made = objective(loss, kl="loss", entropy_coef=0.1)
    rows = {} if keep is None else {"keep": keep}
    learned = torch.tensor(MASK) if keep is None else torch.tensor([True, False, True, False, False, True])
    runs: list[list[torch.Tensor]] = []
    for poisoned in (tensors(**rows), tensors(**rows)):
        if runs:
            poisoned[column] = poisoned[column].masked_fill(~learned, value)
        leaves = [poisoned[name].requires_grad_() for name in ("logprobs", "entropy")]
        per_token, metrics = made(poisoned)
        gradients = torch.autograd.grad(per_token.sum(), leaves)
        runs.append([per_token.detach(), *gradients, *metrics.values()])
    for clean, poisoned_result in zip(*runs, strict=True):
        assert torch.equal(clean, poisoned_result)
        assert (poisoned_result[~learned] == 0).all()


def test_case_04_columns_of_several_values_a_token_are_masked_too() -> None:
    def top(logprobs: Any, teacher_top: Any) -> Any:
        return -(logprobs[:, None] * teacher_top).sum(1)

    teacher = torch.ones(6, 2, dtype=F64)
    teacher[1] = float("nan")
    loss, _ = objective(top)(tensors(teacher_top=teacher))
    assert torch.isfinite(loss).all()


def test_the_mask_a_loss_sees_is_that_of_the_tokens_that_count() -> None:
    def masked(logprobs: Any, response_mask: Any) -> Any:
        assert response_mask.tolist() == [True, False, True, False, False, True]
        return -logprobs

    objective(masked)(tensors(keep=torch.tensor([True, False, True])))


def test_columns_of_one_value_a_row_reach_the_loss_as_they_are() -> None:
    def by_row(logprobs: Any, margin: Any, group_id: Any, row_of_token: Any) -> Any:
        assert margin.tolist() == [1.0, 2.0, 3.0]
        assert group_id.tolist() == [4, 4, 5]
        return -logprobs * margin[row_of_token]

    per_row = {"margin": torch.tensor([1.0, 2.0, 3.0], dtype=F64), "group_id": torch.tensor([4, 4, 5])}
    loss, _ = objective(by_row)(tensors(**per_row))
    assert loss[-1].item() == pytest.approx(0.6)


def rollouts() -> Batch:
    offsets = np.cumsum([0, *LENGTHS])
    return Batch(
        {
            "response_ids": Ragged(np.arange(6), offsets),
            "response_mask": Ragged(np.array(MASK), offsets),
            "keep": np.array([True, True, False]),
            "rollout_id": np.array([0, 1, 2]),
            "group_id": np.array([0, 0, 1]),
        }
    )


def test_the_weights_come_from_the_columns_that_are_there() -> None:
    np.testing.assert_allclose(objective().weights(rollouts()), [1 / 4, 0, 1 / 4, 1 / 4, 1 / 4, 0])
    np.testing.assert_allclose(objective().weights(rollouts().drop("keep")), [1 / 5, 0, 1 / 5, 1 / 5, 1 / 5, 1 / 5])
    constant = objective(aggregation="sequence_sum_constant").weights(rollouts().drop("rollout_id"))
    np.testing.assert_allclose(constant, np.array([1, 0, 1, 1, 1, 0]) / 2 / 8)
    with pytest.raises(BatchError, match="no column 'response_mask'"):
        objective().weights(rollouts().drop("response_mask"))


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_sum_constant", "group_mean"]
)
@pytest.mark.parametrize("cuts", [[[0], [1], [2]], [[0, 1], [2]], [[2, 0], [1]]])
def test_case_01_loss_and_gradient_do_not_depend_on_the_cut_into_micro_batches(
    aggregation: str, cuts: list[list[int]]
) -> None:
    made = objective(aggregation=aggregation, kl="loss", entropy_coef=0.1)
    weights = torch.from_numpy(made.weights(rollouts()))
    whole = tensors(logprobs=tensors()["logprobs"].requires_grad_(), keep=torch.tensor([True, True, False]))
    expected = (weights * made(whole)[0]).sum()
    (expected_gradient,) = torch.autograd.grad(expected, whole["logprobs"])

    logprobs = tensors()["logprobs"].requires_grad_()
    total = torch.zeros((), dtype=F64)
    for rows in cuts:
        tokens = torch.cat([torch.arange(6)[whole["row_of_token"] == row] for row in rows])
        lengths = torch.tensor(LENGTHS)[rows]
        part = {name: tensors()[name][tokens] for name in (*PER_TOKEN, "response_mask")}
        part |= {"logprobs": logprobs[tokens], "keep": whole["keep"][rows], "lengths": lengths}
        part["row_of_token"] = torch.repeat_interleave(torch.arange(len(rows)), lengths)
        total = total + (weights[tokens] * made(part)[0]).sum()
    (gradient,) = torch.autograd.grad(total, logprobs)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce", "sft"])
def test_the_gradient_of_the_whole_objective_agrees_with_finite_differences(loss: str) -> None:
    made = objective(loss, kl="loss", entropy_coef=0.1)

    def total(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return made(tensors(logprobs=logprobs, entropy=entropy))[0]

    leaves = tuple(tensors()[name].requires_grad_() for name in ("logprobs", "entropy"))
    assert torch.autograd.gradcheck(total, leaves)
