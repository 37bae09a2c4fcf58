"""Reference: a frozen model that only scores tokens; the policy that a KL penalty holds the actor to."""

from __future__ import annotations

from ..batch import Batch
from ..controller.protocols import THREE_D
from ..controller.worker import Worker, remote
from ..layout import ParallelLayout
from .engine_table import train_engine
from .settings import Settings
from .updates import SCORED, forward_column, only


class Reference(Worker[Settings]):
    """The actor's initial weights, or the model at reference.path. Not built when nothing asks for it."""

    role = "reference"

    @classmethod
    def arranged(cls, settings: Settings, ranks: int) -> ParallelLayout:
        return settings.training.fitted(ranks).layout(ranks)

    @property
    def off(self) -> bool:
        return self.settings.algorithm.kl == "none"

    def log_probs(self, batch: Batch, to: str = "ref_logprobs") -> Batch:
        """One forward pass into the column `to`; no column where the reference is off."""
        return type(batch)({}, batch.ids) if self.off else self.score_tokens(only(batch, SCORED), to)

    @remote(THREE_D)
    def score_tokens(self, batch: Batch, to: str) -> Batch:
        """`log_probs` on the ranks."""
        return forward_column(self._engine, batch, to)

    def start(self) -> None:
        if not self.off:
            self._engine = train_engine(self.settings, path=self.settings.reference_path, trainable=False)
