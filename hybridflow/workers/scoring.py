"""Scoring: the weighted sum of reward functions and of components that are already in the batch."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..algorithms.registry import columns_of, name_of, options_of, required_columns_of, resolve
from ..batch import Batch
from ..columns import Kind, Ragged, kind_of, objects
from ..errors import BatchError, ConfigError, RewardError
from .reward_calls import Call, Chunk, Outcome, RewardFunction
from .reward_pool import Calls, InDriver, WorkerPool

CHUNKS_PER_WORKER = 4  # small enough that workers end together, large enough that messages cost little
OWN_METRICS = ("mean", "std", "errors", "timeouts", "retries")
COMPONENTS = ("model",)
"""What reward.functions may name beside functions: a column reward/NAME that another role makes."""


@dataclass
class RewardConfig:
    """How rollouts are scored, `reward.*`. Errors: ConfigError, when made, for a value outside its range."""

    functions: list[str] = field(default_factory=list)
    """Registered names (exact, last_integer, math), package.module:name or path/file.py:name; `model`: reward.model's
    score."""

    weights: list[float] = field(default_factory=list)
    """One per function; empty = all 1."""

    model: str | None = None
    """Folder or hub name of a reward model, with a tokenizer of its own; null = none or, where one is trained, its
    training begins with model.path."""

    workers: int = 4
    """Processes that call the functions; 0 = in the driver: breakpoints work, no time-out."""

    timeout_s: float = 30.0
    """Seconds that one call may take. A row whose call takes longer is excluded and counted."""

    max_error_fraction: float = 0.2
    """Of one step's rows: if more than this part cannot be scored, the run stops."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ConfigError(f"reward.workers={self.workers}: a number of processes, or 0 to score in the driver.")
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"reward.timeout_s={self.timeout_s}: a number of seconds above 0.")
        if not 0 <= self.max_error_fraction <= 1:
            raise ConfigError(f"reward.max_error_fraction={self.max_error_fraction}: a fraction between 0 and 1.")


