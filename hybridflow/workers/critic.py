"""Critic: says how much reward is still to come. Trained beside the policy, on the returns that it got."""

from __future__ import annotations

from dataclasses import replace

from ..algorithms.objective import TokenObjective
from ..algorithms.registry import Loss
from ..batch import Batch
from ..controller.protocols import THREE_D
from ..controller.worker import remote
from ..errors import ModelError
from ..layout import ParallelLayout
from .engine_table import train_engine
from .settings import Settings
from .updates import SCORED, Learner, LossLike, forward_column, loss_of, only


class Critic(Learner):
    """The actor's model, or the one at critic.path, with a head of one number; it trains under critic.training."""

    role = "critic"
    reads = (*SCORED, "values")

    @classmethod
    def arranged(cls, settings: Settings, ranks: int) -> ParallelLayout:
        return settings.critic_training.layout(ranks, "critic.training")

    def values(self, batch: Batch) -> Batch:
        """Column values, of the state before each response token; 0 for tokens that were not sampled, and on rows with
        keep = 0."""
        return self.estimate(only(batch, SCORED))

    @remote(THREE_D)
    def estimate(self, batch: Batch) -> Batch:
        """`values` on the ranks."""
        return forward_column(self._train, batch, "values", "values")

    def start(self) -> None:
        settings = self.settings
        if settings.critic_path is not None:
            self._check_vocabulary(settings.critic_path)
        self._train = train_engine(
            settings,
            head="value",
            model=replace(settings.model, freeze=[]),
            path=settings.critic_path,
            training=settings.critic_training,
            trainable=settings.trains,
        )

    def _objective(self, loss: LossLike | None) -> TokenObjective:
        settings = self.settings
        chosen = loss_of(loss, Loss("value_clip", clip_value=settings.clip_value))
        return TokenObjective(chosen, settings.algorithm, settings.sampling.max_new_tokens, "value")

    def _own(self, batch: Batch) -> Batch:
        """Values that the batch brings are those of the critic that the returns were made with."""
        return batch.rename(old_values="values") if "values" in batch else batch

    def _check_vocabulary(self, path: str) -> None:
        """Errors: ModelError if the tokens of the policy mean something else to the critic."""
        from .models.loading import load_tokenizer
        from .models.value_head import same_vocabulary

        model = self.settings.model
        if not same_vocabulary(load_tokenizer(model), load_tokenizer(replace(model, path=path, tokenizer=None))):
            raise ModelError(
                f"critic.path={path}: its tokenizer is another than the policy's, whose tokens it would have to read. "
                "Give a model with the policy's tokenizer, or null for the policy's own model."
            )
