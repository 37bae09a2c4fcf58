"""The Ray runtime: every protocol against a plain oracle, rows that stay where they were made, and what crosses."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.batch import Batch, RowKind, concat, row_ids
from hybridflow.columns import Ragged
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.group import Place
from hybridflow.controller.runtime.inline import InlineRuntime
from hybridflow.controller.runtime.ray.runtime import Deadlines, RayRuntime
from hybridflow.controller.stored import StoredColumn
from hybridflow.controller.trace import Trace
from hybridflow.errors import BatchError, ConfigError, HybridFlowError, WorkerError
from hybridflow.layout import Coordinates, ParallelLayout
from tests.ray_roles import Plain

pytestmark = pytest.mark.ray
LAYOUT = ParallelLayout(pp=2, dp=2)


def runtime_in(folder: Path, **deadlines: float) -> RayRuntime:
    return RayRuntime(Trace(), seed=0, deadlines=Deadlines(**deadlines), failure_folder=folder / "failure", say=print)


@pytest.fixture(scope="module")
def group(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Plain]]:
    """Handles over pools of four (pp 2 x dp 2) and of three ranks (dp 3)."""
    runtime = runtime_in(tmp_path_factory.mktemp("run"), call_s=120.0, start_s=120.0)
    layouts = {"plain": LAYOUT, "other": ParallelLayout(dp=3)}
    handles = {
        name: Plain(layout, name, group=runtime.group(name, Plain, layout, Place(name, layout.size)))
        for name, layout in layouts.items()
    }
    yield handles.__getitem__
    runtime.close()


def rows(count: int, seed: int = 0) -> Batch:
    """Rows of very unlike lengths, some empty."""
    lengths = np.random.default_rng(seed).integers(0, 40, count)
    tokens = [np.arange(length) + i for i, length in enumerate(lengths)]
    columns = {
        "n": np.arange(count),
        "text": [f"row {i}" for i in range(count)],
        "prompt_ids": Ragged.from_rows([np.arange(1 + i % 3) for i in range(count)], np.int64),
        "response_ids": Ragged.from_rows(tokens, np.int64),
        "wide": np.arange(2.0 * count).reshape(count, 2),
    }
    return Batch(columns, row_ids(RowKind.ROLLOUT, 5 * np.arange(count)))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 64])
@pytest.mark.parametrize("name", ["plain", "other"])
def test_rows_split_over_ranks_come_back_in_their_order(group: Any, name: str, count: int) -> None:
    batch = rows(count)
    made = group(name).double(batch)
    assert isinstance(made, BatchRef) and len(made) == count
    assert batch.ids is not None and made.ids.tolist() == batch.ids.tolist()
    if count:
        got = made.fetch()
        assert got.array("twice").tolist() == [2 * i for i in range(count)]
        assert got.ragged("advantages").values.tolist() == (batch.ragged("response_ids").values * 0.5).tolist()


def test_what_a_call_made_is_joined_chosen_and_passed_on_without_being_read(group: Any) -> None:
    batch = rows(30)
    first = group("plain").double(batch)
    joined = batch | first
    chosen = joined.take(np.arange(29, -1, -2))
    assert isinstance(chosen._column("advantages"), StoredColumn)
    again = group("other").double(chosen.drop("twice", "advantages"))
    assert again.fetch("twice").array("twice").tolist() == [2 * i for i in range(29, -1, -2)]
    together = concat([chosen, joined.take([0, 7])])
    assert together.fetch("twice").array("twice").tolist() == [*range(58, -1, -4), 0, 14]
    lengths = batch.ragged("response_ids").lengths[[*range(29, -1, -2), 0, 7]]
    assert together.fetch("advantages").ragged("advantages").lengths.tolist() == lengths.tolist()


def test_every_column_of_rows_a_call_made_arrives_as_it_was(group: Any) -> None:
    batch = rows(11)
    made = group("plain").repeat(batch, 3)
    expected = batch.take(np.repeat(np.arange(11), 3))
    assert made.ids.tolist() == row_ids(RowKind.ROLLOUT, np.arange(33)).tolist()
    got = made.fetch()
    for name in batch.names:
        if isinstance(got.column(name), Ragged):
            assert [row.tolist() for row in got.ragged(name)] == [row.tolist() for row in expected.ragged(name)]
        else:
            assert got.array(name).tolist() == expected.array(name).tolist()


def test_the_last_stage_answers_for_a_model_in_stages(group: Any) -> None:
    ranks = group("plain").whose(rows(8)).fetch()["rank"]
    last = {LAYOUT.rank(Coordinates(pp=1, dp=dp, cp=0, tp=0)) for dp in range(2)}
    assert set(ranks) == last


def test_one_value_goes_to_all_ranks_and_each_can_be_given_its_own(group: Any) -> None:
    plain = group("plain")
    assert plain.same("x") == "x"
    assert plain.stage() == [0, 2]
    assert plain.own(["a", "b", "c", "d"]) == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert plain.on_ranks(lambda worker, add: worker.rank + add, 10, ranks=[3, 1]) == [13, 11]
    with pytest.raises(ValueError, match="rank 4"):
        plain.on_ranks(lambda worker: None, ranks=[4])


def test_rows_stay_on_their_ranks_while_they_are_balanced_there(group: Any) -> None:
    plain = group("other")
    made = plain.repeat(rows(60), 1)
    where = made._column("response_ids").rows.where()[0]
    twice = plain.double(made.drop("number"))
    assert twice._column("twice").rows.where()[0].tolist() == where.tolist()


def test_a_function_of_tokens_runs_beside_the_shards_and_one_of_rows_in_the_driver(group: Any) -> None:
    made = group("plain").repeat(rows(10), 2)
    process = __import__("os").getpid()

    def where(response_ids: Any, row_of_token: Any) -> dict[str, Any]:
        import os

        return {"advantages": response_ids * 1.0, "process": np.full(row_of_token.max() + 1, os.getpid())}

    tokens = made.map(where)
    assert isinstance(tokens._column("advantages"), StoredColumn)
    assert set(tokens.fetch("process")["process"]) != {process}
    dense = made.map(lambda number: number + 1, to="next")
    assert dense._column("next").tolist() == list(range(1, 21))
    per_row = made.map(lambda number: number * 0.5, to="advantages")
    assert isinstance(per_row._column("advantages"), StoredColumn)
    assert per_row.fetch("advantages").ragged("advantages").lengths.tolist() == made.lengths("response_ids").tolist()


def test_rows_without_identities_come_back_in_their_order(group: Any) -> None:
    batch = Batch(rows(40).fetch()._columns)  # of very unlike lengths, so that they are placed out of order
    assert batch.ids is None
    assert group("other").double(batch).fetch()["twice"].tolist() == [2 * i for i in range(40)]


def test_columns_kept_under_different_names_are_joined_as_themselves(group: Any) -> None:
    made = group("plain").repeat(rows(6), 1)
    made = made.select("n", "number", "prompt_ids", "response_ids")
    swapped = made.drop("prompt_ids", "response_ids") | made.select("prompt_ids", "response_ids").rename(
        prompt_ids="response_ids", response_ids="prompt_ids"
    )
    together = concat([made, swapped]).fetch()
    expected = rows(6).ragged("prompt_ids").values.tolist()
    assert np.concatenate([together.ragged("response_ids")[row] for row in range(6, 12)]).tolist() == expected


def test_objects_are_read_apart_from_the_columns_beside_them(group: Any) -> None:
    made = group("plain").repeat(rows(5), 2)
    assert made.fetch("wide", "text")["text"].tolist() == [f"row {i}" for i in range(5) for _ in range(2)]
    assert made.lengths("response_ids").tolist() == np.repeat(rows(5).lengths("response_ids"), 2).tolist()


def test_lengths_of_a_column_that_follows_another_are_known_without_reading_it(group: Any) -> None:
    batch = rows(12)
    made = group("plain").repeat(batch, 1)
    made |= group("plain").double(made)
    assert made.lengths("advantages").tolist() == batch.lengths("response_ids").tolist()
    assert isinstance(made._column("advantages"), StoredColumn)


def test_two_runs_of_one_process_read_their_own_rows(group: Any, tmp_path: Path) -> None:
    made = group("plain").repeat(rows(9), 1)
    runtime = runtime_in(tmp_path)
    other = Plain(LAYOUT, "plain", group=runtime.group("plain", Plain, LAYOUT, Place("plain", LAYOUT.size)))
    few = other.repeat(rows(3), 1)
    assert made.fetch("n")["n"].tolist() == list(range(9))
    assert few.fetch("response_ids").lengths("response_ids").tolist() == rows(3).lengths("response_ids").tolist()
    runtime.close()
    assert made.fetch("text")["text"].tolist() == [f"row {i}" for i in range(9)]
    assert len(group("plain").double(made)) == 9
    with pytest.raises(HybridFlowError, match="its run is over"):
        few.fetch("text")


def test_a_call_answers_for_the_rows_of_its_first_batch_and_whole_groups_stay_on_a_rank(group: Any) -> None:
    groups = Batch({"n": np.arange(7), "group_id": np.array([0, 0, 0, 1, 2, 2, 2])}, rows(7).ids)
    ranks = group("other").whose_group(groups).fetch()["rank"]
    assert all(len(set(ranks[groups["group_id"] == of].tolist())) == 1 for of in range(3))
    assert len(set(ranks.tolist())) == 3
    first, second = rows(4), Batch({"n": np.arange(4) * 10}, row_ids(RowKind.ROLLOUT, np.arange(4) + 100))
    assert group("plain").added(first, second).fetch()["sum"].tolist() == [0, 11, 22, 33]


def test_a_method_that_reorders_its_rows_is_told(group: Any, ray_cluster: None, tmp_path: Path) -> None:
    runtime = runtime_in(tmp_path)
    plain = Plain(ParallelLayout(), "plain", group=runtime.group("plain", Plain, ParallelLayout(), Place("plain")))
    with pytest.raises(BatchError, match=r"plain\.backwards, rank 0 .*never drops, adds or reorders rows"):
        len(plain.backwards(rows(5)))
    runtime.close()
    inline = Plain(ParallelLayout(), "plain", group=InlineRuntime(Trace()).group("plain", Plain, None, Place("plain")))
    with pytest.raises(BatchError, match=r"plain\.backwards, rank 0: .*never drops, adds or reorders rows"):
        inline.backwards(rows(5))


def test_case_28_more_ranks_than_the_cluster_could_ever_hold_are_refused_at_once(
    ray_cluster: None, tmp_path: Path
) -> None:
    runtime = runtime_in(tmp_path)
    layout = ParallelLayout(dp=500)
    plain = Plain(layout, "plain", group=runtime.group("plain", Plain, layout, Place("plain", 500)))
    with pytest.raises(ConfigError, match=r"asks for 500 devices \(plain 500\), and this cluster has 64 slot on"):
        plain.stage()
    runtime.close()


def test_ranks_find_the_modules_that_the_driver_finds_and_name_one_they_do_not(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_module.py").write_text("def where(worker): return __file__")
    monkeypatch.syspath_prepend(tmp_path)
    where = importlib.import_module("users_module").where

    def first_rank(folder: Path) -> list[str]:
        runtime = runtime_in(folder)
        group = runtime.group("plain", Plain, ParallelLayout(), Place("plain"))
        try:
            return Plain(ParallelLayout(), "plain", group=group).on_ranks(where)
        finally:
            runtime.close()

    assert first_rank(tmp_path / "found") == [str(tmp_path / "users_module.py")]
    sys.path.remove(str(tmp_path))
    with pytest.raises(WorkerError, match=r"rank 0 .*: its process has no module users_module, .*install it on every"):
        first_rank(tmp_path / "lost")
