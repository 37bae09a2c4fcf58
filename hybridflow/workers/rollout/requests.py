"""What a rollout engine keeps of each request: groups that wait, rollouts that grow, and what ends them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...batch import Batch
from ...columns import FinishReason, Ragged
from ...engines import Sampling

UTF8_CHARACTER_BYTES = 4


class StopRule:
    """Whether the newest token ends a response: it is a stop id, or completes a stop string."""

    def __init__(self, tokenizer: Any, end_ids: Iterable[int], stop: Sequence[str | int]) -> None:
        self._tokenizer = tokenizer
        self._ids = frozenset([*end_ids, *(s for s in stop if isinstance(s, int))])
        self._strings = tuple(s for s in stop if isinstance(s, str))
        # a token stands for a byte at least; the first tokens decoded may be the rest of a character
        self._tail = max((len(s.encode()) for s in self._strings), default=0) + UTF8_CHARACTER_BYTES

    def ends(self, ids: list[int]) -> bool:
        """Whether the last of `ids` ends the response `ids`. Only strings that it completes can be new."""
        if ids[-1] in self._ids:
            return True
        if not self._strings:
            return False
        text = self._tokenizer.decode(ids[-self._tail :], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in self._strings)


@dataclass(frozen=True, eq=False)
class Rules:
    """One Sampling, as the decode loop needs it: with its stop rule, and banned ids as an int64 tensor."""

    sampling: Sampling
    stop: StopRule
    banned: Any


@dataclass(eq=False, slots=True)
class Rollout:
    """One sample in flight. `position` is where its last token stands in the context, prompt included."""

    group: Group
    sample: int
    key: np.uint64
    last: int
    position: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: FinishReason | None = None

    def add(self, token: int, logprob: float, version: int) -> None:
        """The next token; sets `reason` if it is the last one."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.last = token
        self.position += 1
        if self.group.rules.stop.ends(self.ids):
            self.reason = FinishReason.STOP
        elif len(self.ids) >= self.group.limit:
            self.reason = FinishReason.LENGTH


@dataclass(eq=False, slots=True)
class Group:
    """The samples of one prompt. `limit`: most tokens of a response; `waiting`: samples not yet being decoded;
    `prefill`, `prefill_row`: the cache that holds the prompt, and where, until all samples are being decoded."""

    group_id: int
    prompt: NDArray[np.int64]
    rules: Rules
    limit: int
    waiting: list[Rollout] = field(default_factory=list)
    prefill: Any = None
    prefill_row: int = 0


def as_batch(rollouts: Sequence[Rollout]) -> Batch:
    """Ended rollouts as the rows that `completed` hands out."""
    ids = Ragged.from_rows([r.ids for r in rollouts], np.int64)
    return Batch(
        {
            "group_id": np.array([r.group.group_id for r in rollouts], np.int64),
            "sample": np.array([r.sample for r in rollouts], np.int64),
            "response_ids": ids,
            "response_mask": ids.with_values(np.ones(len(ids.values), np.bool_)),
            "rollout_logprobs": ids.with_values(_flat([r.logprobs for r in rollouts], np.float32)),
            "policy_version": ids.with_values(_flat([r.versions for r in rollouts], np.int32)),
            "finish_reason": np.array([r.reason for r in rollouts], np.int8),
        }
    )


def _flat(rows: Sequence[Sequence[float]], dtype: Any) -> NDArray[Any]:
    return np.array([value for row in rows for value in row], dtype)
