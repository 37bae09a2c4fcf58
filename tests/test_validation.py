"""pass@k and means against closed forms."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow import Batch, Sampling
from hybridflow.errors import ConfigError
from hybridflow.trainer.config import ValidationConfig
from hybridflow.trainer.validation import Validation, pass_at_k, validation_metrics

pytestmark = pytest.mark.unit


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=6), min_size=1, max_size=4), st.integers(1, 3))
def test_pass_at_k_is_the_share_of_k_subsets_that_hold_a_solved_sample(groups: list[list[bool]], k: int) -> None:
    expected = np.mean([np.mean([any(subset) for subset in combinations(group, k)]) for group in groups])
    group_id = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    assert pass_at_k(np.concatenate(groups), group_id, k) == pytest.approx(expected)


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="pass@2 needs 2 samples"):
        pass_at_k(np.array([True]), np.array([0]), 2)


def test_metrics_are_given_overall_and_by_source() -> None:
    rows = Batch(
        {
            "reward": [1.0, 0.0, 1.0, 0.5],
            "reward/math": [1.0, 0.0, np.nan, np.nan],
            "keep": [True] * 4,
            "group_id": [0, 1, 2, 3],
            "source": ["a", "a", "b", "b"],
        }
    )
    metrics = validation_metrics(rows, [1])
    assert metrics["reward"] == pytest.approx(0.625)
    assert metrics["reward/math"] == pytest.approx(0.5)
    assert metrics["pass@1"] == pytest.approx(0.5)
    assert metrics["reward/a"] == pytest.approx(0.5) and metrics["reward/b"] == pytest.approx(0.75)
    assert "reward/math/b" not in metrics


def test_whether_a_sample_is_solved_is_up_to_the_first_function_whatever_its_weight() -> None:
    first, second = np.array([1.0, 0.0, 1.0, np.nan]), np.array([0.0, 1.0, 1.0, 1.0])
    reward = 0.5 * np.nan_to_num(first) + 5 * second
    rows = Batch({"reward": reward, "reward/right": first, "reward/short": second, "group_id": [0, 1, 2, 3]})
    assert validation_metrics(rows, [1])["pass@1"] == 0.75


def test_a_row_that_could_not_be_scored_counts_as_unsolved() -> None:
    rows = Batch({"reward": [1.0, 1.0], "keep": [True, False], "group_id": [0, 1]})
    metrics = validation_metrics(rows, [1])
    assert (metrics["reward"], metrics["pass@1"], metrics["errors"]) == (0.5, 0.5, 1.0)


def test_validation_is_due_before_training_every_n_steps_and_at_the_end() -> None:
    rows = Batch({"group_id": [0]})
    validation = Validation(ValidationConfig(every_steps=3), rows, Sampling())
    assert [step for step in range(9) if validation.due(step, last=step == 8)] == [0, 3, 6, 8]
    assert not Validation(ValidationConfig(every_steps=0), rows, Sampling()).due(5, last=True)
    assert not Validation(ValidationConfig(), None, Sampling()).due(20, last=True)


def test_patience_counts_validations_without_improvement() -> None:
    validation = Validation(ValidationConfig(patience=2), None, Sampling())
    seen = []
    for value in (0.2, 0.3, 0.3, 0.1):
        seen.append(validation.improved({"reward": value}))
    assert seen == [True, True, False, False] and validation.out_of_patience


def test_a_lower_loss_is_better() -> None:
    validation = Validation(ValidationConfig(metric="loss"), None, Sampling())
    assert [validation.improved({"loss": value}) for value in (2.0, 1.0, 1.5)] == [True, True, False]


def test_an_unknown_validation_metric_is_an_error_that_lists_the_known_ones() -> None:
    validation = Validation(ValidationConfig(metric="accuracy"), None, Sampling())
    with pytest.raises(ConfigError, match=r"validation\.metric=accuracy.*reward, pass@1"):
        validation.improved({"reward": 1.0, "pass@1": 1.0})
