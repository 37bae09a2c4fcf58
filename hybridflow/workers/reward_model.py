"""RewardModel: a language model with one score a row. It scores rollouts, and learns from pairs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ..algorithms.objective import PairObjective, head_of
from ..batch import Batch, Metrics
from ..columns import Kind, Ragged, kind_of, objects
from ..controller.protocols import THREE_D, THREE_D_GROUPS
from ..controller.worker import remote
from ..errors import RewardError
from ..layout import ParallelLayout
from .engine_table import train_engine
from .models.config import ModelConfig
from .models.rendering import MESSAGES, Renderer
from .settings import Settings
from .updates import SCORED, Learner, LossLike, kept_rows, loss_of, only

TEMPLATE_REMEDY = "Save one with the tokenizer at reward.model."


class RewardModel(Learner):
    """The model at reward.model, else the one at model.path: with a new head, if it is a language model and learns.

    Where its tokenizer is another than the policy's it reads text: prompt and response under its own chat template.
    """

    role = "reward_model"
    reads = (*SCORED, "prompt", MESSAGES, "response")

    @classmethod
    def arranged(cls, settings: Settings, ranks: int) -> ParallelLayout:
        learns = head_of(settings.loss) == "score" and settings.trains
        training = settings.training if learns else settings.training.fitted(ranks)
        return training.layout(ranks)

    # ---- driver
    @property
    def off(self) -> bool:
        return self.settings.reward.model is None and not self._learns

    def score(self, batch: Batch) -> Batch:
        """Columns reward/model, keep and drop_reason; a row whose score is NaN or infinite is in error, has keep = 0.
        No column where nothing asks for the model.

        Errors: RewardError for errors in more than reward.max_error_fraction of the rows.
        """
        return type(batch)({}, batch.ids) if self.off else self.score_rows(only(batch, self.reads))

    # ---- ranks
    @remote(THREE_D)
    def score_rows(self, batch: Batch) -> Batch:
        """`score` on the ranks."""
        keep = kept_rows(batch)
        scores = np.full(len(batch), np.nan, np.float32)
        scores[keep] = self._scores(batch.take(keep))
        failed = keep & ~np.isfinite(scores)
        scores[failed] = np.nan
        metrics = self._measured(scores[keep & ~failed], int(failed.sum()))
        reasons = objects("reward model: the score is not a number" if bad else None for bad in failed)
        columns = {"reward/model": scores, "keep": keep & ~failed, "drop_reason": reasons}
        return Batch(columns, batch.ids, metrics)

    @remote(THREE_D_GROUPS)
    def step(self, batch: Batch, loss: LossLike | None = None) -> Metrics:
        """One optimizer step on all pairs of which both rows are kept."""
        return super().step(batch, loss)

    @remote(THREE_D_GROUPS)
    def evaluate(self, batch: Batch, loss: LossLike) -> Batch:
        """Dense columns `loss` and the loss's metrics, such as `accuracy`, of each row's pair, without a step; NaN on
        rows of pairs that are not whole."""
        objective = self._objective(loss)
        row_of_token = np.repeat(np.arange(len(batch)), batch.lengths("response_ids"))
        compared = np.bincount(row_of_token, objective.weights(batch), len(batch)) > 0
        rows = batch.take(compared)
        scored = only(rows, objective.columns).to_torch() | Batch({"score": self._scores(rows)}).to_torch()
        losses, metrics = objective.of_rows(scored)
        columns = {}
        for name, values in {"loss": losses, **metrics}.items():
            columns[name] = np.full(len(batch), np.nan, np.float32)
            columns[name][compared] = values.numpy()
        return Batch(columns, batch.ids)

    def start(self) -> None:
        from .models.loading import load_tokenizer  # brings torch and transformers
        from .models.value_head import check_is_reward_model, same_vocabulary

        settings, model, trainable = self.settings, self._model, self._learns and self.settings.trains
        if not trainable:
            check_is_reward_model(model.path, model)
        own, policys = load_tokenizer(model), load_tokenizer(settings.model)
        same = same_vocabulary(own, policys) and own.chat_template == policys.chat_template
        self._renderer = None if same else Renderer(own, remedy=TEMPLATE_REMEDY)
        self._train = train_engine(settings, head="score", model=model, trainable=trainable)

    def save_rank(self, folder: Path) -> None:
        if self._learns:
            super().save_rank(folder)

    def load_rank(self, folder: Path) -> None:
        if self._learns:
            super().load_rank(folder)

    @property
    def _learns(self) -> bool:
        """Whether the configured loss is one of scores."""
        return head_of(self.settings.loss) == "score"

    @property
    def _model(self) -> ModelConfig:
        path = self.settings.reward.model
        if path is None:
            return self.settings.model
        return replace(self.settings.model, path=path, tokenizer=None, chat_template=None)

    def _scores(self, rows: Batch) -> np.ndarray:
        return self._train.forward(self._own(rows), ["score"]).array("score")

    def _objective(self, loss: LossLike | None) -> PairObjective:
        settings = self.settings
        return PairObjective(loss_of(loss, settings.loss), settings.algorithm, settings.sampling.max_new_tokens)

    def _own(self, batch: Batch) -> Batch:
        """In its own tokens: the batch's, or those of its text."""
        renderer = self._renderer
        if renderer is None:
            return batch
        prompts = batch.array(MESSAGES if MESSAGES in batch else "prompt").tolist()
        texts = [renderer.prompt(prompt, f"row {i}") for i, prompt in enumerate(prompts)]
        answers = [
            renderer.response(prompt, text, response, f"row {i}")
            for i, (prompt, text, response) in enumerate(zip(prompts, texts, batch.array("response"), strict=True))
        ]
        responses = Ragged.from_rows(renderer.response_tokens(answers), np.int64)
        tokens = {
            "prompt_ids": Ragged.from_rows(renderer.prompt_tokens(texts), np.int64),
            "response_ids": responses,
            "response_mask": responses.with_values(np.ones(len(responses.values), np.bool_)),
        }
        dense = batch.select(*(name for name in batch.names if kind_of(batch.column(name)) is Kind.DENSE))
        return dense | Batch(tokens, batch.ids)

    def _measured(self, scores: np.ndarray, errors: int) -> Metrics:
        """Mean and count of errors over all ranks. Errors: RewardError if there are too many."""
        own = {"score": float(scores.sum(dtype=np.float64)), "rows": float(len(scores)), "errors": float(errors)}
        totals, most = self._train.totals(own, {}), self.settings.reward.max_error_fraction
        rows = totals["rows"] + totals["errors"]
        if totals["errors"] > most * rows:
            raise RewardError(
                f"the reward model's score of {totals['errors']:.0f} of {rows:.0f} rows is not a number; "
                f"reward.max_error_fraction={most:g} allows {int(most * rows)}. Set training.precision=fp32, or give "
                "another reward.model."
            )
        mean = {f"{self.name}/score": totals["score"] / totals["rows"]} if totals["rows"] else {}
        return {**mean, f"{self.name}/errors": totals["errors"]}
