"""Rows of data as batches: tokenised once, then drawn for ever in an order that the seed alone gives."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..batch import Batch, RowKind, row_ids
from ..columns import Ragged, objects
from ..errors import DataError
from .data_config import DataConfig
from .data_rows import own_columns, prepared_rows
from .data_sources import Row, SplitError, has_splits, read_rows
from .data_text import Renderer, shown_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROW_KINDS = {"prompts": RowKind.PROMPT, "examples": RowKind.EXAMPLE}
LONG_ROWS_SHOWN = 5


def load_rows(config: DataConfig) -> list[Row]:
    """The training rows of data.path, as the source has them. Errors: as `read_rows`."""
    return read_rows(config.path, config.split, config.task)


def load_validation_rows(config: DataConfig, fallback: bool = False) -> list[Row] | None:
    """The rows of data.validation_path, else of data.validation_split of data.path; None if that has no such split.

    fallback: data.path itself is meant where it has no splits.
    """
    if config.validation_path is not None:
        task = config.task if config.validation_path.startswith("reasoning_gym:") else {}
        return read_rows(config.validation_path, config.validation_split, task)
    if not has_splits(config.path):
        return load_rows(config) if fallback else None
    try:
        return read_rows(config.path, config.validation_split, config.task)
    except SplitError:
        if config.validation_split != DataConfig.validation_split:
            raise  # asked for by name
        return None


class PromptLimit(NamedTuple):
    """Most tokens of a prompt. name: what sets it, as it follows `longer than`; remedy: how to have more."""

    tokens: int
    name: str
    remedy: str


def prompt_limit(max_prompt_tokens: int, context: int | None = None, context_name: str = "") -> PromptLimit:
    """data.max_prompt_tokens, or what a context of so many tokens leaves beside one of the response, if that is less.

    context: prompt and response together; None: nothing is known of it. context_name: what sets it.
    """
    if context is None or max_prompt_tokens < context:
        return PromptLimit(max_prompt_tokens, f"data.max_prompt_tokens={max_prompt_tokens}", "Raise it")
    return PromptLimit(context - 1, f"{context_name}={context} leaves room for", "Give them a longer context")


class PromptSource:
    """Endless draws from rows, one cursor over all epochs. Draw k depends on (rows, seed, k) alone.

    rows: dicts, or a `datasets` Dataset; data.format, chat template and tokenizer are applied when the source is made.
    first_id: the first draw's group_id. name: what messages call the data; None = data.path. limit: of a prompt; None =
    data.max_prompt_tokens.
    notices: what was left out or is missing, for the user to see once. Errors: DataError for rows that cannot be used.
    """

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        *,
        seed: int,
        first_id: int = 0,
        name: str | None = None,
        limit: PromptLimit | None = None,
    ) -> None:
        self.name = name or config.path
        self._limit = limit or prompt_limit(config.max_prompt_tokens)
        self.notices: list[str] = []
        self._kind = ROW_KINDS[config.kind]
        self._shuffle, self._seed, self._first_id = config.shuffle, seed, first_id
        self._cursor = 0
        self._order = -1, np.arange(0)
        renderer = Renderer(tokenizer, config.system_prompt)
        self._table = self._tokenised(prepared_rows(rows, config, self.name), renderer, config)

    def __len__(self) -> int:
        """Usable rows: an epoch."""
        return len(self._table)

    @property
    def epoch(self) -> float:
        """Epochs drawn so far."""
        return self._cursor / len(self)

    def draw(self, n: int) -> Batch:
        """The next n rows; the end of an epoch may lie anywhere among them.

        Columns: prompt_ids, group_id (number of the draw), prompt (text), source, the data's own columns; of examples
        also response_ids (the end of the turn included) and response_mask.
        """
        position = self._cursor + np.arange(n)
        epochs, within = np.divmod(position, len(self))
        index = np.empty(n, np.int64)
        for epoch in np.unique(epochs):
            index[epochs == epoch] = self._order_of(int(epoch))[within[epochs == epoch]]
        self._cursor += n
        return self._batch(index, self._first_id + position)

    def all(self, limit: int | None = None) -> Batch:
        """The first `limit` rows (all, if None) in the data's order, for validation; the cursor stays where it is."""
        index = np.arange(len(self))[:limit]
        return self._batch(index, self._first_id + index)

    def fingerprint(self) -> str:
        """A hash of all that is drawn from: other data, format, template or tokenizer give another."""
        digest = hashlib.blake2b(digest_size=16)
        for name in self._table.names:
            column = self._table.column(name)
            digest.update(name.encode())
            if isinstance(column, Ragged):
                digest.update(column.lengths.tobytes())
                digest.update(column.values.tobytes())
            else:
                digest.update(json.dumps(column.tolist(), default=_type_name, sort_keys=True).encode())
        return digest.hexdigest()

    def state_dict(self) -> dict[str, int]:
        return {"cursor": self._cursor}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._cursor = state["cursor"]

    def _batch(self, index: NDArray[np.int64], group_id: NDArray[np.int64]) -> Batch:
        rows = self._table.take(index)
        columns = {name: rows.column(name) for name in rows.names}
        return Batch({**columns, "group_id": group_id}, row_ids(self._kind, group_id))

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if self._order[0] != epoch:
            rows = np.arange(len(self))
            order = np.random.default_rng([self._seed, epoch]).permutation(rows) if self._shuffle else rows
            self._order = epoch, order
        return self._order[1]

    def _tokenised(self, rows: list[Row], renderer: Renderer, config: DataConfig) -> Batch:
        """The table of usable rows, without group ids."""
        texts = [renderer.prompt(row["prompt"], self._where(i)) for i, row in enumerate(rows)]
        tokens = renderer.prompt_tokens(texts)
        usable = self._usable(tokens, config)
        rows, tokens = [rows[i] for i in usable], [tokens[i] for i in usable]
        prompts = [row.pop("prompt") for row in rows]
        columns: dict[str, Any] = {"prompt_ids": Ragged.from_rows(tokens, np.int64)}
        if self._kind is RowKind.EXAMPLE:
            answers = [
                renderer.response(prompt, texts[i], row.pop("response"), self._where(i))
                for i, prompt, row in zip(usable, prompts, rows, strict=True)
            ]
            responses = Ragged.from_rows(renderer.response_tokens(answers), np.int64)
            columns["response_ids"] = responses
            columns["response_mask"] = responses.with_values(np.ones(len(responses.values), bool))
        columns["prompt"] = objects(map(shown_prompt, prompts))
        columns["source"] = objects(str(row.pop("source")) for row in rows)
        own, notices = own_columns(rows, self.name)
        self.notices += notices
        return Batch({**columns, **own})

    def _usable(self, tokens: Sequence[Sequence[int]], config: DataConfig) -> list[int]:
        """Rows whose prompt is neither empty, which is an error, nor too long."""
        limit = self._limit
        empty = [i for i, ids in enumerate(tokens) if not ids]
        long = [i for i, ids in enumerate(tokens) if len(ids) > limit.tokens]
        if empty:
            raise DataError(f"{self._where(empty[0])}: the prompt is empty.")
        said = f"{len(long)} of {len(tokens)} prompts are longer than {limit.name}"
        if len(long) == len(tokens) or (long and config.overlong_prompt == "error"):
            shown = ", ".join(f"row {i + 1} has {len(tokens[i])} tokens" for i in long[:LONG_ROWS_SHOWN])
            drop = "" if len(long) == len(tokens) else "leave them out with data.overlong_prompt=drop, "
            raise DataError(f"{self.name}: {said}: {shown}. {limit.remedy}, {drop}or shorten them in data.format.")
        if long:
            self.notices.append(f"{self.name}: {said} and were left out")
        return sorted(set(range(len(tokens))) - set(long))

    def _where(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"


def _type_name(value: Any) -> str:
    return type(value).__name__
