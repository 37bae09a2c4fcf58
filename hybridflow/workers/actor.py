"""Actor: the policy. It trains under `training` and samples under `rollout`, on the same devices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..algorithms.objective import PolicyObjective
from ..batch import Batch, Metrics, RowKind, row_ids
from ..columns import FinishReason, Ragged, objects
from ..controller.batch_ref import BatchRef
from ..controller.protocols import DP, ONE_TO_ALL, THREE_D
from ..controller.worker import remote
from ..engines import RolloutEngine, Sampling, TrainEngine
from ..errors import BatchError, EngineError
from .engine_table import rollout_engine, train_engine
from .updates import SCORED, Learner, LossLike, by_unit, forward_column, kept_rows, loss_of, only

FIRST = "first_rollout"


class Actor(Learner):
    """The policy: generate, log_probs, update."""

    role = "actor"

    # ---- driver: what a call means, in terms of calls to the ranks
    def generate(self, prompts: Batch, sampling: Sampling) -> Batch:
        """sampling.n rollouts per prompt; all prompt columns are carried, in prompt order, then by `sample`.

        Syncs the weights first if sampling.fresh. A rollout the engine could not finish has keep = 0.
        """
        if not len(prompts):
            raise BatchError("generate: there are no prompts.")
        if sampling.fresh:
            self.sync()
        first, n = self._rollouts, sampling.n
        self._rollouts += len(prompts) * n
        numbers = Batch({FIRST: first + n * np.arange(len(prompts))}, prompts.ids)
        rollouts = self.sample(prompts | numbers, sampling)
        return BatchRef.pending(lambda: rollouts.with_metrics(self._measured(rollouts)))

    def old_log_probs(self, batch: Batch) -> Batch:
        """Column old_logprobs as algorithm.old_policy says: recompute (a forward pass), rollout (the engine's own, no
        pass), current (no column: the loss takes the current ones, detached). No column either where neither the loss
        nor KL in the reward reads it."""
        policy = self.settings.algorithm.old_policy
        if policy == "current" or not self.settings.reads_old_logprobs:
            return type(batch)({}, batch.ids)
        if policy == "rollout":
            return batch.select("rollout_logprobs").rename(old_logprobs="rollout_logprobs")
        return self.log_probs(batch, "old_logprobs")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rollouts": self._rollouts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._rollouts = state["rollouts"]

    # ---- ranks
    @remote(DP)
    def sample(self, prompts: Batch, sampling: Sampling) -> Batch:
        """`generate` without its sync. Column first_rollout of the prompts: the number of each one's first rollout."""
        if not len(prompts):
            return Batch({}, prompts.ids)
        rollouts = self._rollout.generate(prompts, sampling, self.progress)
        repeated = prompts.take(np.repeat(np.arange(len(prompts)), sampling.n))
        carried = {name: repeated.column(name) for name in repeated.names if name != FIRST}
        rollout_id = repeated.array(FIRST) + rollouts.array("sample")
        failed = rollouts.array("finish_reason") == FinishReason.ERROR
        own = {
            **{name: rollouts.column(name) for name in rollouts.names if name != "group_id"},
            "rollout_id": rollout_id,
            "response": objects(self._texts(rollouts.ragged("response_ids"))),
            "keep": ~failed,
            "drop_reason": objects("rollout: NaN in the engine's logits" if bad else None for bad in failed),
        }
        return Batch({**carried, **own}, row_ids(RowKind.ROLLOUT, rollout_id))

    @remote(ONE_TO_ALL)
    def sync(self) -> int:
        """The training weights to the rollout engine; nothing moves if none changed. Returns the policy version: the
        number of syncs that changed something, whatever the number of optimizer steps between them."""
        if self._changed:
            self._rollout.sync(self._train.parameters(whole=True), self._version + 1)
            self._version, self._changed = self._version + 1, False
        elif not self._synced:
            self._rollout.sync(self._train.parameters(whole=True), self._version)
        self._synced = True
        return self._version

    def _end_rollout(self) -> None:
        """The rollout engine's weights make room for training; once, until the next sync."""
        if self._synced:
            self._rollout.release()
            self._synced = False

    def log_probs(self, batch: Batch, to: str) -> Batch:
        """One forward pass with the training weights, into the column `to` (0 on rows with keep = 0)."""
        return self.score_tokens(only(batch, (*SCORED, "rollout_logprobs")), to)

    @remote(THREE_D)
    def score_tokens(self, batch: Batch, to: str) -> Batch:
        """`log_probs` on the ranks."""
        self._end_rollout()
        column = forward_column(self._train, batch, to)
        if "rollout_logprobs" not in batch:
            return column
        return column.with_metrics(_mismatch(self._train, batch, column.ragged(to)))

    @remote(by_unit)
    def step(self, batch: Batch, loss: LossLike | None = None) -> Metrics:
        """One optimizer step on all kept rows of the batch."""
        self._end_rollout()
        metrics = super().step(batch, loss)
        self._changed = self._changed or not metrics.get(f"{self.name}/skipped")
        return metrics

    @remote(by_unit)
    def evaluate(self, batch: Batch, loss: LossLike) -> Batch:
        """Dense column `loss`: the mean loss of each row's learned tokens, without a step."""
        self._end_rollout()
        return super().evaluate(batch, loss)

    def start(self) -> None:
        from .models.loading import load_tokenizer  # brings torch and transformers: not for a driver that only declares

        self._tokenizer = load_tokenizer(self.settings.model)
        settings = self.settings
        idle = settings.algorithm.critic_warmup_steps
        self._train = train_engine(settings, idle_steps=idle, trainable=settings.trains)

    def save_rank(self, folder: Path) -> None:
        super().save_rank(folder)
        if self.rank:
            return
        (folder / "versions.json").write_text(json.dumps({"version": self._version, "changed": self._changed}))

    def load_rank(self, folder: Path) -> None:
        super().load_rank(folder)
        state = json.loads((folder / "versions.json").read_text())
        self._version, self._changed, self._synced = state["version"], state["changed"], False

    @cached_property
    def _rollout(self) -> RolloutEngine:
        """Made when first needed: a driver that only fine-tunes never samples."""
        return rollout_engine(self.settings, self._train.compute_dtype)

    _rollouts = 0  # of the handle: made in this run
    # of a rank: the weights' version, whether they changed since, whether the rollout engine has any
    _version = 0
    _changed = False
    _synced = False

    def _objective(self, loss: LossLike | None) -> PolicyObjective:
        settings = self.settings
        chosen = loss_of(loss, settings.loss)
        return PolicyObjective(chosen, settings.algorithm, settings.sampling.max_new_tokens)

    def _measured(self, rollouts: Batch) -> Metrics:
        """Errors: EngineError if too many could not be finished."""
        metrics, most = _rollout_metrics(rollouts), self.settings.reward.max_error_fraction
        if metrics["rollout/errors"] > most * len(rollouts):
            raise EngineError(
                f"{metrics['rollout/errors']:.0f} of {len(rollouts)} rollouts met a NaN in the model's logits, more "
                f"than reward.max_error_fraction={most}: the weights have overflowed. Go back to an earlier checkpoint "
                "with a lower training.lr, or set training.precision=fp32."
            )
        return metrics

    def _texts(self, responses: Ragged) -> Sequence[str]:
        texts: list[str] = self._tokenizer.batch_decode([ids.tolist() for ids in responses], skip_special_tokens=True)
        return texts


