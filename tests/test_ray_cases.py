"""Cases 1 to 11 on several ranks: a step of two Ray ranks beside the same step in one process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow import Actor, Batch, Reward, Run, recipe
from hybridflow.controller.stored import StoredColumn
from hybridflow.errors import BatchError, EngineError
from tests.runs import numbers, quick

pytestmark = pytest.mark.ray
WORDS = ("run.steps=2", "sampling.temperature=0.7", "sampling.banned_tokens=[5,6]", "run.checkpoint_steps=0")


@dataclass
class Seen:
    """What a driver saw. second: whether a row lies on the second rank. alone: of rows whose first is a group of one.
    end: what ended the run, in its second step."""

    rows: Batch
    second: np.ndarray
    alone: Batch
    wrong_groups: str
    update: dict[str, float]
    recorded: dict[str, float]
    end: str


def odd_sum(response: str) -> float:
    """Exactly 0 for about half of them."""
    return float(sum(map(ord, response)) % 2)


def look(model: Path, folder: Path, *words: str, rejected: np.ndarray | None = None) -> Seen:
    """A step in which the rows of the second rank (`rejected`, if given) are rejected, and one in which such a row has
    an infinite advantage."""
    found: dict[str, Any] = {}

    @recipe("algorithm=grpo")
    def driver_that_looks(run: Run) -> None:
        actor, reward = run.groups(Actor, Reward)
        for step in run.steps():
            batch = actor.generate(run.prompts(), run.sampling)
            batch |= reward.score(batch) | actor.old_log_probs(batch)
            whole = batch | run.advantages(batch)
            if step == 0:
                found["rows"], found["second"] = whole.fetch(), on_second(batch)
                out = found["second"] if rejected is None else rejected
                found["alone"] = run.advantages(batch.take([0, 4, 5, 6, 7])).fetch()
                found["wrong_groups"] = wrong_groups(run, batch)
                found["update"] = dict(actor.update(changed(whole, out, np.nan, keep=~out)))
                run.record(whole, found["update"])
            else:
                run.record(whole, actor.update(changed(whole, out & (np.cumsum(out) == 1), np.inf)))

    with pytest.raises(EngineError) as raised:
        quick(model, folder, *WORDS, *words, driver=driver_that_looks, reward=odd_sum)
    return Seen(recorded=numbers(folder)[0], end=str(raised.value), **found)


def on_second(batch: Batch) -> np.ndarray:
    """Whether a row lies on the second rank."""
    column: Any = batch._column("response_ids")
    if not isinstance(column, StoredColumn):
        return np.zeros(len(batch), bool)
    ranks = np.array([shard.host[1] for shard in column.rows.shards])  # type: ignore[attr-defined]
    return np.asarray(ranks[column.rows.where()[0]] == 1)


def changed(batch: Batch, at: np.ndarray, value: float, **columns: Any) -> Batch:
    """`batch`, with other advantages in some rows."""
    advantages = batch.fetch("advantages").ragged("advantages")
    values = np.where(np.repeat(at, advantages.lengths), np.float32(value), advantages.values)
    others = Batch({"advantages": advantages.with_values(values), **columns}, batch.ids)
    return batch.drop("advantages", *columns) | others


def wrong_groups(run: Run, batch: Batch) -> str:
    """What is said of a group for every row."""
    own = batch.fetch("rollout_id")["rollout_id"]
    with pytest.raises(BatchError) as raised:
        run.advantages(batch.drop("group_id") | Batch({"group_id": own}, batch.ids))
    return str(raised.value)


@pytest.fixture(scope="module")
def two(ray_cluster: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return look(tiny_model, tmp_path_factory.mktemp("two") / "run", "placement.actor=2")


@pytest.fixture(scope="module")
def one(two: Seen, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return look(tiny_model, tmp_path_factory.mktemp("one") / "run", rejected=two.second)


def test_case_01_two_ranks_have_the_loss_and_gradient_of_one(one: Seen, two: Seen) -> None:
    assert 0 < two.second.sum() < len(two.second)
    for name in ("actor/loss", "actor/grad_norm", "actor/tokens", "actor/kl_old", "actor/ratio"):
        assert two.update[name] == pytest.approx(one.update[name], abs=1e-5), name
    assert two.update["actor/grad_norm"] > 0.01


def test_case_02_a_group_of_one_has_advantage_zero_on_two_ranks(two: Seen) -> None:
    advantages = two.alone.ragged("advantages")
    assert not advantages[0].any()
    assert any(advantages[row].any() for row in range(1, 5))


def test_case_03_advantages_are_those_of_whole_groups_whatever_rank_their_rows_lie_on(two: Seen) -> None:
    groups, rewards = two.rows["group_id"], two.rows["reward"]
    assert (np.unique(groups, return_counts=True)[1] == 4).all()
    for row, advantages in enumerate(two.rows.ragged("advantages")):
        group = rewards[groups == groups[row]]
        expected = (rewards[row] - group.mean()) / (group.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(advantages, expected, atol=1e-5)
    assert "all 16 rows are groups of one: no baseline" in two.wrong_groups


def test_case_04_rejected_rows_of_one_rank_hold_nan_and_move_nothing(two: Seen) -> None:
    learned = two.rows.ragged("response_mask").values[np.repeat(~two.second, two.rows.lengths("response_ids"))].sum()
    assert two.update["actor/tokens"] == learned
    assert np.isfinite(list(two.update.values())).all()


def test_case_06_both_ranks_score_what_they_sampled_as_they_sampled_it(two: Seen) -> None:
    mask = two.rows.ragged("response_mask").values
    sampled, scored = (two.rows.ragged(name).values[mask] for name in ("rollout_logprobs", "old_logprobs"))
    np.testing.assert_allclose(sampled, scored, atol=1e-4)
    assert not np.isin(two.rows.ragged("response_ids").values, [5, 6]).any()


def test_case_08_metrics_say_of_all_ranks_why_a_loss_is_zero(one: Seen, two: Seen) -> None:
    groups = two.rows["group_id"]
    flat = [len(set(two.rows["reward"][groups == group].tolist())) == 1 for group in np.unique(groups)]
    assert two.recorded["groups/without_variance"] == sum(flat)
    assert two.recorded["rollout/truncated"] == one.recorded["rollout/truncated"] > 0


def test_case_09_a_reward_of_zero_is_a_reward_on_two_ranks(one: Seen, two: Seen) -> None:
    assert 0 < (two.rows["reward"] == 0).sum() < len(two.rows)
    assert two.recorded["reward/mean"] == one.recorded["reward/mean"] == pytest.approx(two.rows["reward"].mean())
    assert two.recorded["reward/errors"] == 0


def test_case_10_a_loss_that_is_not_finite_on_one_rank_names_the_row(two: Seen) -> None:
    named = re.search(r"loss is -?inf in row \d+ \(group_id (\d+), sample (\d+)\)\. The weights are those", two.end)
    assert named is not None, two.end
    group, sample = divmod(int(np.flatnonzero(two.second)[0]), 4)
    assert (int(named[1]), int(named[2])) == (4 + group, sample)  # of the second step


def test_case_11_what_is_sampled_depends_on_no_number_of_ranks(
    one: Seen, two: Seen, tiny_model: Path, tmp_path: Path
) -> None:
    def tokens(seen: Seen) -> list[int]:
        return list(seen.rows.ragged("response_ids").values.tolist())

    assert tokens(one) == tokens(two)
    again = look(tiny_model, tmp_path / "again", "placement.actor=2")
    assert (tokens(again), again.update, again.recorded) == (tokens(two), two.update, two.recorded)
    assert tokens(look(tiny_model, tmp_path / "other", "run.seed=1", rejected=two.second)) != tokens(two)
