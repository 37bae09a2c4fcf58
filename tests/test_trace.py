"""The trace: what ran, and which columns went from which call to which."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.batch import Batch, RowKind, row_ids
from hybridflow.columns import Ragged
from hybridflow.controller import trace as trace_module
from hybridflow.controller.batch_ref import BatchRef
from hybridflow.controller.trace import DRIVER, Span, Trace, mermaid, nbytes, perfetto, read_spans, without_replaced

pytestmark = pytest.mark.unit

PROMPTS = Batch({"prompt_ids": [[1, 2], [3]], "answer": ["ab", "c"]}, row_ids(RowKind.PROMPT, np.arange(2)))
IDS = row_ids(RowKind.ROLLOUT, np.arange(2))
ROLLOUTS = Batch({"prompt_ids": [[1, 2], [3]], "response_ids": [[4], [5]]}, IDS)
SCORES = Batch({"reward": [0.0, 1.0]}, IDS)


def run_step(trace: Trace) -> None:
    """Generate, score, update, as a driver would."""
    with trace.call("actor", "generate", inputs=PROMPTS) as span:
        span.output(ROLLOUTS)
    with trace.call("reward", "score", inputs=ROLLOUTS) as span:
        span.output(SCORES)
    with trace.call("actor", "update", inputs=ROLLOUTS | SCORES | Batch({"advantages": [[1.0], [2.0]]}, IDS)):
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock of nanoseconds that tests set."""
    now = [0]
    monkeypatch.setattr(trace_module.time, "perf_counter_ns", lambda: now[0])
    monkeypatch.setattr(trace_module.time, "time_ns", lambda: 1000 + now[0])
    return now


def test_spans_hold_rows_and_bytes_by_the_call_that_made_each_column(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace")
    run_step(trace)
    trace.commit(3)
    generate, score, update = read_spans(tmp_path / "trace")
    assert [span.name for span in (generate, score, update)] == ["actor.generate", "reward.score", "actor.update"]
    assert {span.step for span in (generate, score, update)} == {3}
    assert (generate.rows_in, generate.rows_out, update.rows_out) == (2, 2, 0)
    assert generate.inputs == {DRIVER: {"prompt_ids": 3 * 8 + 3 * 8, "answer": 3}}
    assert generate.outputs == {"prompt_ids": 48, "response_ids": 2 * 8 + 3 * 8}
    assert score.inputs == {"actor.generate": {"prompt_ids": 48, "response_ids": 40}}
    assert {maker: set(columns) for maker, columns in update.inputs.items()} == {
        "actor.generate": {"prompt_ids", "response_ids"},
        "reward.score": {"reward"},
        DRIVER: {"advantages"},
    }


def test_of_two_makers_of_a_column_the_edge_comes_from_the_one_that_made_these_rows() -> None:
    trace = Trace()
    greedy = Batch({"response_ids": [[9]]}, row_ids(RowKind.ROLLOUT, np.array([50])))
    with trace.call("actor", "generate") as span:
        span.output(ROLLOUTS)
    with trace.call("actor", "greedy") as span:
        span.output(greedy)
    with trace.call("reward", "score", inputs=ROLLOUTS):
        pass
    with trace.call("reward", "score_greedy", inputs=greedy):
        pass
    assert trace.mermaid().splitlines()[-2:] == [
        '    n0 -- "prompt_ids, response_ids<br/>88 bytes" --> n2',
        '    n1 -- "response_ids<br/>24 bytes" --> n3',
    ]


def test_a_step_has_only_the_makers_of_its_own() -> None:
    trace = Trace()
    run_step(trace)
    trace.commit(0)
    with trace.call("reward", "score", inputs=ROLLOUTS):
        pass
    trace.commit(1)
    assert f'n0["{DRIVER}"]' in trace.mermaid()
    assert "actor" not in trace.mermaid()


def test_seconds_add_up_by_call_and_overlapping_calls_count_once(clock: list[int]) -> None:
    trace = Trace()
    with trace.call("actor", "step"):
        clock[0] += 2_000_000_000
    clock[0] += 5_000_000_000
    with trace.call("actor", "step"):
        clock[0] += 1_000_000_000
        with trace.call("reward", "score"):
            clock[0] += 1_000_000_000
    assert trace.seconds_by_call() == {"time/actor.step": 4.0, "time/reward.score": 1.0, "time/calls": 4.0}
    trace.commit(0)
    assert trace.seconds_by_call() == {"time/calls": 0.0}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10)), max_size=6))
def test_time_with_a_call_under_way_is_counted_second_by_second(intervals: list[tuple[int, int]]) -> None:
    trace = Trace()
    trace._open = [Span("a", "b", start * 10**9, float(length)) for start, length in intervals]
    covered = {second for start, length in intervals for second in range(start, start + length)}
    assert trace.seconds_by_call()["time/calls"] == len(covered)


