"""What a person sees while a run goes on: the plan, a line a step, samples, and what is being waited for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np
from rich.console import Console as RichConsole
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from ..batch import Batch

SHOWN = {  # metric -> label on the step line, in this order
    "reward/mean": "reward",
    "actor/loss": "loss",
    "critic/loss": "critic loss",
    "reward_model/loss": "loss",
    "reward_model/accuracy": "accuracy",
    "actor/kl_ref": "kl",
    "actor/entropy": "entropy",
    "actor/clip_fraction": "clipped",
    "rollout/length_mean": "length",
    "rollout/truncated": "truncated",
    "groups/without_variance": "flat groups",
    "actor/grad_norm": "grad norm",
}
FAULTS = {"reward/errors": "reward errors", "rollout/errors": "rollout errors", "actor/skipped": "skipped updates"}
"""Shown only when there are any."""
QUIET_SECONDS = 60.0  # after which a log says what is being waited for
TEXT_WIDTH = 400  # characters of a completion shown


class Console:
    """Writes to the terminal; a spinner names the call under way where there is a terminal to animate."""

    def __init__(self) -> None:
        self._rich = RichConsole(highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.idle()

    def say(self, text: str) -> None:
        """One line, out at once also where the output is a file."""
        self._rich.print(escape(text))
        self._rich.file.flush()
        self._last_line = time.monotonic()

    def waiting(self, what: str) -> None:
        """Name what is being waited for, until the next line. In a file, only once that line is long in coming."""
        if not self._rich.is_terminal:
            if time.monotonic() - self._last_line > QUIET_SECONDS:
                self.say(f"... {what}")
            return
        if self._status is None:
            self._status = self._rich.status(escape(what))
            self._status.start()
        self._status.update(escape(what))

    def idle(self) -> None:
        """Nothing is being waited for."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def step(self, step: int, total: int, metrics: Mapping[str, float], seconds_left: float) -> None:
        """The line of one finished step."""
        shown = [f"{label} {_number(metrics[name])}" for name, label in SHOWN.items() if name in metrics]
        shown += [f"{label} {_number(metrics[name])}" for name, label in FAULTS.items() if metrics.get(name)]
        speed = f"{metrics['time/step']:.1f} s, {_clock(seconds_left)} left"
        self.say(f"step {step:>{len(str(total))}}/{total}  {'  '.join(shown)}  ({speed})")

    def validation(self, step: int, metrics: Mapping[str, float], best: bool) -> None:
        """The line of a validation."""
        shown = "  ".join(f"{name} {_number(value)}" for name, value in metrics.items())
        self.say(f"validation after step {step}: {shown}{'  (best so far)' if best else ''}")

    def completions(self, rows: Batch, count: int) -> None:
        """A table of a few rollouts."""
        if not count or "response" not in rows:
            return
        table = Table(title="completions", show_lines=True)
        columns = [name for name in ("prompt", "response", "answer", "reward") if name in rows]
        for name in columns:
            table.add_column(name, overflow="fold", justify="right" if name == "reward" else "left")
        data = spread(rows, count).fetch(*columns)
        for row in range(len(data)):
            table.add_row(*(_cell(data.array(name)[row]) for name in columns))
        self._rich.print(table, soft_wrap=False)


def spread(rows: Batch, count: int) -> Batch:
    """At most `count` rows, evenly over the batch, so that they are of different prompts."""
    return rows.take(np.unique(np.linspace(0, len(rows) - 1, count).astype(np.int64)) if len(rows) else slice(0))


def _cell(value: Any) -> str:
    text = (
        _number(float(value)) if isinstance(value, float) or getattr(value, "dtype", None) is not None else str(value)
    )
    return escape(text if len(text) <= TEXT_WIDTH else text[:TEXT_WIDTH] + " ...")


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() and abs(value) >= 10 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def plan(rows: int, n: int, optimizer_steps: int, kind: str, total: int) -> str:
    """The start-up line: what a step is, in figures."""
    if kind != "prompts":
        return f"plan: {total} steps of {rows} {kind}, {_count(optimizer_steps, 'optimizer step')} each"
    rollouts = rows * n
    return (
        f"plan: {total} steps of {rows} prompts x {n} samples = {rollouts} rollouts, "
        f"{_count(optimizer_steps, 'optimizer step')} of about {max(1, rollouts // optimizer_steps)} rollouts each"
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
