"""What the roles with a model of their own share: calls that read few columns, forward passes, updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..algorithms.objective import PairObjective, TokenObjective
from ..algorithms.registry import Loss
from ..batch import Batch, Metrics
from ..controller.batch_ref import PendingMetrics
from ..controller.protocols import ONE_TO_ALL, THREE_D, THREE_D_GROUPS, Protocol
from ..controller.worker import Worker, remote
from ..engines import TrainEngine
from ..layout import ParallelLayout
from .settings import Settings

LossLike = str | Loss | Callable[..., Any]
SCORED = ("prompt_ids", "response_ids", "response_mask", "keep", "group_id", "sample")
"""What a forward pass reads; the last two name a row in messages."""
SUMMED = ("tokens", "microbatches", "skipped")


def by_unit(learner: Learner, batch: Batch, loss: LossLike | None = None) -> Protocol:
    """Rows go to any rank, unless the loss compares those of a group: then a group goes to one."""
    return THREE_D_GROUPS if learner._objective(loss).unit == "group_id" else THREE_D


class Learner(Worker[Settings]):
    """A role that learns: an update is a loop over optimizer steps, in the driver.

    A subclass makes `_train` in `start`, and says with `_objective` what a loss means to its model.
    """

    reads: ClassVar[tuple[str, ...]] = SCORED
    """Columns that its model reads, beside those of the loss."""

    @classmethod
    def arranged(cls, settings: Settings, ranks: int) -> ParallelLayout:
        return settings.training.layout(ranks)

    # ---- driver
    def update(self, batch: Batch, loss: LossLike | None = None) -> Metrics:
        """algorithm.epochs x algorithm.minibatches optimizer steps: `step` on each of `batch.minibatches`.

        Ends early after a step whose `kl_old` is over algorithm.kl_stop. Rows with keep = 0 take no part.
        """
        algorithm, objective = self.settings.algorithm, self._objective(loss)
        read = only(batch, (*self.reads, "rollout_id", *objective.columns))
        kept = read.kept().drop("keep") if "keep" in read else read
        seed = [self.settings.seed, self._updates]
        self._updates += 1
        parts: list[Metrics] = []
        for minibatch in kept.minibatches(algorithm.minibatches, algorithm.epochs, seed, objective.unit):
            parts.append(self.step(minibatch, loss))
            if algorithm.kl_stop is not None and parts[-1].get(f"{self.name}/kl_old", 0.0) > algorithm.kl_stop:
                break
        stopped = algorithm.epochs * algorithm.minibatches - len(parts)
        steps = {f"{self.name}/steps": float(len(parts)), f"{self.name}/steps_stopped": float(stopped)}
        return PendingMetrics(lambda: {**_combined(parts), **steps})

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._updates = state["updates"]

    # ---- ranks
    @remote(by_unit)
    def step(self, batch: Batch, loss: LossLike | None = None) -> Metrics:
        """One optimizer step on all kept rows of the batch."""
        metrics = self._train.step(self._own(batch.kept()), self._objective(loss))
        return {f"{self.name}/{name}": value for name, value in metrics.items()}

    @remote(by_unit)
    def evaluate(self, batch: Batch, loss: LossLike) -> Batch:
        """Dense column `loss`: the mean loss of each row's learned tokens, without a step."""
        return self._train.evaluate(self._own(batch), self._objective(loss))

    @remote(ONE_TO_ALL)
    def export(self, folder: Path) -> None:
        """A Hugging Face folder with the present weights."""
        self._train.export(folder)

    def save_rank(self, folder: Path) -> None:
        self._train.save(folder)

    def load_rank(self, folder: Path) -> None:
        self._train.load(folder)

    def _objective(self, loss: LossLike | None) -> TokenObjective | PairObjective:
        """What a step minimises for this loss; None: the configured one."""
        raise NotImplementedError

    def _own(self, batch: Batch) -> Batch:
        """Rows of a batch as the role's engine takes them."""
        return batch

    _train: TrainEngine
    _updates = 0  # of the handle: begun in this run


def loss_of(given: LossLike | None, configured: Loss) -> Loss:
    """The loss that a call means."""
    return configured if given is None else given if isinstance(given, Loss) else Loss(given)


def only(batch: Batch, names: Iterable[str]) -> Batch:
    """The columns there are of these: what a call does not read need not be said to it."""
    return batch.select(*(name for name in dict.fromkeys(names) if name in batch))


def kept_rows(batch: Batch) -> NDArray[np.bool_]:
    """keep of each row; all, if there is no such column."""
    return np.array(batch.array("keep")) if "keep" in batch else np.ones(len(batch), np.bool_)


def forward_column(engine: TrainEngine, batch: Batch, to: str, output: str = "logprobs") -> Batch:
    """An output of the engine, one a response token, of a batch's kept rows as column `to`; other rows get zeros and
    cost nothing."""
    responses, kept = batch.ragged("response_ids"), kept_rows(batch)
    values = np.zeros(len(responses.values), np.float32)
    of_kept = engine.forward(batch.take(np.flatnonzero(kept)), [output])
    values[np.repeat(kept, responses.lengths)] = of_kept.ragged(output).values
    return Batch({to: responses.with_values(values)}, batch.ids)


def _combined(parts: Sequence[Metrics]) -> dict[str, float]:
    """Metrics of several optimizer steps as one: counts add up, the rest is averaged."""
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        out[name] = sum(values) if name.rpartition("/")[2] in SUMMED else sum(values) / len(values)
    return out
