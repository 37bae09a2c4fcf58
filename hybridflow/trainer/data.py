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
from ..workers.models.rendering import MESSAGES, Renderer
from .data_config import DataConfig
from .data_rows import RESPONSES, own_columns, prepared_rows
from .data_sources import Row, SplitError, has_splits, read_rows
from .data_text import shown_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROW_KINDS = {"prompts": RowKind.PROMPT, "examples": RowKind.EXAMPLE, "pairs": RowKind.PAIR}
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
    """Endless draws from rows, numbered over all epochs. Draw k depends on (rows, seed, k) alone.

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
        self._kind, self._answers = ROW_KINDS[config.kind], RESPONSES[config.kind]
        self._shuffle, self._seed, self._first_id = config.shuffle, seed, first_id
        self._order = -1, np.arange(0)
        renderer = Renderer(tokenizer, config.system_prompt)
        self._table = self._tokenised(prepared_rows(rows, config, self.name), renderer, config)

    def __len__(self) -> int:
        """Usable rows of the data: an epoch."""
        return len(self._table) // self._width

    def draw(self, first: int, n: int) -> Batch:
        """n draws from number `first`; the end of an epoch may lie anywhere among them.

        Columns: prompt_ids, group_id (number of the draw), prompt (text), source, the data's own columns, and
        prompt_messages where prompts are chat messages or data.system_prompt is set; of examples and pairs also
        response_ids (the end of the turn included) and response_mask. A pair is two rows, the chosen one first, with
        response (text), chosen and, where the data has it, margin.
        """
        position = first + np.arange(n)
        epochs, within = np.divmod(position, len(self))
        index = np.empty(n, np.int64)
        for epoch in np.unique(epochs):
            index[epochs == epoch] = self._order_of(int(epoch))[within[epochs == epoch]]
        return self._batch(index, self._first_id + position)

    def all(self, limit: int | None = None) -> Batch:
        """The first `limit` rows (all, if None) in the data's order, for validation."""
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

    def _batch(self, index: NDArray[np.int64], group_id: NDArray[np.int64]) -> Batch:
        within = np.arange(self._width)
        rows = self._table.take((index[:, None] * self._width + within).ravel())
        columns = {name: rows.column(name) for name in rows.names}
        numbers = (group_id[:, None] * self._width + within).ravel()
        return Batch({**columns, "group_id": np.repeat(group_id, self._width)}, row_ids(self._kind, numbers))

    @property
    def _width(self) -> int:
        """Rows of the table that one row of the data makes."""
        return max(1, len(self._answers))

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
        answers = [[row.pop(key) for key in self._answers] for row in rows]
        columns: dict[str, Any] = {"prompt_ids": Ragged.from_rows(tokens, np.int64)}
        columns["prompt"] = objects(map(shown_prompt, prompts))
        columns["source"] = objects(str(row.pop("source")) for row in rows)
        if config.system_prompt is not None or not all(isinstance(prompt, str) for prompt in prompts):
            columns[MESSAGES] = objects(map(renderer.messages, prompts))
        if self._kind is RowKind.PAIR and "margin" in rows[0]:
            columns["margin"] = np.array([row.pop("margin") for row in rows], np.float32)
        own, notices = own_columns(rows, self.name)
        self.notices += notices
        table = Batch({**columns, **own})
        if not self._answers:
            return table
        rendered = [
            renderer.response(prompt, texts[i], answer, self._where(i))
            for i, prompt, given in zip(usable, prompts, answers, strict=True)
            for answer in given
        ]
        return table.take(np.repeat(np.arange(len(table)), self._width)) | self._responses(rendered, answers, renderer)

    def _responses(self, rendered: Sequence[str], answers: Sequence[Sequence[str]], renderer: Renderer) -> Batch:
        """Columns of the responses, of all rows of the table."""
        responses = Ragged.from_rows(renderer.response_tokens(rendered), np.int64)
        columns: dict[str, Any] = {
            "response_ids": responses,
            "response_mask": responses.with_values(np.ones(len(responses.values), bool)),
        }
        if self._kind is RowKind.PAIR:
            columns["response"] = objects(answer for given in answers for answer in given)
            columns["chosen"] = np.tile([True, False], len(answers))
        return Batch(columns)

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
