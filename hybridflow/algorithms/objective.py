"""PolicyObjective: a loss, the KL penalty and the entropy bonus, as one thing that a training engine can minimise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import BatchError, ConfigError
from .aggregation import token_weights
from .config import AlgorithmConfig
from .kl import kl_estimate
from .registry import Loss, columns_of, required_columns_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

FORWARD = ("logprobs", "entropy")  # what an engine's forward gives
COMPUTED = ("response_mask", "lengths", "row_of_token")  # what an engine adds for any rows
REMEDY = {
    "old_logprobs": "Call actor.old_log_probs(batch) first, or say algorithm.old_policy=current (one step per batch).",
    "ref_logprobs": "Call ref.log_probs(batch) first.",
    "advantages": "Call run.advantages(batch) first.",
}


def reads_old_logprobs(loss: Loss, config: AlgorithmConfig, advantage: Callable[..., Any] | None = None) -> bool:
    """Whether anything reads the column old_logprobs: the loss, the KL in the reward, or the advantage estimator."""
    asked = (*columns_of(loss.fn), *(columns_of(advantage) if advantage else ()))
    return config.kl == "reward" or "old_logprobs" in asked


def check_old_policy(loss: Loss, config: AlgorithmConfig) -> None:
    """Errors: ConfigError if algorithm.old_policy=current would make the ratio of every step 1."""
    steps = config.epochs * config.minibatches
    if config.old_policy == "current" and steps > 1 and reads_old_logprobs(loss, config):
        raise ConfigError(
            f"algorithm.old_policy=current, but algorithm.epochs x algorithm.minibatches = {steps} steps on a "
            f"batch: each would take its own log-probs as the old ones, so that {loss.name}'s ratio is always 1. "
            "Say algorithm.old_policy=recompute or rollout, or take one step."
        )


class RaggedColumn(Protocol):
    """n sequences in one flat array."""

    @property
    def values(self) -> NDArray[Any]:
        """[T]"""

    @property
    def lengths(self) -> NDArray[Any]:
        """[n]"""


class Columns(Protocol):
    """What is asked of a batch."""

    def __contains__(self, name: object) -> bool: ...

    def array(self, name: str) -> NDArray[Any]:
        """A column with one value a row."""

    def ragged(self, name: str) -> RaggedColumn:
        """A column with one value a token."""


class PolicyObjective:
    """Minimises loss + kl_coef x KL(policy || reference) - entropy_coef x entropy, per token. An `engines.Objective`.

    max_new_tokens: the constant length of aggregation=sequence_sum_constant.
    Errors: ConfigError as `check_old_policy`.
    """

    def __init__(self, loss: Loss, config: AlgorithmConfig, max_new_tokens: int) -> None:
        self.loss = loss
        self.config = config
        self.max_new_tokens = max_new_tokens
        self._asked = columns_of(loss.fn)
        check_old_policy(loss, config)

    @property
    def outputs(self) -> frozenset[str]:
        """Forward outputs it reads: logprobs; entropy for the bonus, or if the loss asks."""
        wants_entropy = self.config.entropy_coef > 0 or "entropy" in self._asked
        return frozenset(FORWARD if wants_entropy else ("logprobs",))

    @property
    def differentiable(self) -> frozenset[str]:
        """All outputs: none is computed only to be watched."""
        return self.outputs

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the batch it reads where they are there: keep, the loss's own, ref_logprobs for the KL."""
        own = [name for name in self._asked if name not in (*FORWARD, *COMPUTED)]
        return tuple(dict.fromkeys(["keep", *own, *(["ref_logprobs"] if self.config.kl == "loss" else [])]))

    @property
    def unit(self) -> str:
        """What no mini-batch may cut: a group if the loss or the aggregation is over groups, else a rollout."""
        over_groups = "group_id" in self._asked or self.config.aggregation == "group_mean"
        return "group_id" if over_groups else "rollout_id"

    def weights(self, batch: Columns) -> NDArray[np.float64]:
        """float64 weight of each response token, [T]: see `token_weights`. Needs the column response_mask."""
        mask = batch.ragged("response_mask")
        keep, rollout_id, group_id = (
            batch.array(name) if name in batch else None for name in ("keep", "rollout_id", "group_id")
        )
        return token_weights(
            self.config.aggregation, mask.values, mask.lengths, keep, rollout_id, group_id, self.max_new_tokens
        )

    def __call__(self, tensors: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss [T], metrics: name -> [T] detached), of the response tokens of some rows.

        tensors: `outputs` and per-token `columns` [T], per-row columns [rows], response_mask [T], lengths [rows],
        row_of_token [T]. Tokens that are masked out or of rows with keep = 0 have loss 0 and gradient 0, whatever their
        values, NaN included: these are replaced by 0 before any arithmetic.
        Errors: BatchError for a missing column, and for a loss that does not return one value per token.
        """
        learned = tensors["response_mask"]
        if "keep" in tensors:
            learned = learned & tensors["keep"][tensors["row_of_token"]]
        inputs = {name: _without_masked(tensor, learned) for name, tensor in tensors.items()}
        inputs["response_mask"] = learned
        if self.config.old_policy == "current":
            inputs.setdefault("old_logprobs", inputs["logprobs"].detach())
        loss, metrics = self._evaluate(inputs)
        loss, more = self._with_penalties(loss, inputs)
        measured = {
            name: _without_masked(value.detach().to(loss.dtype), learned) for name, value in {**metrics, **more}.items()
        }
        return _without_masked(loss, learned), measured

    def _evaluate(self, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss function on the columns that it asks for by name."""
        for name in required_columns_of(self.loss.fn):
            _need(self.loss.name, name, inputs)
        returned = self.loss.fn(**{name: inputs[name] for name in self._asked if name in inputs}, **self.loss.options)
        loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
        expected = inputs["logprobs"].shape
        for what, value in {
            "a loss": loss,
            **{f"the metric '{name}'": value for name, value in metrics.items()},
        }.items():
            if value.shape != expected:
                raise BatchError(
                    f"{self.loss.name} returned {what} of shape {list(value.shape)}; one value for each of "
                    f"{expected[0]} response tokens is needed, not their mean or sum."
                )
        return loss, metrics

    def _with_penalties(self, loss: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        config, logprobs, metrics = self.config, inputs["logprobs"], {}
        if "old_logprobs" in self._asked and "old_logprobs" in inputs:
            # KL(old || current): the tokens were sampled from the old policy
            metrics["kl_old"] = kl_estimate(inputs["old_logprobs"], logprobs.detach(), "k3")
        if config.kl == "loss":
            _need("algorithm.kl=loss", "ref_logprobs", inputs)
            loss = loss + config.kl_coef * kl_estimate(logprobs, inputs["ref_logprobs"], config.kl_estimator)
            metrics["kl_ref"] = kl_estimate(logprobs.detach(), inputs["ref_logprobs"], "k3")
        if "entropy" in inputs:
            loss = loss - config.entropy_coef * inputs["entropy"]
            metrics["entropy"] = inputs["entropy"]
        return loss, metrics


def _without_masked(tensor: Tensor, learned: Tensor) -> Tensor:
    """A floating-point tensor of one entry per token with 0 where nothing is learned; any other tensor as it is."""
    if not tensor.is_floating_point() or tensor.shape[:1] != learned.shape:
        return tensor
    return tensor.masked_fill(~learned.reshape(-1, *[1] * (tensor.dim() - 1)), 0.0)


def _need(reader: str, name: str, inputs: dict[str, Tensor]) -> None:
    if name not in inputs:
        remedy = f" {REMEDY[name]}" if name in REMEDY else ""
        raise BatchError(f"{reader} needs the column '{name}'; there are {sorted(inputs)}.{remedy}")
