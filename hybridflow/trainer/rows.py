"""The rows of a run: one cursor over the training data, the validation rows, and how many steps an epoch has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..batch import Batch
from ..errors import ConfigError
from .config import Config
from .data import PromptSource, load_rows, load_validation_rows

VALIDATION_IDS = 1 << 40  # group ids of validation rows start here, far from any training draw

GivenRows = Sequence[Mapping[str, Any]] | None


class RunRows:
    """Draws training rows; state is the cursor. say: told what was left out or is missing, once."""

    def __init__(
        self, config: Config, tokenizer: Any, rows: GivenRows, validation_rows: GivenRows, say: Callable[[str], None]
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._given_validation = validation_rows
        self._in_memory = rows is not None
        self._say = say
        self._source = self._make(
            load_rows(config.data) if rows is None else rows, config.run.seed, 0, config.data.path
        )

    def draw(self, kind: str, n: int | None) -> Batch:
        """The next n rows (data.rows_per_step). Errors: ConfigError if the data holds rows of another kind."""
        have = self._config.data.kind
        if have != kind:
            raise ConfigError(
                f"the driver draws {kind}, but data.kind={have} (algorithm={self._config.algorithm.name} sets it): add "
                f"data.kind={kind} to its recipe."
            )
        return self._source.draw(n or self._config.data.rows_per_step)

    def validation(self) -> Batch | None:
        """The validation rows in their order, None if there are none. Their group ids are apart from training's."""
        config = self._config.data
        rows = self._given_validation
        if rows is None and (config.validation_path is not None or not self._in_memory):
            rows = load_validation_rows(config)
        if rows is None:
            return None
        return self._make(rows, 0, VALIDATION_IDS, config.validation_path or config.path).all(config.validation_rows)

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

    def _make(self, rows: Sequence[Mapping[str, Any]], seed: int, first_id: int, name: str) -> PromptSource:
        source = PromptSource(rows, self._tokenizer, self._config.data, seed=seed, first_id=first_id, name=name)
        for notice in source.notices:
            self._say(notice)
        return source