def _mismatch(engine: TrainEngine, batch: Batch, trainer: Ragged) -> Metrics:
    """How far the trainer's log-probs of the sampled tokens are from the sampler's, on kept rows of all ranks."""
    sampled = batch.ragged("response_mask").values & np.repeat(kept_rows(batch), trainer.lengths)
    difference = np.abs(trainer.values - batch.ragged("rollout_logprobs").values)[sampled]
    totals = engine.totals(
        sums={"difference": float(difference.sum(dtype=np.float64)), "tokens": float(len(difference))},
        maxima={"largest": float(difference.max(initial=0.0))},
    )
    if not totals["tokens"]:
        return {}
    return {
        "rollout/logprob_difference_mean": totals["difference"] / totals["tokens"],
        "rollout/logprob_difference_max": totals["largest"],
    }


def _rollout_metrics(rollouts: Batch) -> Metrics:
    lengths, reasons = rollouts.lengths("response_ids"), rollouts.fetch("finish_reason").array("finish_reason")
    return {
        "rollout/tokens": float(lengths.sum()),
        "rollout/length_mean": float(lengths.mean()) if len(lengths) else 0.0,
        "rollout/length_max": float(lengths.max(initial=0)),
        "rollout/truncated": float((reasons == FinishReason.LENGTH).sum()) / max(1, len(reasons)),
        "rollout/aborted": float((reasons == FinishReason.ABORT).sum()),
        "rollout/errors": float((reasons == FinishReason.ERROR).sum()),
    }
