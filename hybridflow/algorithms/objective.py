"""Objectives: a loss, and what belongs to it, as one thing that a training engine can minimise.

PolicyObjective: of log-probs, with the KL penalty and the entropy bonus. TokenObjective: any loss of a value per token,
such as a critic's. PairObjective: of scores of rows, compared within their group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import BatchError, ConfigError
from .aggregation import row_weights, token_weights
from .config import AlgorithmConfig
from .groups import groups_of
from .kl import kl_estimate
from .registry import Loss, columns_of, required_columns_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

OUTPUTS = {"lm": ("logprobs", "entropy"), "value": ("values",), "score": ("score",)}
"""What an engine's forward gives, by the model's head: of each response token, but `score`, which is of each row."""
COMPUTED = ("response_mask", "lengths", "row_of_token")  # what an engine adds for any rows
REMEDY = {
    "old_logprobs": "Call actor.old_log_probs(batch) first, or say algorithm.old_policy=current (one step per batch).",
    "ref_logprobs": "Call ref.log_probs(batch) first.",
    "advantages": "Call run.advantages(batch) first.",
    "old_values": "Call critic.values(batch) first.",
    "returns": "run.advantages(batch) makes it, with an estimator such as advantage=gae.",
    "chosen": "Draw the rows with run.pairs().",
}


def head_of(loss: Loss) -> str:
    """The head that a model needs to learn by this loss: lm, value or score."""
    asked = columns_of(loss.fn)
    return next((head for head, outputs in OUTPUTS.items() if set(outputs) & set(asked)), "lm")


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


class LossObjective:
    """What all objectives share: which outputs and columns their loss asks for, by name, and how it is called.

    head: of the model that learns. max_new_tokens: the constant length of aggregation=sequence_sum_constant.
    """

    def __init__(self, loss: Loss, config: AlgorithmConfig, max_new_tokens: int, head: str) -> None:
        self.loss = loss
        self.config = config
        self.max_new_tokens = max_new_tokens
        self._forward = OUTPUTS[head]
        self._asked = columns_of(loss.fn)

    @property
    def outputs(self) -> frozenset[str]:
        """Forward outputs it reads."""
        return frozenset(self._forward) & frozenset(self._asked)

    @property
    def differentiable(self) -> frozenset[str]:
        """All outputs: none is computed only to be watched."""
        return self.outputs

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the batch it reads where they are there: keep, and the loss's own."""
        own = (name for name in self._asked if name not in (*self._forward, *COMPUTED))
        return tuple(dict.fromkeys(["keep", *own]))

    @property
    def unit(self) -> str:
        """What no mini-batch may cut: a group if the loss or the aggregation is over groups, else a rollout."""
        over_groups = "group_id" in self._asked or self.config.aggregation == "group_mean"
        return "group_id" if over_groups else "rollout_id"

    def _evaluate(self, inputs: dict[str, Tensor], expected: int, of_what: str) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss function on what it asks for, and its metrics; each has `expected` values."""
        for name in required_columns_of(self.loss.fn):
            _need(self.loss.name, name, inputs)
        returned = self.loss.fn(**{name: inputs[name] for name in self._asked if name in inputs}, **self.loss.options)
        loss, metrics = returned if isinstance(returned, tuple) else (returned, {})
        for what, value in {
            "a loss": loss,
            **{f"the metric '{name}'": value for name, value in metrics.items()},
        }.items():
            if value.shape != (expected,):
                raise BatchError(
                    f"{self.loss.name} returned {what} of shape {list(value.shape)}; one value for each of "
                    f"{expected} {of_what} is needed, not their mean or sum."
                )
        return loss, metrics


class TokenObjective(LossObjective):
    """Minimises a loss of every response token. An `engines.Objective`."""

    def weights(self, batch: Columns) -> NDArray[np.float64]:
        """float64 weight of each response token, [T]: see `token_weights`. Needs the column response_mask."""
        mask = batch.ragged("response_mask")
        keep, rollout_id, group_id = (_array(batch, name) for name in ("keep", "rollout_id", "group_id"))
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
        loss, metrics = self._total(inputs)
        measured = {name: _without_masked(value.detach().to(loss.dtype), learned) for name, value in metrics.items()}
        return _without_masked(loss, learned), measured

    def _total(self, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """All that is minimised, per token."""
        return self._evaluate(inputs, len(inputs["response_mask"]), "response tokens")


class PolicyObjective(TokenObjective):
    """Minimises loss + kl_coef x KL(policy || reference) - entropy_coef x entropy, per token.

    Errors: ConfigError as `check_old_policy`.
    """

    def __init__(self, loss: Loss, config: AlgorithmConfig, max_new_tokens: int) -> None:
        super().__init__(loss, config, max_new_tokens, "lm")
        check_old_policy(loss, config)

    @property
    def outputs(self) -> frozenset[str]:
        """logprobs; entropy for the bonus, or if the loss asks."""
        wants_entropy = self.config.entropy_coef > 0 or "entropy" in self._asked
        return frozenset(self._forward if wants_entropy else ("logprobs",))

    @property
    def columns(self) -> tuple[str, ...]:
        """Those of the loss, and ref_logprobs for the KL."""
        return tuple(dict.fromkeys([*super().columns, *(["ref_logprobs"] if self.config.kl == "loss" else [])]))

    def _total(self, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        config, logprobs = self.config, inputs["logprobs"]
        if config.old_policy == "current":
            inputs.setdefault("old_logprobs", logprobs.detach())
        loss, metrics = super()._total(inputs)
        more: dict[str, Tensor] = {}
        if "old_logprobs" in self._asked and "old_logprobs" in inputs:
            # KL(old || current): the tokens were sampled from the old policy
            more["kl_old"] = kl_estimate(inputs["old_logprobs"], logprobs.detach(), "k3")
        if config.kl == "loss":
            _need("algorithm.kl=loss", "ref_logprobs", inputs)
            loss = loss + config.kl_coef * kl_estimate(logprobs, inputs["ref_logprobs"], config.kl_estimator)
            more["kl_ref"] = kl_estimate(logprobs.detach(), inputs["ref_logprobs"], "k3")
        if "entropy" in inputs:
            loss = loss - config.entropy_coef * inputs["entropy"]
            more["entropy"] = inputs["entropy"]
        return loss, {**metrics, **more}


class PairObjective(LossObjective):
    """Minimises the mean over groups of a loss that compares the scores of a group's rows. An `engines.Objective`.

    A row's last token that counts stands for the row, so that what an engine averages over tokens it averages over rows
    here; a group whose other rows are not kept has nothing to be compared with, and weighs nothing.
    """

    def __init__(self, loss: Loss, config: AlgorithmConfig, max_new_tokens: int) -> None:
        super().__init__(loss, config, max_new_tokens, "score")

    @property
    def unit(self) -> str:
        """A group: its rows are compared."""
        return "group_id"

    def weights(self, batch: Columns) -> NDArray[np.float64]:
        """float64 weight of each response token, [T]: see `row_weights`. Needs response_mask and group_id."""
        mask = batch.ragged("response_mask")
        return row_weights(mask.values, mask.lengths, _array(batch, "keep"), batch.array("group_id"))

    def __call__(self, tensors: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss [T], metrics: name -> [T] detached): each token's is its row's. tensors: those of `of_rows` and
        row_of_token [T]."""
        loss, metrics = self.of_rows(tensors)
        row = tensors["row_of_token"]
        return loss[row], {name: value[row] for name, value in metrics.items()}

    def of_rows(self, tensors: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss [rows], metrics: name -> [rows] detached): each row's is its group's.

        tensors: score [rows], `columns`. Errors: BatchError for a missing column, and for a loss that does not return
        one value per group.
        """
        _need(self.loss.name, "group_id", tensors)
        groups, group = groups_of(tensors["group_id"])
        loss, metrics = self._evaluate(tensors, len(groups), "groups")
        return loss[group], {name: value.detach().to(loss.dtype)[group] for name, value in metrics.items()}


def _array(batch: Columns, name: str) -> NDArray[Any] | None:
    return batch.array(name) if name in batch else None


def _without_masked(tensor: Tensor, learned: Tensor) -> Tensor:
    """A floating-point tensor of one entry per token with 0 where nothing is learned; any other tensor as it is."""
    if not tensor.is_floating_point() or tensor.shape[:1] != learned.shape:
        return tensor
    return tensor.masked_fill(~learned.reshape(-1, *[1] * (tensor.dim() - 1)), 0.0)


def _need(reader: str, name: str, inputs: dict[str, Tensor]) -> None:
    if name not in inputs:
        remedy = f" {REMEDY[name]}" if name in REMEDY else ""
        raise BatchError(f"{reader} needs the column '{name}'; there are {sorted(inputs)}.{remedy}")
