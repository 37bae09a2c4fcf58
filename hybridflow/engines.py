"""The contracts of the two kinds of engine. Everything above them speaks of these types and names no engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .batch import Batch, concat
from .errors import BatchError, ConfigError

if TYPE_CHECKING:
    import torch

    from .batch import Metrics


SAMPLING_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda n: n >= 1, "at least 1"),
    "temperature": (lambda t: t >= 0, "at least 0"),
    "max_new_tokens": (lambda n: n >= 1, "at least 1"),
    "top_p": (lambda p: 0 < p <= 1, "above 0 and at most 1 (1 = all tokens)"),
    "min_p": (lambda p: 0 <= p <= 1, "between 0 (all tokens) and 1"),
    "top_k": (lambda k: k >= 1 or k == -1, "at least 1, or -1 for all tokens"),
    "banned_tokens": (lambda ids: all(i >= 0 for i in ids), "a list of token ids, which are 0 or more"),
    "stop": (lambda ends: "" not in ends, "without an empty string, which would end every response at once"),
}


def check_sampling(values: Any, where: str) -> None:
    """Errors: ConfigError for the first value outside its range. values: has the fields of `Sampling`."""
    for name, (is_legal, legal) in SAMPLING_RANGES.items():
        value = getattr(values, name)
        if not is_legal(value):
            raise ConfigError(f"{where}.{name}={value}: it is {legal}.")


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    n: samples per prompt, from 1. temperature: 0 is greedy. top_p: in (0, 1], 1 is off. top_k: from 1, -1 is off.
    min_p: in [0, 1], 0 is off. max_new_tokens: sampled tokens of one turn, from 1. stop: strings (not empty) or token
    ids that end a response and are part of it. banned_tokens: ids never sampled. fresh: bring the engine's weights up
    to date first. Errors: ConfigError for a value outside its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int = 512
    stop: tuple[str | int, ...] = ()
    banned_tokens: tuple[int, ...] = ()
    fresh: bool = True

    def __post_init__(self) -> None:
        check_sampling(self, "Sampling")

    def greedy(self) -> Sampling:
        """One sample, the most probable token each time."""
        return replace(self, n=1, temperature=0.0)


@dataclass(frozen=True)
class ParameterShard:
    """The part of one parameter that a rank holds.

    name: as in a checkpoint on disk. shape: of the whole parameter. offset: where `tensor` starts in it, per dimension.
    received: bytes of `tensor` that came from other ranks.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: torch.Tensor
    received: int = 0


class Objective(Protocol):
    """What an optimizer step minimises: a per-unit loss over what a forward gives and the columns it names."""

    @property
    def outputs(self) -> frozenset[str]:
        """Forward outputs it reads, of those that the engine's head has."""

    @property
    def differentiable(self) -> frozenset[str]:
        """Of `outputs`, those that need a gradient."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the batch it reads, beside the outputs. Missing optional ones are left out."""

    @property
    def unit(self) -> str:
        """The column whose equal values must stay together: rollout_id, or group_id for losses over groups."""

    def weights(self, batch: Batch) -> np.ndarray:
        """float64 weight of each response token [T] (0 = not learned from), by the aggregation mode, so that the loss
        of the whole batch is the sum over tokens of weight x per-token loss."""

    def __call__(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(loss [T], metrics: name -> [T] detached) of the response tokens of some rows of the batch."""


class TrainEngine(ABC):
    """A model that learns. Rows are packed without padding; results do not depend on how they are cut or placed.

    Its head says what a forward gives: lm (logprobs, entropy) and value (values) one number a response token, score one
    a row.
    """

    @property
    @abstractmethod
    def compute_dtype(self) -> torch.dtype:
        """The dtype its matrix products run in; rollouts use the same."""

    @abstractmethod
    def forward(self, batch: Batch, outputs: Sequence[str]) -> Batch:
        """A column per name in `outputs`, no gradient: ragged and aligned with response_ids, logprobs and entropy under
        the sampling temperature; the score dense. Errors: EngineError if a token's number is NaN; a score may be."""

    @abstractmethod
    def step(self, batch: Batch, objective: Objective) -> Metrics:
        """One optimizer step on all rows of the batch. A batch without a weighted token skips it (metric `skipped`)."""

    @abstractmethod
    def evaluate(self, batch: Batch, objective: Objective) -> Batch:
        """Dense column `loss`: per row the mean of the per-token loss over learned tokens. No step."""

    @abstractmethod
    def totals(self, sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
        """Sums and maxima by name over the rows of all ranks, each row once, from those of every rank's own rows. All
        ranks make this call; so what they compute from the result is of the whole batch and the same on each."""

    @abstractmethod
    def parameters(self, whole: bool = False) -> Iterator[ParameterShard]:
        """What this rank holds of each parameter, under checkpoint names; the tensors are live, not copies.

        whole: every parameter whole, one after the other, in `compute_dtype` where it is gathered from several ranks,
        which is a copy; all ranks make this call and go through all of it.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Weights, optimizer and scheduler, complete on disk when it returns."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Errors: CheckpointError."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """A Hugging Face folder with the present weights and the tokenizer; `from_pretrained` reads it."""


class RolloutEngine(ABC):
    """A service that samples. Requests are keyed by (group_id, sample); a group_id may be in flight once.

    Each sample's random numbers depend on (seed, group_id, sample) and the token's position in the context alone.
    """

    version: int = 0
    """Number of syncs that changed something; every sampled token carries it."""
    received_bytes: int = 0
    """Bytes of weights that came from other ranks for the last sync."""

    @abstractmethod
    def submit(self, prompts: Batch, sampling: Sampling) -> None:
        """Queue sampling.n rollouts for each row of `prompts` (columns prompt_ids, group_id)."""

    @abstractmethod
    def completed(self) -> Iterator[Batch]:
        """Finished rollouts as they finish, until none is pending. Columns: group_id, sample, response_ids,
        response_mask, rollout_logprobs, policy_version, finish_reason."""

    @abstractmethod
    def abort(self, group_ids: Iterable[int] | None = None) -> int:
        """Ends these groups' rollouts (all, if None); what was sampled comes out of `completed` with finish_reason
        ABORT. Returns how many rollouts were ended."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Rollouts submitted and not yet handed out."""

    @abstractmethod
    def sync(self, shards: Iterable[ParameterShard], version: int) -> None:
        """Take over these weights as `version`. Errors: EngineError naming a missing, unknown or misshapen parameter;
        the engine then refuses to sample until a sync succeeds."""

    @abstractmethod
    def release(self) -> None:
        """Gives up the weights, and the memory of those that are copies, for training to go on in it. The engine
        refuses to sample until the next sync; what is in flight waits."""

    def generate(self, prompts: Batch, sampling: Sampling, progress: Callable[[int, int], None] | None = None) -> Batch:
        """Submit and drain: rollouts by prompt row, then sample. `progress(done, total)` is called as they end."""
        if not len(prompts):
            raise BatchError("generate: there are no prompts.")
        if self.pending:
            raise BatchError("generate: the engine has requests in flight; drain completed() first.")
        self.submit(prompts, sampling)
        parts: list[Batch] = []
        done, total = 0, self.pending
        for part in self.completed():
            parts.append(part)
            done += len(part)
            if progress is not None:
                progress(done, total)
        rows = concat(parts)
        position = {int(group): i for i, group in enumerate(prompts.array("group_id"))}
        key = [position[int(group)] * sampling.n for group in rows.array("group_id")] + rows.array("sample")
        return rows.take(np.argsort(key))