class Scorer:
    """Calls reward functions on the rows of a batch, in processes that start at once and live until `close`.

    functions: name, function, weight of each. A function's positional parameters are columns of its row; it returns a
    number, None (not applicable), or a dict with `reward` whose other numbers become metrics; it may be async.
    Columns reward/* that a batch brings along are components too: of the weight that the configuration gives them where
    it names them, else of weight 1.
    Errors: ConfigError for names that clash, options without a default, functions that cannot be sent to a process.
    """

    def __init__(
        self,
        functions: Sequence[tuple[str, Callable[..., Any], float]],
        config: RewardConfig,
    ) -> None:
        self._config = config
        self._functions = [RewardFunction(name, fn, columns_of(fn)) for name, fn, _ in functions]
        check_names([fn.name for fn in self._functions])
        for fn in self._functions:
            options_of(fn.call)
        self._named = {name: weight for name, weight in _weighted(config) if name in COMPONENTS}
        self._weights = {**self._named, **{name: weight for name, _, weight in functions}}
        self._calls: Calls = (
            WorkerPool(self._functions, config.workers, config.timeout_s)
            if config.workers and functions
            else InDriver(self._functions)
        )
        self._turn = threading.Lock()  # one score at a time uses the workers

    def score(self, batch: Batch) -> Batch:
        """Columns reward, reward/<function>, keep, drop_reason of the same rows, and metrics reward/*.

        A row is in error, has keep = 0 and a reason, if a function raised, hung or returned no finite number, or if no
        component applies to it. Rows that come with keep = 0 are not scored. Returns within about (calls that hang) x
        reward.timeout_s / reward.workers.
        Errors: BatchError for a column that a function needs and the batch lacks; RewardError if more than
        reward.max_error_fraction of the rows are in error.
        """
        started = time.perf_counter()
        self._check_columns(batch)
        tally = _Tally(batch, [fn.name for fn in self._functions], self._weights)
        with self._turn, closing(self._calls.run(self._chunks(batch, tally.live))) as outcomes:
            before = self._calls.retries
            for outcome in outcomes:
                tally.add(outcome)
                if tally.timeouts > self._config.max_error_fraction * tally.live.sum():
                    self._check_errors(tally)  # lost already: the rest would only be waited for
            retries = self._calls.retries - before
        tally.close()
        self._check_errors(tally)
        own = {"reward/retries": float(retries), "time/scoring": time.perf_counter() - started}
        return Batch(tally.columns(), batch.ids, {**tally.metrics(), **own})

    def close(self) -> None:
        """End all worker processes."""
        self._calls.close()

    def _chunks(self, batch: Batch, live: NDArray[np.bool_]) -> Iterator[Chunk]:
        rows = np.flatnonzero(live).tolist()
        for number, fn in enumerate(self._functions):
            calls = _calls(batch, fn, rows)
            # async calls wait at the same time, so that more chunks would only make them wait in turns
            parts = 1 if not self._config.workers else self._config.workers * (1 if fn.is_async else CHUNKS_PER_WORKER)
            size = max(1, math.ceil(len(calls) / parts))
            for first in range(0, len(calls), size):
                yield Chunk(number, calls[first : first + size])

    def _check_columns(self, batch: Batch) -> None:
        for name in self._named:
            if f"reward/{name}" not in batch:
                raise BatchError(
                    f"reward.functions names {name}, but the batch has no column 'reward/{name}'. Score it first: "
                    "batch |= reward_model.score(batch), with a group of the role RewardModel."
                )
        for fn in self._functions:
            for name in required_columns_of(fn.call):
                if name not in batch:
                    raise BatchError(
                        f"reward {fn.name} has the parameter '{name}', but the batch has no such column; it has "
                        f"{sorted(batch.names)}. Rename the parameter, give it a default, or add the column."
                    )
            if f"reward/{fn.name}" in batch:
                raise BatchError(
                    f"the batch has a column 'reward/{fn.name}' already, and a reward function of that name would "
                    "overwrite it: drop the column or rename the function."
                )

    def _check_errors(self, tally: _Tally) -> None:
        allowed, rows = self._config.max_error_fraction, int(tally.live.sum())
        if len(tally.errors) <= allowed * rows:
            return
        reasons = Counter(tally.reason(outcome) for outcome in tally.errors.values()).most_common(3)
        listed = "; ".join(f"{count} x {reason}" for reason, count in reasons)
        first = next((outcome.traceback for outcome in tally.errors.values() if outcome.traceback), None)
        remedy = "To look at one, set reward.workers=0 and a breakpoint in the function."
        if tally.timeouts:
            remedy = (
                f"A call may take reward.timeout_s={self._config.timeout_s:g} seconds: raise it if that is too short."
            )
        raise RewardError(
            f"{len(tally.errors)} of {rows} rows could not be scored; reward.max_error_fraction={allowed:g} allows "
            f"{math.floor(allowed * rows)}. Most frequent: {listed}. {remedy}"
            + (f"\nThe first traceback:\n{first}" if first else "")
        )


