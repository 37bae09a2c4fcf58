"""Reward: scores rollouts with Python functions. The only writer of the column `reward`."""

from __future__ import annotations

from ..batch import Batch
from ..controller.protocols import DP
from ..controller.worker import Worker, remote
from .scoring import Scorer
from .settings import Settings


class Reward(Worker[Settings]):
    """The functions of reward.functions, weighted, with every component reward/* already in the batch."""

    role = "reward"
    needs_device = False

    @remote(DP)
    def score(self, batch: Batch) -> Batch:
        """Columns reward, reward/<function>, keep and drop_reason; a row whose scoring failed has keep = 0."""
        return self._scorer.score(batch)

    def start(self) -> None:
        self._scorer = Scorer(self.settings.reward_functions, self.settings.reward)

    def stop(self) -> None:
        self._scorer.close()
