"""Actor: the policy. It trains under `training` and samples under `rollout`, on the same devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..algorithms.objective import PolicyObjective
from ..algorithms.registry import Loss
from ..batch import Batch, Metrics, RowKind, row_ids
from ..columns import FinishReason, Ragged, objects
from ..controller.protocols import DP, ONE_TO_ALL
from ..controller.worker import Worker, remote
from ..engines import RolloutEngine, Sampling, TrainEngine
from ..errors import EngineError
from .engine_table import rollout_engine, train_engine
from .settings import Settings

LossLike = str | Loss | Callable[..., Any]
SUMMED = ("tokens", "microbatches", "skipped")


class Actor(Worker[Settings]):
    """The policy: generate, log_probs, update."""

    role = "actor"

    # ---- driver: what a call means, in terms of calls to the ranks
    def generate(self, prompts: Batch, sampling: Sampling) -> Batch:
        """sampling.n rollouts per prompt; all prompt columns are carried, in prompt order, then by `sample`.

        Syncs the weights first if sampling.fresh. A rollout the engine could not finish has keep = 0.
        """
        if sampling.fresh:
            self.sync()
        first = self._rollouts
        self._rollouts += len(prompts) * sampling.n
        return self.sample(prompts, sampling, first)

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

    def update(self, batch: Batch, loss: LossLike | None = None) -> Metrics:
        """algorithm.epochs x algorithm.minibatches optimizer steps: `step` on each of `batch.minibatches`.

        Ends early after a step whose `kl_old` is over algorithm.kl_stop. Rows with keep = 0 take no part.
        """
        algorithm, kept = self.settings.algorithm, batch.kept()
        seed = [self.settings.seed, self._updates]
        self._updates += 1
        parts: list[Metrics] = []
        for minibatch in kept.minibatches(algorithm.minibatches, algorithm.epochs, seed, self._objective(loss).unit):
            parts.append(self.step(minibatch, loss))
            if algorithm.kl_stop is not None and parts[-1].get("actor/kl_old", 0.0) > algorithm.kl_stop:
                break
        planned = algorithm.epochs * algorithm.minibatches
        return {
            **_combined(parts),
            "actor/steps": float(len(parts)),
            "actor/steps_stopped": float(planned - len(parts)),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"rollouts": self._rollouts, "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rollouts, self._updates = state["rollouts"], state["updates"]

    # ---- ranks
    @remote(DP)
    def sample(self, prompts: Batch, sampling: Sampling, first_rollout: int) -> Batch:
        """`generate` without its sync; rollouts are numbered from `first_rollout`."""
        rollouts = self._rollout.generate(prompts, sampling, self.progress)
        n = len(rollouts)
        repeated = prompts.take(np.repeat(np.arange(len(prompts)), sampling.n))
        carried = {name: repeated.column(name) for name in repeated.names}
        rollout_id = first_rollout + np.arange(n)
        failed = rollouts.array("finish_reason") == FinishReason.ERROR
        self._check_failed(int(failed.sum()), n)
        own = {
            **{name: rollouts.column(name) for name in rollouts.names if name != "group_id"},
            "rollout_id": rollout_id,
            "response": objects(self._texts(rollouts.ragged("response_ids"))),
            "keep": ~failed,
            "drop_reason": objects("rollout: NaN in the engine's logits" if bad else None for bad in failed),
        }
        return Batch({**carried, **own}, row_ids(RowKind.ROLLOUT, rollout_id), _rollout_metrics(rollouts))

    @remote(ONE_TO_ALL)
    def sync(self) -> int:
        """The training weights to the rollout engine; nothing moves if none changed. Returns the policy version: the
        number of syncs that changed something, whatever the number of optimizer steps between them."""
        if self._changed:
            self._rollout.sync(self._train.parameters(), self._version + 1)
            self._version, self._changed = self._version + 1, False
        elif not self._synced:
            self._rollout.sync(self._train.parameters(), self._version)
        self._synced = True
        return self._version

    @remote(DP)
    def log_probs(self, batch: Batch, to: str) -> Batch:
        """One forward pass with the training weights, into the column `to` (0 on rows with keep = 0)."""
        column = forward_column(self._train, batch, to)
        return column.with_metrics(_mismatch(batch, column.ragged(to))) if "rollout_logprobs" in batch else column

    @remote(DP)
    def step(self, batch: Batch, loss: LossLike | None = None) -> Metrics:
        """One optimizer step on all kept rows of the batch."""
        metrics = self._train.step(batch.kept(), self._objective(loss))
        self._changed = self._changed or not metrics.get("skipped")
        return {f"actor/{name}": value for name, value in metrics.items()}

    @remote(DP)
    def evaluate(self, batch: Batch, loss: LossLike) -> Batch:
        """Dense column `loss`: the mean loss of each row's learned tokens, without a step."""
        return self._train.evaluate(batch, self._objective(loss))

    @remote(ONE_TO_ALL)
    def export(self, folder: Path) -> None:
        """A Hugging Face folder with the present weights."""
        self._train.export(folder)

    def start(self) -> None:
        from .models.loading import load_tokenizer  # brings torch and transformers: not for a driver that only declares

        self._tokenizer = load_tokenizer(self.settings.model)
        self._train = train_engine(self.settings, trainable=self.settings.trains)

    def save_rank(self, folder: Path) -> None:
        self._train.save(folder)
        (folder / "versions.json").write_text(json.dumps({"version": self._version, "changed": self._changed}))

    def load_rank(self, folder: Path) -> None:
        self._train.load(folder)
        state = json.loads((folder / "versions.json").read_text())
        self._version, self._changed, self._synced = state["version"], state["changed"], False

    @cached_property
    def _rollout(self) -> RolloutEngine:
        """Made when first needed: a driver that only fine-tunes never samples."""
        return rollout_engine(self.settings, self._train.compute_dtype)

    # of the handle: rollouts made and updates begun in this run
    _rollouts = 0
    _updates = 0
    # of a rank: the weights' version, whether they changed since, whether the rollout engine has any
    _version = 0
    _changed = False
    _synced = False

    def _objective(self, loss: LossLike | None) -> PolicyObjective:
        chosen = self.settings.loss if loss is None else loss if isinstance(loss, Loss) else Loss(loss)
        return PolicyObjective(chosen, self.settings.algorithm, self.settings.sampling.max_new_tokens)

    def _check_failed(self, failed: int, total: int) -> None:
        most = self.settings.reward.max_error_fraction
        if failed > most * total:
            raise EngineError(
                f"{failed} of {total} rollouts met a NaN in the model's logits, more than reward.max_error_fraction="
                f"{most}: the weights have overflowed. Go back to an earlier checkpoint with a lower training.lr, or "
                "set training.precision=fp32."
            )

    def _texts(self, responses: Ragged) -> Sequence[str]:
        texts: list[str] = self._tokenizer.batch_decode([ids.tolist() for ids in responses], skip_special_tokens=True)
        return texts


