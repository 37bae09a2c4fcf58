"""What rollout engines that decode in this process share: their requests, from `submit` to `completed`."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from ...batch import Batch
from ...columns import FinishReason
from ...device import current_device
from ...engines import RolloutEngine, Sampling
from ...errors import BatchError, ConfigError, EngineError
from .requests import Group, Rollout, Rules, StopRule, as_batch
from .sampling import stream_key


class EmbeddedRollout(RolloutEngine):
    """Requests that are decoded a token a step. A subclass decodes: it says when its weights are `_ready`, and puts
    rollouts whose `reason` is set into `_done`."""

    def __init__(self, tokenizer: Any, end_ids: set[int], *, context: int, vocabulary: int, seed: int) -> None:
        self._tokenizer, self._end_ids = tokenizer, end_ids
        self._context, self._vocabulary, self._seed = context, vocabulary, seed
        self._rules: dict[Sampling, Rules] = {}
        self._ready = False
        self._in_flight: Counter[int] = Counter()
        self._done: list[Rollout] = []

    def submit(self, prompts: Batch, sampling: Sampling) -> None:
        self._check_ready()
        ids, group_ids = prompts.ragged("prompt_ids"), prompts.array("group_id").tolist()
        self._check_prompts(ids.lengths.tolist(), group_ids)
        rules = self._rules_of(sampling)
        for prompt, group_id in zip(ids, group_ids, strict=True):
            limit = min(sampling.max_new_tokens, self._context - len(prompt))
            group = Group(group_id, prompt, rules, limit)
            for sample in range(sampling.n):
                key = stream_key(self._seed, group_id, sample)
                group.waiting.append(Rollout(group, sample, key, int(prompt[-1]), len(prompt) - 1))
            self._in_flight[group_id] = sampling.n
            self._enqueue(group)

    def completed(self) -> Iterator[Batch]:
        while self.pending:
            if not self._done:
                self._check_ready()
                self._step()
            if self._done:
                ended, self._done = self._done, []
                self._in_flight -= Counter(rollout.group.group_id for rollout in ended)
                yield as_batch(ended)

    def abort(self, group_ids: Iterable[int] | None = None) -> int:
        ended = self._unfinished(set(self._in_flight if group_ids is None else map(int, group_ids)))
        for rollout in ended:
            rollout.reason = FinishReason.ABORT
        self._end(ended)
        return len(ended)

    @property
    def pending(self) -> int:
        return self._in_flight.total()

    # ---- the decoding
    @abstractmethod
    def _enqueue(self, group: Group) -> None:
        """Take a group whose samples all wait."""

    @abstractmethod
    def _step(self) -> None:
        """One more token for some rollouts."""

    @abstractmethod
    def _unfinished(self, group_ids: set[int]) -> list[Rollout]:
        """Rollouts of these groups that have no `reason` yet."""

    @abstractmethod
    def _end(self, rollouts: Sequence[Rollout]) -> None:
        """Decode these, which have a `reason`, no further; they are `_done`."""

    # ---- checks and tables
    def _check_ready(self) -> None:
        if not self._ready:
            raise EngineError("the rollout engine has no complete set of weights: sync it before it samples.")

    def _check_prompts(self, lengths: list[int], group_ids: list[int]) -> None:
        seen: set[int] = set()
        for row, (length, group_id) in enumerate(zip(lengths, group_ids, strict=True)):
            if not length:
                raise BatchError(f"row {row} has an empty prompt; at least one token is needed to sample from.")
            if length >= self._context:
                raise BatchError(
                    f"row {row} has a prompt of {length} tokens, which leaves no room for a response in a context of "
                    f"{self._context} (rollout.max_context_tokens): shorten or drop it (data.max_prompt_tokens)."
                )
            if group_id in seen or group_id in self._in_flight:
                raise BatchError(
                    f"row {row}: group_id {group_id} is in flight already; ask for several samples with sampling.n, "
                    "not with repeated rows."
                )
            seen.add(group_id)

    def _rules_of(self, sampling: Sampling) -> Rules:
        outside = [token for token in sampling.banned_tokens if not 0 <= token < self._vocabulary]
        if outside:
            raise ConfigError(f"sampling.banned_tokens: {outside} are no tokens of a vocabulary of {self._vocabulary}.")
        if sampling not in self._rules:
            stop = StopRule(self._tokenizer, self._end_ids, sampling.stop)
            banned = torch.tensor(sampling.banned_tokens, dtype=torch.int64, device=current_device())
            self._rules[sampling] = Rules(sampling, stop, banned)
        return self._rules[sampling]


def end_ids(path: str, model_config: Any, tokenizer: Any) -> set[int]:
    """Ids that end a response: those of the generation configuration (none: the model's) and of the tokenizer."""
    try:
        named = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        named = model_config.eos_token_id
    ids = named if isinstance(named, list) else [named]
    return {token for token in (*ids, tokenizer.eos_token_id) if token is not None}
