"""The rows of a run: one cursor over the training data, the validation rows, and how many steps an epoch has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from ..batch import Batch
from ..errors import ConfigError
from .config import Config
from .data import PromptLimit, PromptSource, load_rows, load_validation_rows, prompt_limit
from .data_sources import has_splits
from .unread import refuse

VALIDATION_IDS = 1 << 40  # group ids of validation rows start here, far from any training draw

GivenRows = Sequence[Mapping[str, Any]] | None


class RunRows:
    """Draws training rows, which are read when first asked for; state is the cursor.

    rows, validation_rows: data in memory, in the place of data.path and data.validation_path. say: told what was left
    out or is missing, once. Errors: ConfigError for keys of data that rows in memory leave unread.
    """

    def __init__(
        self, config: Config, tokenizer: Any, rows: GivenRows, validation_rows: GivenRows, say: Callable[[str], None]
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._given = rows
        self._given_validation = validation_rows
        self._say = say
        if rows is not None:
            refuse(config, ("data.split",), "rows in memory have no splits: leave it out.")
        if validation_rows is not None:
            unread = ("data.validation_path", "data.validation_split")
            refuse(config, unread, "the validation rows are given in memory: leave one of the two out.")
        elif rows is not None and config.data.validation_path is None:
            refuse(config, ("data.validation_split",), "rows in memory have no splits: set data.validation_path.")

    def draw(self, kind: str, n: int | None) -> Batch:
        """The next n rows (data.rows_per_step). Errors: ConfigError if the data holds rows of another kind."""
        have = self._config.data.kind
        if have != kind:
            raise ConfigError(
                f"the driver draws {kind}, but data.kind={have} (algorithm={self._config.algorithm.name} sets it): add "
                f"data.kind={kind} to its recipe."
            )
        return self._source.draw(n or self._config.data.rows_per_step)

    def validation(self, fallback: bool = False) -> Batch | None:
        """The validation rows in their order, None if there are none. Their group ids are apart from training's.

        fallback: data without splits is itself the validation set (for a driver that takes no steps).
        """
        config, rows = self._config.data, self._given_validation
        if rows is None and config.validation_path is None and self._given is not None:
            rows = self._given if fallback else None
        elif rows is None:
            rows = load_validation_rows(config, fallback)
        if rows is None:
            return None
        return self._make(rows, 0, VALIDATION_IDS, config.validation_path or config.path).all(config.validation_rows)

    @property
    def no_validation(self) -> str:
        """Why there are no validation rows, and the remedy."""
        config = self._config.data
        if self._given is not None:
            return "rows in memory have no splits; give validation rows too, or set data.validation_path."
        if not has_splits(config.path):
            return f"data.path={config.path} has no splits; set data.validation_path."
        return (
            f"data.path={config.path} has no split '{config.validation_split}'; set data.validation_path or "
            "data.validation_split."
        )

    def steps_in(self, epochs: int) -> int:
        """Steps that go through the data `epochs` times; the last may reach into the next epoch."""
        return math.ceil(epochs * len(self._source) / self._config.data.rows_per_step)

    @property
    def epoch(self) -> float:
        """Epochs drawn so far."""
        return self._source.epoch

    @property
    def fingerprint(self) -> str:
        """Differs when the training data does."""
        return self._source.fingerprint()

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._source.load_state_dict(state)

    @cached_property
    def _source(self) -> PromptSource:
        config = self._config
        rows = load_rows(config.data) if self._given is None else self._given
        return self._make(rows, config.run.seed, 0, config.data.path)

    @cached_property
    def _limit(self) -> PromptLimit:
        """The engine leaves out no prompt that fills its context: it would end the run at the step that draws it."""
        most, context = self._config.data.max_prompt_tokens, self._config.rollout.max_context_tokens
        if context is not None:
            return prompt_limit(most, context, "rollout.max_context_tokens")
        from ..workers.models.loading import load_config  # brings torch

        model = load_config(self._config.model.path, self._config.model)
        context = getattr(model, "max_position_embeddings", None)  # some models have no longest context
        return prompt_limit(most, context, "the model's max_position_embeddings")

    def _make(self, rows: Sequence[Mapping[str, Any]], seed: int, first_id: int, name: str) -> PromptSource:
        source = PromptSource(
            rows, self._tokenizer, self._config.data, seed=seed, first_id=first_id, name=name, limit=self._limit
        )
        for notice in source.notices:
            self._say(notice)
        return source
