"""What a score is: the weighted sum, what counts as an error, and what is reported. Calls are made in this process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import Batch
from hybridflow.columns import Ragged, objects
from hybridflow.errors import BatchError, ConfigError, RewardError
from hybridflow.workers.scoring import RewardConfig, Scorer

pytestmark = pytest.mark.unit

Function = tuple[str, Callable[..., Any], float]


def score(batch: Batch, *functions: Function, errors: float = 1.0) -> Batch:
    scorer = Scorer(functions, RewardConfig(workers=0, max_error_fraction=errors))
    out = scorer.score(batch)
    scorer.close()
    return out


def rows(*x: Any, **columns: Any) -> Batch:
    return Batch({"x": list(x), **columns}, 7 + np.arange(len(x)))


def same(x: Any) -> Any:
    return x


def test_case_09_a_reward_of_zero_is_a_value() -> None:
    out = score(rows(0.0, 0, False), ("f", same, 1.0))
    assert out["keep"].tolist() == [True, True, True]
    assert out["reward"].tolist() == [0.0, 0.0, 0.0]
    assert out["reward/f"].tolist() == [0.0, 0.0, 0.0]
    assert out.metrics["reward/errors"] == 0


NUMBER = st.floats(-1e3, 1e3, width=32)
COMPONENT = st.one_of(st.none(), NUMBER)


@given(
    st.lists(st.tuples(COMPONENT, COMPONENT, COMPONENT, COMPONENT), min_size=1, max_size=8),
    st.tuples(NUMBER, NUMBER),
)
def test_the_reward_is_the_weighted_sum_of_what_applies(
    table: list[tuple[float | None, ...]], weights: tuple[float, float]
) -> None:
    def f(a: Any) -> Any:
        return a

    def g(b: Any) -> Any:
        return {"reward": b}

    brought = [[math.nan if row[k] is None else row[k] for row in table] for k in (2, 3)]
    returned = {"a": objects(row[0] for row in table), "b": objects(row[1] for row in table)}
    batch = Batch({**returned, "reward/c": brought[0], "reward/d": brought[1]})
    out = score(batch, ("f", f, weights[0]), ("g", g, weights[1]))
    for row, (a, b, c, d) in enumerate(table):
        parts = [(a, weights[0]), (b, weights[1]), (c, 1.0), (d, 1.0)]
        applicable = [value * weight for value, weight in parts if value is not None]
        assert out["keep"][row] == bool(applicable)
        assert out["reward"][row] == pytest.approx(math.fsum(applicable), rel=1e-6, abs=1e-6)


def test_the_result_holds_new_columns_of_the_same_rows() -> None:
    batch = rows(1.0, 2.0)
    both = batch | score(batch, ("f", same, 0.5))
    assert both.ids is not None
    assert both.ids.tolist() == [7, 8]
    assert both["reward"].tolist() == [0.5, 1.0]
    assert both["reward"].dtype == both["reward/f"].dtype == np.float32
    assert both["drop_reason"].tolist() == [None, None]


@pytest.mark.parametrize(
    "value", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), Fraction(1), {"reward": 1}]
)
def test_any_number_is_a_reward(value: Any) -> None:
    assert score(rows(0), ("f", lambda x: value, 1.0))["reward"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("1.0", "returned the str '1.0', not a number"),
        (np.str_("1.0"), "not a number"),
        (math.nan, "returned nan, not a finite float32"),
        (math.inf, "returned inf, not a finite float32"),
        (1e300, "returned 1e+300, not a finite float32"),
        ((1.0, 2.0), "returned the tuple (1.0, 2.0), not a number"),
        ([1.0], "returned the list [1.0], not a number"),
        (1j, "not a number"),
        ({"score": 1.0}, "returned a dict without the key 'reward'"),
        ({"reward": "yes"}, "returned the str 'yes', not a number"),
        (np.ones(2), "TypeError"),
    ],
)
def test_anything_else_is_an_error_that_says_what_was_returned(value: Any, reason: str) -> None:
    out = score(rows(0), ("f", lambda x: value, 1.0))
    assert out["keep"].tolist() == [False]
    assert out["drop_reason"][0].startswith("reward f: ")
    assert reason in out["drop_reason"][0]
    assert math.isnan(out["reward/f"][0])
    assert out["reward"][0] == 0.0


def test_a_row_to_which_nothing_applies_is_an_error() -> None:
    out = score(rows(None, 2.0), ("f", same, 1.0), ("g", lambda x: None, 1.0))
    assert out["keep"].tolist() == [False, True]
    assert out["drop_reason"].tolist() == ["reward: no component applies to the row", None]


def test_a_component_that_applies_makes_up_for_one_that_does_not() -> None:
    batch = rows(None, 2.0, **{"reward/judge": [3.0, math.nan]})
    out = score(batch, ("f", same, 1.0))
    assert out["reward"].tolist() == [3.0, 2.0]
    assert "reward/judge" not in out
    assert out.metrics["reward/judge"] == 3.0


def test_a_sum_that_is_no_number_is_an_error() -> None:
    batch = rows(1.0, 1.0, **{"reward/judge": [math.inf, 1.0]})
    out = score(batch, ("f", same, 1.0))
    assert out["keep"].tolist() == [False, True]
    assert out["drop_reason"][0] == "reward: the weighted sum is inf"


def test_an_exception_excludes_its_row_and_names_its_cause() -> None:
    def f(x: int) -> float:
        return 1 / x

    out = score(rows(1, 0, 2), ("f", f, 1.0))
    assert out["keep"].tolist() == [True, False, True]
    assert out["drop_reason"][1] == "reward f: ZeroDivisionError: division by zero"
    assert out.metrics["reward/errors"] == 1
    assert out.metrics["reward/mean"] == 0.75  # of kept rows


def test_the_first_function_in_error_gives_the_reason() -> None:
    def f(x: int) -> float:
        raise ValueError("first")

    def g(x: int) -> float:
        raise ValueError("second")

    out = score(rows(1), ("f", f, 1.0), ("g", g, 1.0))
    assert out["drop_reason"][0] == "reward f: ValueError: first"
    assert out.metrics["reward/errors"] == 1


def test_rows_rejected_before_are_not_scored() -> None:
    seen: list[int] = []

    def f(x: int) -> float:
        seen.append(x)
        return 1.0

    out = score(rows(1, 2, 3, keep=[True, False, True]), ("f", f, 1.0))
    assert seen == [1, 3]
    assert out["keep"].tolist() == [True, False, True]
    assert out["reward"].tolist() == [1.0, 0.0, 1.0]
    assert out["drop_reason"].tolist() == [None, None, None]


def test_no_rows_to_score_is_no_error() -> None:
    assert len(score(rows(), ("f", same, 1.0))) == 0
    assert score(rows(1, keep=[False]), ("f", same, 1.0)).metrics["reward/errors"] == 0


def test_a_missing_column_is_named_before_any_call() -> None:
    called: list[int] = []

    def f(x: int) -> float:
        called.append(x)
        return 1.0

    def g(x: int, answers: str) -> float:
        return 1.0

    with pytest.raises(BatchError, match=r"reward g has the parameter 'answers', .* \['answer', 'x'\]"):
        score(rows(1, answer=["1"]), ("f", f, 1.0), ("g", g, 1.0))
    assert not called


def test_parameters_get_their_columns_defaults_and_options() -> None:
    def f(x: int, tokens: Any, pair: Any, level: int = 5, *, scale: float = 2.0, **others: Any) -> float:
        assert type(x) is int
        assert not others
        return scale * (x + tokens.sum() + pair[1] + level)

    tokens = Ragged.from_rows([[1, 2], [3]])
    batch = rows(1, 2, tokens=tokens, pair=np.array([[0.0, 10.0], [0.0, 20.0]]))
    assert score(batch, ("f", f, 1.0))["reward"].tolist() == [2 * 19, 2 * 30]
    batch |= Batch({"level": [0, 1]}, batch.ids)
    assert score(batch, ("f", f, 1.0))["reward"].tolist() == [2 * 14, 2 * 26]


def test_further_numbers_of_a_dict_are_metrics_and_no_columns() -> None:
    def f(x: int) -> dict[str, Any]:
        return {"reward": x, "words": 10 * x, "comment": "good"}

    out = score(rows(1, 2), ("f", f, 2.0))
    assert out.metrics["reward/f/words"] == 15
    assert out.metrics["reward/f"] == 1.5
    assert "reward/f/comment" not in out.metrics
    assert set(out.names) == {"reward", "reward/f", "keep", "drop_reason"}


def test_metrics_describe_kept_rows() -> None:
    out = score(rows(1.0, 3.0, "no"), ("f", same, 2.0))
    assert out.metrics["reward/mean"] == 4.0
    assert out.metrics["reward/std"] == 2.0
    assert (out.metrics["reward/errors"], out.metrics["reward/timeouts"]) == (1, 0)
    assert out.metrics["time/scoring"] > 0


def test_too_many_errors_stop_the_run_with_reasons_and_a_traceback() -> None:
    def f(x: int) -> float:
        if x == 4:
            return math.nan
        return {}["nowhere"] if x > 1 else 1.0

    with pytest.raises(RewardError) as caught:
        score(rows(0, 1, 2, 3, 4), ("f", f, 1.0), errors=0.5)
    message = str(caught.value)
    assert message.startswith("3 of 5 rows could not be scored; reward.max_error_fraction=0.5 allows 2.")
    assert "Most frequent: 2 x reward f: KeyError: 'nowhere'; 1 x reward f: returned nan" in message
    assert 'return {}["nowhere"] if x > 1 else 1.0' in message
    assert "reward_calls" not in message


def test_as_many_errors_as_allowed_do_not() -> None:
    out = score(rows(1, 2, 3, 4, "x"), ("f", same, 1.0), errors=0.2)
    assert out["keep"].sum() == 4


def test_async_functions_score_too_even_where_a_loop_runs_already() -> None:
    async def f(x: int) -> float:
        await asyncio.sleep(0)
        return 2.0 * x

    async def notebook() -> Batch:
        return score(rows(1, 2), ("f", f, 1.0), ("g", same, 1.0))

    assert asyncio.run(notebook())["reward"].tolist() == [3.0, 6.0]


def test_a_callable_object_may_be_async() -> None:
    class F:
        async def __call__(self, x: int) -> float:
            return 2.0 * x

    assert score(rows(1), ("f", F(), 1.0))["reward"].tolist() == [2.0]


def test_leaving_a_breakpoint_in_the_driver_ends_the_scoring() -> None:
    def f(x: int) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(rows(1), ("f", f, 1.0))


def test_a_column_of_the_functions_name_is_not_overwritten() -> None:
    with pytest.raises(BatchError, match="'reward/f' already"):
        score(rows(1, **{"reward/f": [1.0]}), ("f", same, 1.0))


def test_names_that_clash_are_refused() -> None:
    with pytest.raises(ConfigError, match="two are called 'f'"):
        score(rows(1), ("f", same, 1.0), ("f", same, 1.0))
    with pytest.raises(ConfigError, match="reward mean"):
        score(rows(1), ("mean", same, 1.0))


def test_an_option_without_default_is_refused() -> None:
    def f(x: int, *, scale: float) -> float:
        return scale * x

    with pytest.raises(ConfigError, match="'scale' needs a default"):
        score(rows(1), ("f", f, 1.0))


@pytest.mark.parametrize(
    "wrong", [{"workers": -1}, {"timeout_s": 0.0}, {"timeout_s": math.inf}, {"max_error_fraction": 1.1}]
)
def test_configuration_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"reward.{next(iter(wrong))}="):
        RewardConfig(**wrong)
