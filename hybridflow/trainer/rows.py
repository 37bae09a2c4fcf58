"""Rows: the data of a run as a worker, so that prompts are loaded, tokenised and kept outside the driver."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ..batch import Batch
from ..controller.protocols import ONE_TO_ALL
from ..controller.worker import Worker, remote
from ..errors import ConfigError
from .config import Config
from .data import PromptLimit, PromptSource, load_rows, load_validation_rows, prompt_limit
from .data_sources import has_splits
from .unread import refuse

VALIDATION_IDS = 1 << 40  # group ids of validation rows start here, far from any training draw

GivenRows = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class RowsSettings:
    """rows, validation_rows: data in memory, in the place of data.path and data.validation_path."""

    config: Config
    rows: GivenRows
    validation_rows: GivenRows
    trains: bool


class RowsInfo(NamedTuple):
    """Of the training rows. rows: an epoch. fingerprint: differs when they do. notices: what was left out."""

    rows: int
    fingerprint: str
    notices: Sequence[str]


class Rows(Worker[RowsSettings]):
    """Loads, tokenises and keeps the data, in a process of its own where there are several; the cursor is the handle's.

    Rows are read when first asked for.
    """

    role = "data"
    needs_device = False

    # ---- driver
    def draw(self, kind: str, n: int | None) -> Batch:
        """The next n rows (data.rows_per_step). Errors: ConfigError if the data holds rows of another kind."""
        data, algorithm = self.settings.config.data, self.settings.config.algorithm
        if data.kind != kind:
            raise ConfigError(
                f"the driver draws {kind}, but data.kind={data.kind} (algorithm={algorithm.name} sets it): add "
                f"data.kind={kind} to its recipe."
            )
        count, first = n or data.rows_per_step, self._cursor
        self._cursor += count
        return self.rows_at(first, count)

    def steps_in(self, epochs: int) -> int:
        """Steps that go through the data `epochs` times; the last may reach into the next epoch."""
        return math.ceil(epochs * self.info.rows / self.settings.config.data.rows_per_step)

    @property
    def epoch(self) -> float:
        """Epochs drawn so far."""
        return self._cursor / self.info.rows

    @cached_property
    def info(self) -> RowsInfo:
        """Of the training rows."""
        return self.described()

    @cached_property
    def no_validation(self) -> str | None:
        """Why there are no validation rows, and the remedy; None if there are some."""
        count, _ = self.validation_described()
        if count:
            return None
        data = self.settings.config.data
        if self.settings.rows is not None:
            return "rows in memory have no splits; give train(validation=ROWS), or set data.validation_path."
        if not has_splits(data.path):
            return f"data.path={data.path} has no splits; set data.validation_path."
        return (
            f"data.path={data.path} has no split '{data.validation_split}'; set data.validation_path or "
            "data.validation_split."
        )

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self._cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cursor = state["cursor"]

    # ---- its process
    @remote(ONE_TO_ALL)
    def rows_at(self, first: int, count: int) -> Batch:
        """So many draws, from draw number `first`."""
        return self._source.draw(first, count)

    @remote(ONE_TO_ALL)
    def described(self) -> RowsInfo:
        """Reads the training rows."""
        return RowsInfo(len(self._source), self._source.fingerprint(), self._source.notices)

    @remote(ONE_TO_ALL)
    def validation_described(self) -> tuple[int, Sequence[str]]:
        """How many validation rows there are, and what was left out of them."""
        source = self._validation
        return (0, []) if source is None else (len(source), source.notices)

    @remote(ONE_TO_ALL)
    def validation_rows(self) -> Batch:
        """The validation rows in their order. Their group ids are apart from training's."""
        assert self._validation is not None
        return self._validation.all(self.settings.config.data.validation_rows)

    _cursor = 0  # of the handle

    @cached_property
    def _source(self) -> PromptSource:
        config, given = self.settings.config, self.settings.rows
        return self._make(load_rows(config.data) if given is None else given, config.run.seed, 0, config.data.path)

    @cached_property
    def _validation(self) -> PromptSource | None:
        """None if there are no validation rows. Data without splits is itself the validation set of a driver that takes
        no steps."""
        config, given = self.settings.config.data, self.settings.validation_rows
        fallback = not self.settings.trains
        if given is None and config.validation_path is None and self.settings.rows is not None:
            given = self.settings.rows if fallback else None
        elif given is None:
            given = load_validation_rows(config, fallback)
        if given is None:
            return None
        return self._make(given, 0, VALIDATION_IDS, config.validation_path or config.path)

    @cached_property
    def _limit(self) -> PromptLimit:
        """The engine leaves out no prompt that fills its context: it would end the run at the step that draws it."""
        most, context = self.settings.config.data.max_prompt_tokens, self.settings.config.rollout.max_context_tokens
        if context is not None:
            return prompt_limit(most, context, "rollout.max_context_tokens")
        from ..workers.models.loading import load_config  # brings torch

        model = load_config(self.settings.config.model.path, self.settings.config.model)
        context = getattr(model, "max_position_embeddings", None)  # some models have no longest context
        return prompt_limit(most, context, "the model's max_position_embeddings")

    @cached_property
    def _tokenizer(self) -> Any:
        from ..workers.models.loading import load_tokenizer  # brings transformers

        return load_tokenizer(self.settings.config.model)

    def _make(self, rows: Sequence[Mapping[str, Any]], seed: int, first_id: int, name: str) -> PromptSource:
        data = self.settings.config.data
        return PromptSource(rows, self._tokenizer, data, seed=seed, first_id=first_id, name=name, limit=self._limit)


def check_given(config: Config, rows: GivenRows, validation_rows: GivenRows) -> None:
    """Errors: ConfigError for keys of data that rows in memory leave unread."""
    if rows is not None:
        refuse(config, ("data.split",), "rows in memory have no splits: leave it out.")
    if validation_rows is not None:
        unread = ("data.validation_path", "data.validation_split")
        refuse(config, unread, "the validation rows are given in memory: leave one of the two out.")
    elif rows is not None and config.data.validation_path is None:
        refuse(config, ("data.validation_split",), "rows in memory have no splits: set data.validation_path.")
