"""The losses of a critic and of a reward model against closed forms, and the objectives that carry them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.aggregation import row_weights
from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.algorithms.losses.bradley_terry import bradley_terry
from hybridflow.algorithms.losses.value_clip import value_clip
from hybridflow.algorithms.objective import PairObjective, TokenObjective, head_of
from hybridflow.algorithms.registry import Loss
from hybridflow.batch import Batch
from hybridflow.engines import Objective
from hybridflow.errors import BatchError, ConfigError

pytestmark = pytest.mark.unit

FINITE = st.floats(-5, 5)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# ---- critic
@given(FINITE, FINITE, FINITE, st.sampled_from([None, 0.1, 2.0]))
def test_the_value_loss_is_half_the_larger_squared_error(
    value: float, old: float, target: float, clip: float | None
) -> None:
    loss, metrics = value_clip(t(value), t(old), t(target), clip_value=clip)
    errors = [(value - target) ** 2]
    if clip is not None:
        errors.append((min(max(value, old - clip), old + clip) - target) ** 2)
    assert loss.item() == pytest.approx(max(errors) / 2, rel=1e-9, abs=1e-12)
    assert metrics["error"].item() == pytest.approx(errors[0], rel=1e-9, abs=1e-12)


def test_the_clip_stops_the_gradient_of_a_value_that_has_moved_far_enough_and_is_counted() -> None:
    #      inside, moved past the clip towards the return, away from it, moved back over the return
    values = t(0.1, 1.0, -1.0, 1.0).requires_grad_()
    loss, metrics = value_clip(values, t(0, 0, 0, 0), t(2, 2, 2, 0.5), clip_value=0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    torch.testing.assert_close(gradient, t(-1.9, 0, -3, 0.5))
    assert metrics["clip_fraction"].tolist() == [0, 1, 0, 0]
    assert "clip_fraction" not in value_clip(values, values, values, clip_value=None)[1]


def test_a_clip_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"critic\.clip_value=0.*: it is above 0, or null"):
        Loss("value_clip", clip_value=0.0)


def test_the_critics_objective_reads_values_and_carries_no_penalty_of_the_policy() -> None:
    config = AlgorithmConfig(kl="loss", entropy_coef=0.5, aggregation="sequence_mean_token_mean")
    objective: Objective = TokenObjective(Loss("value_clip", clip_value=None), config, 8, "value")
    assert objective.outputs == objective.differentiable == {"values"}
    assert objective.columns == ("keep", "old_values", "returns")
    assert objective.unit == "rollout_id"
    tensors = {
        "values": t(1, float("nan"), 3),
        "old_values": t(0, 0, 0),
        "returns": t(0, 0, 1),
        "response_mask": torch.tensor([True, False, True]),
        "lengths": torch.tensor([2, 1]),
        "row_of_token": torch.tensor([0, 0, 1]),
    }
    loss, metrics = objective(tensors)
    assert loss.tolist() == [0.5, 0.0, 2.0]
    assert metrics["value"].tolist() == [1.0, 0.0, 3.0]
    with pytest.raises(
        BatchError, match=r"value_clip needs the column 'returns'; .*an estimator such as advantage=gae"
    ):
        objective({name: value for name, value in tensors.items() if name != "returns"})


# ---- reward model
def pairs(*scores: tuple[float, float], **more: Any) -> dict[str, torch.Tensor]:
    """Pairs of (chosen, rejected), the rows of all in another order."""
    n = len(scores)
    order = torch.tensor([*range(1, 2 * n, 2), *range(0, 2 * n, 2)])  # all rejected ones first
    columns = {
        "score": t(*(score for pair in scores for score in pair)),
        "chosen": torch.tensor([True, False] * n),
        "group_id": torch.arange(n).repeat_interleave(2) * 3 + 5,
        **more,
    }
    return {name: column[order] for name, column in columns.items()}


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=4), st.floats(-2, 2), st.sampled_from([0.0, 0.1]))
def test_bradley_terry_is_minus_the_log_probability_of_the_choice(
    scores: list[tuple[float, float]], margin: float, centering: float
) -> None:
    margins = torch.full((2 * len(scores),), margin, dtype=torch.float64)
    loss, metrics = bradley_terry(**pairs(*scores, margin=margins), centering=centering)
    expected = [
        -math.log(1 / (1 + math.exp(-(better - worse - margin)))) + centering * (better + worse) ** 2
        for better, worse in scores
    ]
    np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-9, atol=1e-12)
    assert metrics["accuracy"].tolist() == [0.5 if a == b else float(a > b) for a, b in scores]
    np.testing.assert_allclose(metrics["score_gap"].numpy(), [a - b for a, b in scores], atol=1e-12)


def test_bradley_terry_is_stable_where_its_formula_is_not() -> None:
    columns = pairs((1e4, 0), (0, 1e4))
    columns["score"].requires_grad_()
    loss, _ = bradley_terry(**columns)
    (gradient,) = torch.autograd.grad(loss.sum(), columns["score"])
    assert loss.tolist() == [0.0, 1e4]
    assert torch.isfinite(gradient).all()


def test_its_gradient_agrees_with_finite_differences() -> None:
    columns = pairs((0.3, -0.2), (-1.0, 2.0), margin=t(0.1, 0.1, 0.5, 0.5))

    def loss(score: torch.Tensor) -> torch.Tensor:
        return bradley_terry(**{**columns, "score": score}, centering=0.1)[0]

    assert torch.autograd.gradcheck(loss, (columns["score"].clone().requires_grad_(),))


@pytest.mark.parametrize(
    "change", [{"chosen": torch.tensor([True, True])}, {"group_id": torch.tensor([1, 2])}], ids=["two chosen", "split"]
)
def test_a_group_that_is_no_pair_is_an_error(change: dict[str, torch.Tensor]) -> None:
    with pytest.raises(BatchError, match=r"bradley_terry: the rows of group_id \d are no pair"):
        bradley_terry(**{**pairs((1, 0)), **change})


def test_a_weight_of_centring_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss\.centering=-1"):
        Loss("bradley_terry", centering=-1)


def test_the_pair_objective_gives_each_token_its_pairs_loss() -> None:
    objective: Objective = PairObjective(Loss("bradley_terry"), AlgorithmConfig(entropy_coef=1.0), 8)
    assert objective.outputs == objective.differentiable == {"score"}
    assert objective.columns == ("keep", "chosen", "group_id", "margin")
    assert objective.unit == "group_id"
    tensors = {**pairs((1, 0), (0, 0)), "row_of_token": torch.tensor([0, 1, 1, 2, 3])}
    loss, metrics = objective(tensors)
    certain, even = math.log(1 + math.exp(-1)), math.log(2)
    np.testing.assert_allclose(loss.numpy(), [certain, even, even, certain, even])
    assert metrics["accuracy"].tolist() == [1, 0.5, 0.5, 1, 0.5]


def test_a_loss_over_groups_returns_one_value_a_group() -> None:
    def of_rows(score: Any, group_id: Any) -> Any:
        return -score

    with pytest.raises(BatchError, match=r"of_rows returned a loss of shape \[4\]; one value for each of 2 groups"):
        PairObjective(Loss(of_rows), AlgorithmConfig(), 8).of_rows(pairs((1, 0), (0, 0)))
    with pytest.raises(BatchError, match=r"bradley_terry needs the column 'chosen'; .*run\.pairs\(\)"):
        PairObjective(Loss("bradley_terry"), AlgorithmConfig(), 8).of_rows({"score": t(1), "group_id": t(1)})


# group 5: both rows; group 6: one rejected; group 7: one without a token that counts
LENGTHS = np.array([2, 3, 1, 2, 2, 1])
GROUPS = np.array([5, 5, 6, 6, 7, 7])
KEEP = np.array([1, 1, 1, 0, 1, 1], bool)
MASK = np.array([1, 1, 0, 1, 0, 1, 1, 1, 0, 0, 1], bool)


def test_a_rows_last_token_that_counts_stands_for_the_row_and_single_rows_weigh_nothing() -> None:
    weights = row_weights(MASK, LENGTHS, KEEP, GROUPS)
    assert np.flatnonzero(weights).tolist() == [1, 3]
    assert weights[[1, 3]].tolist() == [0.5, 0.5]
    everything = row_weights(np.ones(11, bool), LENGTHS, None, GROUPS)
    assert np.flatnonzero(everything).tolist() == [1, 4, 5, 7, 9, 10]
    np.testing.assert_allclose(everything[everything > 0], 1 / 6)


def test_the_weights_come_from_the_batch_and_add_up_to_one() -> None:
    batch = Batch({"response_ids": [[1, 2], [3], [4], [5, 6, 7]], "group_id": [0, 1, 0, 1]})
    batch |= Batch({"response_mask": batch.ragged("response_ids").with_values(np.ones(7, bool))})
    weights = PairObjective(Loss("bradley_terry"), AlgorithmConfig(), 8).weights(batch)
    np.testing.assert_allclose(weights, [0, 0.25, 0.25, 0.25, 0, 0, 0.25])


def test_no_rows_weigh_nothing() -> None:
    assert row_weights(np.zeros(0, bool), np.zeros(0, np.int64), None, np.zeros(0, np.int64)).shape == (0,)


# ---- which model learns by which loss
def mixed(logprobs: Any, values: Any, score: Any) -> Any:
    return logprobs


@pytest.mark.parametrize(
    ("loss", "head"),
    [("ppo_clip", "lm"), ("sft", "lm"), ("value_clip", "value"), ("bradley_terry", "score"), (mixed, "lm")],
)
def test_a_loss_says_by_its_parameters_what_it_is_of(loss: Any, head: str) -> None:
    assert head_of(Loss(loss)) == head