def forward_column(engine: TrainEngine, batch: Batch, to: str) -> Batch:
    """The engine's log-probs of a batch's kept rows as column `to`; other rows get zeros and cost nothing."""
    responses = batch.ragged("response_ids")
    kept = batch.array("keep") if "keep" in batch else np.ones(len(batch), bool)
    values = np.zeros(len(responses.values), np.float32)
    of_kept = engine.forward(batch.take(np.flatnonzero(kept)), ["logprobs"])
    values[np.repeat(kept, responses.lengths)] = of_kept.ragged("logprobs").values
    return Batch({to: responses.with_values(values)}, batch.ids)


def _mismatch(batch: Batch, trainer: Ragged) -> Metrics:
    """How far the trainer's log-probs of the sampled tokens are from the sampler's, on kept rows."""
    sampled = batch.ragged("response_mask").values & np.repeat(batch.array("keep"), trainer.lengths)
    difference = (trainer.values - batch.ragged("rollout_logprobs").values)[sampled]
    if not len(difference):
        return {}
    return {
        "rollout/logprob_difference_mean": float(np.abs(difference).mean()),
        "rollout/logprob_difference_max": float(np.abs(difference).max()),
    }


def _rollout_metrics(rollouts: Batch) -> Metrics:
    lengths, reasons = rollouts.ragged("response_ids").lengths, rollouts.array("finish_reason")
    return {
        "rollout/tokens": float(lengths.sum()),
        "rollout/length_mean": float(lengths.mean()) if len(lengths) else 0.0,
        "rollout/length_max": float(lengths.max(initial=0)),
        "rollout/truncated": float((reasons == FinishReason.LENGTH).sum()) / max(1, len(reasons)),
        "rollout/aborted": float((reasons == FinishReason.ABORT).sum()),
        "rollout/errors": float((reasons == FinishReason.ERROR).sum()),
    }


def _combined(parts: Sequence[Metrics]) -> dict[str, float]:
    """Metrics of several optimizer steps as one: counts add up, the rest is averaged."""
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        out[name] = sum(values) if name.removeprefix("actor/") in SUMMED else sum(values) / len(values)
    return out