def test_a_call_that_raises_is_recorded_with_the_kind_of_its_error(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    with pytest.raises(ValueError, match="no"), trace.call("actor", "step"):
        raise ValueError("no")
    trace.commit(0)
    assert [span.error for span in read_spans(tmp_path)] == ["ValueError"]


def test_calls_of_many_threads_are_all_recorded(tmp_path: Path) -> None:
    trace = Trace(tmp_path)

    def work(role: str) -> None:
        for _ in range(50):
            with trace.call(role, "f", inputs=ROLLOUTS) as span:
                span.output(SCORES)

    threads = [threading.Thread(target=work, args=(f"role{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.commit(0)
    spans = read_spans(tmp_path)
    assert sorted(span.role for span in spans) == sorted(f"role{i}" for i in range(4) for _ in range(50))


def test_lines_are_on_disk_after_a_commit_and_a_later_session_goes_on(tmp_path: Path) -> None:
    first = Trace(tmp_path / "trace")
    assert not (tmp_path / "trace").exists()
    run_step(first)
    first.commit(0)
    assert len(read_spans(tmp_path / "trace")) == 3
    second = Trace(tmp_path / "trace")
    run_step(second)
    second.close()
    assert len(read_spans(tmp_path / "trace")) == 6
    assert len(_events(tmp_path / "trace" / "trace.json")) == 6


def test_close_writes_the_last_steps_drawing_and_the_calls_after_it(tmp_path: Path) -> None:
    trace = Trace(tmp_path)
    run_step(trace)
    trace.commit(7)
    with trace.call("actor", "export"):
        pass
    trace.close()
    assert (tmp_path / "dataflow.mmd").read_text() == (
        "flowchart LR\n"
        '    n0["driver"]\n'
        '    n1["actor.generate"]\n'
        '    n2["reward.score"]\n'
        '    n3["actor.update"]\n'
        '    n0 -- "prompt_ids, answer<br/>51 bytes" --> n1\n'
        '    n1 -- "prompt_ids, response_ids<br/>88 bytes" --> n2\n'
        '    n1 -- "prompt_ids, response_ids<br/>88 bytes" --> n3\n'
        '    n2 -- "reward<br/>8 bytes" --> n3\n'
        '    n0 -- "advantages<br/>32 bytes" --> n3\n'
    )
    assert [event["name"] for event in _events(tmp_path / "trace.json")][-1] == "export"


def test_sizes_of_rows_that_live_with_the_workers_are_recorded_too() -> None:
    trace = Trace()
    with trace.call("reward", "score", inputs=BatchRef.of(ROLLOUTS)) as span:
        span.output(BatchRef.of(SCORES))
    assert "prompt_ids, response_ids<br/>88 bytes" in trace.mermaid()


def test_a_torn_line_is_skipped_and_a_later_session_closes(tmp_path: Path) -> None:
    first = Trace(tmp_path)
    run_step(first)
    first.commit(1)
    lines = (tmp_path / "spans.jsonl").read_bytes()
    (tmp_path / "spans.jsonl").write_bytes(lines[:-40])
    assert [span.name for span in read_spans(tmp_path)] == ["actor.generate", "reward.score"]
    second = Trace(tmp_path)
    run_step(second)
    run_step(second)
    second.commit(2)
    second.close()
    assert len(_events(tmp_path / "trace.json")) == 2 + 5  # the first line after the torn one is joined to it


def test_steps_done_again_after_a_resume_are_shown_once(tmp_path: Path) -> None:
    for steps in ((0, 1, 2, 3), (2, 3, 4)):  # the second session resumes after step 2: its start, then 3 and 4
        trace = Trace(tmp_path)
        for step in steps:
            with trace.call("actor", f"of_session_{steps[0]}"):
                pass
            trace.commit(step)
        trace.close()
    shown = [(event["args"]["step"], event["name"]) for event in _events(tmp_path / "trace.json")]
    first, second = "of_session_0", "of_session_2"
    assert shown == [(0, first), (1, first), (2, first), (2, second), (3, second), (4, second)]
    assert len(read_spans(tmp_path)) == 7


def test_a_session_that_ended_before_its_first_commit_replaces_nothing() -> None:
    spans = [Span("actor", "step", 0, step=step) for step in (0, 1, 2, -1, 2, 3)]
    assert without_replaced(spans) == spans


def test_a_trace_that_cannot_be_written_is_a_warning_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trace = Trace(tmp_path / "file")  # no folder can be made there
    with pytest.raises(ValueError, match="own"), trace.call("actor", "step"):
        raise ValueError("the run's own")
    with pytest.warns(UserWarning, match="the trace in .*file is not whole"):
        trace.close()


def test_nothing_is_written_without_a_folder_or_without_calls(tmp_path: Path) -> None:
    Trace().close()
    Trace(tmp_path / "trace").close()
    assert not list(tmp_path.iterdir())


def test_perfetto_has_one_process_a_role_and_microseconds(clock: list[int]) -> None:
    trace = Trace()
    for role, method, nanoseconds in (("actor", "generate", 2500), ("reward", "score", 500), ("actor", "update", 0)):
        with trace.call(role, method):
            clock[0] += nanoseconds
    trace.commit(0)
    events: Any = perfetto(trace._last)["traceEvents"]
    assert [(e["args"]["name"], e["pid"]) for e in events if e["ph"] == "M"] == [("actor", 1), ("reward", 2)]
    complete = [(e["name"], e["pid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert complete == [("generate", 1, 0.0, 2.5), ("score", 2, 2.5, 0.5), ("update", 1, 3.0, 0.0)]


def test_calls_of_one_method_are_one_node_whose_bytes_add_up() -> None:
    spans = [Span("actor", "step", 0, inputs={DRIVER: {"reward": 8}}) for _ in range(3)]
    assert mermaid(spans).count("actor.step") == 1
    assert "reward<br/>24 bytes" in mermaid(spans)


def test_whoever_waits_is_told_what_for() -> None:
    told: list[str] = []
    trace = Trace(on_call=told.append)
    run_step(trace)
    assert told == ["actor.generate", "reward.score", "actor.update"]


def test_bytes_of_a_column_are_its_values_and_the_length_of_text() -> None:
    batch = Batch({"a": np.zeros((2, 3), np.float32), "b": ["xyz", None], "c": Ragged.from_rows([[1], [2, 3]])})
    assert [nbytes(batch.column(name)) for name in "abc"] == [24, 3, 3 * 8 + 3 * 8]


def _events(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
