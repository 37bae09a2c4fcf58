"""Trace: what ran, for how long, and which columns went from which call to which.

Files in the trace folder: `spans.jsonl` (one line a call, written at each commit), and, made by `close`, `trace.json`
(for Perfetto or chrome://tracing) and `dataflow.mmd` (a mermaid drawing of the last step).
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from ..batch import Batch
from ..columns import AnyColumn, Array, Ragged, Stored

DRIVER = "driver"  # where columns come from that no call of the step has made
Bytes = dict[str, int]
"""Column name -> bytes of its values; of objects, the length of their text."""


@dataclass
class Span:
    """One call of a role's method. start_ns: Unix time. inputs: producer ("role.method") -> the columns it made.

    step is -1 until the span is committed.
    """

    role: str
    method: str
    start_ns: int
    seconds: float = 0.0
    step: int = -1
    thread: int = 0
    rows_in: int = 0
    rows_out: int = 0
    inputs: dict[str, Bytes] = field(default_factory=dict)
    outputs: Bytes = field(default_factory=dict)
    error: str | None = None

    @property
    def name(self) -> str:
        """`role.method`."""
        return f"{self.role}.{self.method}"


class OpenSpan:
    """A call that is under way; `output` says what it made."""

    def __init__(self) -> None:
        self.made: Batch | None = None

    def output(self, batch: Batch) -> None:
        """The columns that later calls have from this one."""
        self.made = batch


class Trace:
    """Records calls from any thread; one instance a run. Spans are kept in memory until the next commit.

    folder: where the files go, made at the first commit; None = nothing is written. on_call: told the name of each call
    as it begins, and how far it is where it says so.
    """

    def __init__(self, folder: Path | None = None, on_call: Callable[[str], None] | None = None) -> None:
        self._folder = folder
        self._on_call = on_call
        self._lock = threading.Lock()
        self._clock = time.time_ns() - time.perf_counter_ns()  # from the steady clock to Unix time
        self._open: list[Span] = []
        self._current = ""  # the call that began last
        self._last: list[Span] = []
        self._makers: dict[str, list[tuple[str, Array | None]]] = {}

    @contextmanager
    def call(self, role: str, method: str, inputs: Batch | None = None) -> Iterator[OpenSpan]:
        """Times the block as one call: `with trace.call("actor", "generate", inputs=batch) as span: ...`."""
        opened, span = OpenSpan(), self.begin(role, method, inputs)
        began = time.perf_counter_ns()
        try:
            yield opened
        except BaseException as error:
            span.error = type(error).__name__
            raise
        finally:
            span.start_ns, span.seconds = began + self._clock, (time.perf_counter_ns() - began) / 1e9
            self.end(span, opened.made)

    def begin(self, role: str, method: str, inputs: Batch | None = None) -> Span:
        """A call is under way, whose times its runtime will fill in before `end`."""
        span = Span(role, method, 0, thread=threading.get_ident())
        self._current = span.name
        if self._on_call is not None:
            self._on_call(span.name)
        if inputs is not None:
            span.rows_in, span.inputs = len(inputs), self._edges(inputs)
        return span

    def end(self, span: Span, made: Batch | None = None) -> None:
        """The call is over, and made these rows."""
        with self._lock:
            if made is not None:
                span.rows_out = len(made)
                span.outputs = {name: nbytes(made._column(name)) for name in made.names}
                for name in made.names:
                    self._makers.setdefault(name, []).append((span.name, made.ids))
            self._open.append(span)

    def progress(self, done: int, total: int) -> None:
        """How far the call under way is."""
        if self._on_call is not None:
            self._on_call(f"{self._current} {done}/{total}")

    def seconds_by_call(self) -> dict[str, float]:
        """Seconds of the calls since the last commit, as metrics: `time/role.method`, and `time/calls`, in which at
        least one was under way. A step's time less `time/calls` is the controller's own."""
        with self._lock:
            spans = list(self._open)
        metrics: dict[str, float] = {}
        for span in spans:
            key = f"time/{span.name}"
            metrics[key] = metrics.get(key, 0.0) + span.seconds
        return {**metrics, "time/calls": _union_seconds(spans)}

    def mermaid(self) -> str:
        """The dataflow of the last committed step; before the first commit, of the calls so far."""
        with self._lock:
            return mermaid(self._last or self._open)

    def commit(self, step: int) -> None:
        """The calls so far belong to this step; their lines are on disk when it returns."""
        with self._lock:
            spans, self._open, self._makers = self._open, [], {}
            self._last = spans or self._last
        for span in spans:
            span.step = step
        if self._folder is not None and spans:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "spans.jsonl").open("a") as file:
                file.writelines(json.dumps(asdict(span)) + "\n" for span in spans)

    def close(self) -> None:
        """Writes trace.json and dataflow.mmd, from all spans of the folder, those of earlier sessions included.

        A file that can't be written is a warning: what a run did, or why it failed, does not depend on its trace.
        """
        drawing = self.mermaid()
        try:
            self.commit(self._last[-1].step if self._last else -1)
            if self._folder is not None and self._last:
                spans = without_replaced(read_spans(self._folder))
                (self._folder / "trace.json").write_text(json.dumps(perfetto(spans)))
                (self._folder / "dataflow.mmd").write_text(drawing)
        except OSError as error:
            warnings.warn(f"the trace in {self._folder} is not whole: {error}", stacklevel=2)

    def _edges(self, inputs: Batch) -> dict[str, Bytes]:
        """The batch's columns by the call that made them for these rows: the latest, if several did.

        Sizes are looked up where the rows live: those of a BatchRef are not fetched for it.
        """
        edges: dict[str, Bytes] = {}
        with self._lock:
            for name in inputs.names:
                makers = reversed(self._makers.get(name, []))
                maker = next((call for call, ids in makers if _some_rows(ids, inputs.ids)), DRIVER)
                edges.setdefault(maker, {})[name] = nbytes(inputs._column(name))
        return edges


def read_spans(folder: Path) -> list[Span]:
    """All spans that a trace wrote to a folder; a line that a killed process or a full disk left torn is skipped."""
    spans = []
    for line in (folder / "spans.jsonl").read_bytes().splitlines():
        try:
            spans.append(Span(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return spans


def without_replaced(spans: Sequence[Span]) -> list[Span]:
    """Each step once: a session that resumes after step n replaces what earlier ones did after it.

    spans: in the order they were written. A step number that goes back is a resume; -1, of a session that ended before
    its first commit, is none.
    """
    current: list[Span] = []
    last = -1
    for span in spans:
        if 0 <= span.step < last:
            current = [kept for kept in current if kept.step <= span.step]
        last = span.step if span.step >= 0 else last
        current.append(span)
    return current


def perfetto(spans: Sequence[Span]) -> dict[str, object]:
    """Spans in the Chrome trace event format: one process a role, complete ("X") events in microseconds."""
    first = min((span.start_ns for span in spans), default=0)
    roles = {role: pid for pid, role in enumerate(dict.fromkeys(span.role for span in spans), 1)}
    threads = {thread: tid for tid, thread in enumerate(dict.fromkeys(span.thread for span in spans), 1)}
    names: list[Mapping[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": role}} for role, pid in roles.items()
    ]
    events: list[Mapping[str, object]] = [
        {
            "ph": "X",
            "name": span.method,
            "cat": "call",
            "pid": roles[span.role],
            "tid": threads[span.thread],
            "ts": (span.start_ns - first) / 1e3,
            "dur": span.seconds * 1e6,
            "args": {"step": span.step, "rows_in": span.rows_in, "rows_out": span.rows_out, "outputs": span.outputs},
        }
        for span in spans
    ]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


def mermaid(spans: Sequence[Span]) -> str:
    """A flow chart: a node is a method of a role, an edge the columns one call has from another, with their bytes."""
    edges: dict[tuple[str, str], Bytes] = {}
    for span in spans:
        for maker, columns in span.inputs.items():
            edge = edges.setdefault((maker, span.name), {})
            for name, size in columns.items():
                edge[name] = edge.get(name, 0) + size
    nodes = dict.fromkeys([*(maker for maker, _ in edges), *(span.name for span in spans)])
    number = {node: f"n{i}" for i, node in enumerate(nodes)}
    lines = ["flowchart LR", *(f'    {number[node]}["{node}"]' for node in nodes)]
    for (maker, consumer), columns in edges.items():
        label = f"{', '.join(columns)}<br/>{sum(columns.values()):,} bytes"
        lines.append(f'    {number[maker]} -- "{label}" --> {number[consumer]}')
    return "\n".join(lines) + "\n"


def nbytes(column: AnyColumn) -> int:
    """Bytes of a column's values; text counts its characters, other objects nothing."""
    if isinstance(column, Stored):
        return column.nbytes
    if isinstance(column, Ragged):
        return int(column.values.nbytes + column.offsets.nbytes)
    if column.dtype == object:
        return sum(len(value) for value in column if isinstance(value, str))
    return int(column.nbytes)


def _some_rows(made: Array | None, asked: Array | None) -> bool:
    """Whether a call made some of the rows asked for; rows without identity are taken to be the same."""
    if made is None or asked is None or made is asked:
        return True
    return bool(np.isin(asked, made).any())


def _union_seconds(spans: Sequence[Span]) -> float:
    """Seconds in which at least one span was open."""
    total, until = 0, 0
    for span in sorted(spans, key=lambda span: span.start_ns):
        end = span.start_ns + round(span.seconds * 1e9)
        total += max(0, end - max(span.start_ns, until))
        until = max(until, end)
    return total / 1e9