class _Tally:
    """The outcomes of one batch's calls, as they come in; then, after `close`, its columns and metrics."""

    def __init__(self, batch: Batch, names: Sequence[str], weights: Mapping[str, float]) -> None:
        self.live: NDArray[np.bool_] = np.array(batch["keep"] if "keep" in batch else np.ones(len(batch), bool))
        self.errors: dict[int, Outcome] = {}
        self._names = names
        self._weights = weights
        self.timeouts = 0
        self._extras: dict[str, list[float]] = defaultdict(list)
        self._own = {name: np.full(len(batch), np.nan, np.float32) for name in names}
        brought = {
            name.removeprefix("reward/"): batch.array(name) for name in batch.names if name.startswith("reward/")
        }
        self._components = {**brought, **self._own}
        self._total = np.zeros(len(batch))

    def add(self, outcome: Outcome) -> None:
        """Of several errors in a row, that of the first function is its reason."""
        name = self._names[outcome.function]
        if outcome.error is None:
            self._own[name][outcome.row] = outcome.value
            for key, value in outcome.extras.items():
                self._extras[f"reward/{name}/{key}"].append(value)
            return
        self.timeouts += outcome.timed_out
        known = self.errors.get(outcome.row)
        if known is None or outcome.function < known.function:
            self.errors[outcome.row] = outcome

    def close(self) -> None:
        """Sum up; rows without an applicable component, or whose sum is no float32, are errors too."""
        applicable = np.zeros(len(self.live), bool)
        for name, values in self._components.items():
            there = ~np.isnan(values)
            applicable |= there
            self._total += self._weights.get(name, 1.0) * np.where(there, values.astype(np.float64), 0.0)
        with np.errstate(over="ignore"):
            finite = np.isfinite(self._total.astype(np.float32))
        for row in np.flatnonzero(self.live & ~(applicable & finite)).tolist():
            what = f"the weighted sum is {self._total[row]}" if applicable[row] else "no component applies to the row"
            self.errors.setdefault(row, Outcome(row, -1, error=what))

    def reason(self, outcome: Outcome) -> str:
        """What a row in error was dropped for, and by which function."""
        name = f" {self._names[outcome.function]}" if outcome.function >= 0 else ""
        return f"reward{name}: {outcome.error}"

    @property
    def _keep(self) -> NDArray[np.bool_]:
        keep = self.live.copy()
        keep[list(self.errors)] = False
        return keep

    def columns(self) -> dict[str, Any]:
        """reward (0 where keep = 0), reward/<function> (NaN: not applicable or in error), keep, drop_reason."""
        reasons = objects([None] * len(self.live))
        for row, outcome in self.errors.items():
            reasons[row] = self.reason(outcome)
        keep = self._keep
        own = {f"reward/{name}": values for name, values in self._own.items()}
        return {"reward": np.where(keep, self._total, 0.0), **own, "keep": keep, "drop_reason": reasons}

    def metrics(self) -> dict[str, float]:
        """Mean and spread over kept rows, means of components over the kept rows they apply to, counts of errors."""
        found = {"reward/errors": float(len(self.errors)), "reward/timeouts": float(self.timeouts)}
        keep = self._keep
        if keep.any():
            found["reward/mean"], found["reward/std"] = float(self._total[keep].mean()), float(self._total[keep].std())
        means: dict[str, Any] = {f"reward/{name}": values[keep] for name, values in self._components.items()}
        for name, values in {**means, **self._extras}.items():
            numbers = np.asarray(values, np.float64)
            if np.isfinite(numbers).any():
                found[name] = float(numbers[np.isfinite(numbers)].mean())
        return found


def _calls(batch: Batch, fn: RewardFunction, rows: Sequence[int]) -> list[Call]:
    columns = {name: _row_values(batch, name) for name in fn.columns if name in batch}
    return [(row, {name: values[row] for name, values in columns.items()}) for row in rows]


def _row_values(batch: Batch, name: str) -> Sequence[Any]:
    """One Python value a row: numbers of dense columns as int, float or bool; arrays of ragged or wider columns."""
    column = batch.column(name)
    if isinstance(column, Ragged) or kind_of(column) is Kind.OBJECTS or column.ndim > 1:
        return list(column)
    values: list[Any] = column.tolist()
    return values


def reward_functions(config: RewardConfig) -> tuple[tuple[str, Callable[..., Any], float], ...]:
    """Name, function and weight of each function that reward.functions names; components are left out."""
    named = [(spec, weight) for spec, weight in _weighted(config) if spec not in COMPONENTS]
    resolved = [(spec, resolve(spec, "reward"), weight) for spec, weight in named]
    return tuple((name_of(fn) if ":" in spec else spec, fn, weight) for spec, fn, weight in resolved)


def _weighted(config: RewardConfig) -> list[tuple[str, float]]:
    """Specs of functions and components with their weights."""
    return list(zip(config.functions, config.weights or [1.0] * len(config.functions), strict=True))


def check_names(names: Sequence[str]) -> None:
    """Each reward function has a column reward/NAME of its own. Errors: ConfigError naming the one that has not."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"reward.functions: two are called '{name}', but reward/{name} is one column: rename one."
            )
        if name in OWN_METRICS or "/" in name:
            raise ConfigError(f"reward {name}: the metric reward/{name} has a meaning already: rename the function.")
