"""training=fsdp: torch's FSDP2 over a transformers model.

    batch -> weights of its tokens (once, for the whole batch) -> micro-batches -> packed rows -> log-probs
          -> objective -> sum of weight x loss -> gradients, summed over micro-batches and ranks -> AdamW

Nothing here depends on how rows are cut into micro-batches, packed, or placed on ranks; so neither does the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...batch import Batch, Metrics
from ...columns import Ragged
from ...device import current_device, is_accelerated
from ...engines import Objective, ParameterShard, TrainEngine
from ...errors import BatchError, EngineError
from ..models.config import ModelConfig
from ..models.loading import model_path
from . import checkpoint
from .attention import resolve_attention
from .config import FSDPConfig, check_heads
from .heads import HEADS
from .optimizer import Optimization, freeze
from .packing import DUMMY, Ints, PackedRows, micro_batches
from .policy import to_device
from .ranks import Ranks
from .sharding import gathered, gathering, shard, shard_of

INPUTS = ("prompt_ids", "response_ids", "response_mask")
WEIGHT_COLUMNS = ("response_mask", "keep", "rollout_id", "group_id")


@dataclass(frozen=True)
class Learned:
    """What a micro-batch leaves behind.

    loss: sum of weight x loss; losses: of its learned tokens; tokens: their numbers among its response tokens; metrics:
    summed over learned tokens; inputs: tokens that ran through the model.
    """

    loss: Tensor
    losses: Tensor
    tokens: Ints
    metrics: dict[str, Tensor]
    inputs: int


class FSDPEngine(TrainEngine):
    """A causal LM under FSDP2, with fp32 masters and AdamW; of any number of ranks, all of which make the same calls.

    head: lm, value or score, see `heads`. path: the model, if not model.path. temperature (0 counts as 1) and
    banned_tokens: of the sampling distribution, whose log-probs it gives. total_steps: optimizer steps of the run, for
    schedules. trainable=False: only `forward` and `evaluate`, without optimizer and fp32 masters.
    Errors: ModelError, ConfigError.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: FSDPConfig,
        *,
        head: str = "lm",
        path: str | None = None,
        temperature: float = 1.0,
        banned_tokens: Sequence[int] = (),
        total_steps: int | None = None,
        trainable: bool = True,
    ) -> None:
        self._ranks = Ranks(config, frozen=not trainable)
        half = config.precision == "bf16" or (config.precision == "auto" and is_accelerated())
        self._dtype = torch.bfloat16 if half else torch.float32
        self._attention = resolve_attention(model.attention, self._dtype)
        self._model, self._config, self._path = model, config, model_path(path or model.path)
        self._device = current_device()
        self._head = HEADS[head]
        load = self._head.load if self._ranks.first else self._head.empty
        with self._ranks.together():
            lm = load(self._path, model, torch.float32 if trainable else self._dtype)
            check_heads(config, lm.config.num_attention_heads)
            freeze(lm, model.freeze if trainable else ["*"])
            checkpointing = trainable and config.activation_checkpointing
            self._policy = self._head.wrap(lm, temperature or 1.0, banned_tokens, checkpointing)
        shard(self._policy, self._ranks.parameters, self._dtype)
        self._optimization = (
            Optimization(self._policy, config, total_steps, self._ranks.replicas) if trainable else None
        )

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._dtype

    # ---- scoring
    def forward(self, batch: Batch, outputs: Sequence[str]) -> Batch:
        """Ragged columns aligned with response_ids: 0 for tokens that were not sampled (response_mask 0). The output
        score is a dense column, of all rows.

        Errors: EngineError naming row and token for a value of a token that is NaN or infinite.
        """
        unknown = set(outputs) - set(self._head.outputs)
        if unknown:
            raise BatchError(f"forward: no output {sorted(unknown)}; there are {', '.join(self._head.outputs)}.")
        responses, of_rows = batch.ragged("response_ids"), self._head.of_rows
        scored = np.arange(len(batch)) if of_rows else np.flatnonzero(_tokens_per_row(_sampled(batch)))
        size = len(batch) if of_rows else len(responses.values)
        columns = {name: np.zeros(size, np.float32) for name in outputs}
        position = responses.with_values(np.arange(len(responses.values)))
        read = _only(batch, INPUTS)
        with torch.no_grad(), gathering(self._policy):
            for part in self._micro_batches(read.take(scored)):
                rows = scored[part]
                found = self._score(self._packed(read.take(rows)), "entropy" in outputs)
                if len(part):
                    at = rows if of_rows else position.take(rows).values
                    for name, column in columns.items():
                        column[at] = found[name].cpu().numpy()
        if of_rows:
            return Batch(columns, batch.ids)
        for name, column in columns.items():
            _check_finite(batch, name, column)
        return Batch({name: responses.with_values(column) for name, column in columns.items()}, batch.ids)

    def evaluate(self, batch: Batch, objective: Objective) -> Batch:
        """Dense column `loss`: per row the mean loss of its learned tokens, NaN for a row without one."""
        weights = self._weights(batch, objective)
        rows = np.flatnonzero(_tokens_per_row(weights))
        losses = np.full(len(batch), np.nan, np.float32)
        read = _only(batch, (*INPUTS, objective.unit, *objective.columns))
        with torch.no_grad(), gathering(self._policy):
            for part in self._micro_batches(read.take(rows), objective.unit):
                learned = self._run(read.take(rows[part]), weights.take(rows[part]), objective)
                if learned is not None:
                    row = _row_of_token(weights.take(rows[part]))[learned.tokens]
                    sums = np.bincount(row, learned.losses.cpu().numpy(), len(part))
                    losses[rows[part]] = sums / np.bincount(row, minlength=len(part))
        return Batch({"loss": losses}, batch.ids)

    # ---- learning
    def step(self, batch: Batch, objective: Objective) -> Metrics:
        """One optimizer step on the rows that have a weighted token; the others cost nothing.

        Metrics: loss, grad_norm (before clipping), lr, tokens (learned), microbatches, packing_fill (share of the token
        budget that was used), skipped, and the objective's own, averaged over learned tokens.
        Errors: EngineError for a loss or gradient that is NaN or infinite; the weights are as before.
        """
        optimization = self._trained()
        weights = self._weights(batch, objective)
        rows = np.flatnonzero(_tokens_per_row(weights))
        read = _only(batch, (*INPUTS, objective.unit, *objective.columns))
        parts = [rows[part] for part in self._micro_batches(read.take(rows), objective.unit)]
        if not parts:
            return {"skipped": 1.0, "tokens": 0.0, "microbatches": 0.0}
        with optimization.gradients():
            with gathering(self._policy):
                done = [self._learn(read.take(part), weights.take(part), objective) for part in parts]
            totals = self.totals(_totals([learned for learned in done if learned is not None]), {})
            norm = optimization.gradient_norm()
            if not math.isfinite(totals["loss"]) or not math.isfinite(norm):
                raise EngineError(
                    f"optimizer step {optimization.steps + 1}: loss {totals['loss']:.4g}, gradient norm {norm:.4g}; "
                    f"{self._blame(batch, parts, done)} The weights are those of before."
                )
            lr = optimization.step(norm)
        return self._metrics(totals, len(parts), norm, lr)

    def _learn(self, rows: Batch, weights: Ragged, objective: Objective) -> Learned | None:
        """Adds the gradient of some rows."""
        learned = self._run(rows, weights, objective)
        if learned is not None:
            torch.autograd.backward(learned.loss)
        return learned

    def _run(self, rows: Batch, weights: Ragged, objective: Objective) -> Learned | None:
        """The objective on some rows; None on no rows, which take part in what the ranks do together."""
        packed = self._packed(rows)
        found = self._score(packed, "entropy" in objective.outputs)
        if not len(rows):
            if torch.is_grad_enabled():
                torch.autograd.backward(found[self._head.outputs[0]].sum() * 0.0)
            return None
        forward = {
            name: value if name in objective.differentiable else value.detach()
            for name, value in found.items()
            if name in objective.outputs
        }
        losses, metrics = objective({**self._columns(rows, objective.columns), **forward})
        learned = np.flatnonzero(weights.values)
        at = torch.from_numpy(learned).to(self._device)
        weight = torch.from_numpy(weights.values[learned]).to(self._device, losses.dtype)
        losses = losses.index_select(0, at)
        return Learned(
            loss=(losses * weight).sum(),
            losses=losses.detach(),
            tokens=learned,
            metrics={name: value[at].float().sum() for name, value in metrics.items()},
            inputs=len(packed.input_ids),
        )

    def _packed(self, rows: Batch) -> PackedRows:
        return self._head.pack(rows, self._policy.lm) if len(rows) else DUMMY

    def _score(self, packed: PackedRows, entropy: bool) -> dict[str, Tensor]:
        """The head's first output and, on demand, entropies [R]; with their graph where gradients are on."""
        tensors = to_device(packed, self._device, self._attention, self._ranks.sequence)
        values, entropies = self._policy(tensors, entropy)
        found = {self._head.outputs[0]: values}
        return found if entropies is None else {**found, "entropy": entropies}

    def _micro_batches(self, rows: Batch, unit: str = "") -> list[Ints]:
        """Row numbers of each micro-batch, empty ones where another rank has more: all ranks run equally many."""
        parts = micro_batches(self._head.lengths(rows), self._budget, rows.array(unit) if unit in rows else None)
        return parts + [np.empty(0, np.int64)] * (self._ranks.most(len(parts)) - len(parts))

    def _weights(self, batch: Batch, objective: Objective) -> Ragged:
        """Weight of each response token, from the rows of all ranks, so that it holds however they are placed."""
        whole, rows = self._ranks.whole_batch(batch, *WEIGHT_COLUMNS)
        offsets = whole.ragged("response_mask").offsets
        weights = objective.weights(whole)[offsets[rows.start] : offsets[rows.stop]]
        return batch.ragged("response_ids").with_values(weights)

    def _columns(self, rows: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        """The columns there are of `names`, and what every objective may ask for."""
        responses = rows.ragged("response_ids")
        tensors = _only(rows, names).to_torch()
        tensors["response_mask"] = torch.from_numpy(_sampled(rows).values.copy())
        tensors["lengths"] = torch.from_numpy(responses.lengths)
        tensors["row_of_token"] = torch.from_numpy(_row_of_token(responses))
        return {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}

    def _metrics(self, totals: dict[str, float], microbatches: int, norm: float, lr: float) -> Metrics:
        own = {name.removeprefix("metric/"): totals[name] for name in totals if name.startswith("metric/")}
        budget = totals["ranks"] * microbatches * self._budget
        return {
            **{name: value / totals["tokens"] for name, value in own.items()},
            "loss": totals["loss"],
            "grad_norm": norm,
            "lr": lr,
            "tokens": totals["tokens"],
            "microbatches": float(microbatches),
            "packing_fill": totals["inputs"] / budget,
            "skipped": 0.0,
        }

    @property
    def _budget(self) -> int:
        """Tokens of a micro-batch, over all ranks that share its rows."""
        sequence = self._ranks.sequence
        return self._config.tokens_per_microbatch * (1 if sequence is None else sequence.size())

    def _blame(self, batch: Batch, parts: list[Ints], done: list[Learned | None]) -> str:
        """What made the step's loss or gradient NaN or infinite, on whichever rank."""
        found = [fault for fault in self._ranks.gather(_fault(batch, parts, done)) if fault]
        return found[0] if found else "no token's loss is at fault, so the gradient overflowed."

    def totals(self, sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
        return self._ranks.totals(sums, maxima)

    def _trained(self) -> Optimization:
        if self._optimization is None:
            raise EngineError(f"the model at {self._path} is frozen here: it only scores.")
        return self._optimization

    # ---- weights
    def parameters(self, whole: bool = False) -> Iterator[ParameterShard]:
        parameters = self._policy.lm.named_parameters()
        if whole:
            return (gathered(name, parameter, self._dtype) for name, parameter in parameters)
        return (shard_of(name, parameter) for name, parameter in parameters)

    def save(self, folder: Path) -> None:
        optimization = self._trained()
        checkpoint.save(folder, optimization.tensors(self._policy.lm), optimization.state_dict())

    def load(self, folder: Path) -> None:
        optimization = self._trained()
        optimization.load_state_dict(checkpoint.load(folder, optimization.tensors(self._policy.lm)))

    def export(self, folder: Path) -> None:
        """Weights are in the dtype that the folder they came from had."""
        checkpoint.export(folder, self._policy.lm.named_parameters(), self._model, self._path, self._head)


def _only(batch: Batch, names: Sequence[str]) -> Batch:
    """The columns there are of these."""
    return batch.select(*(name for name in dict.fromkeys(names) if name in batch))


def _sampled(batch: Batch) -> Ragged:
    """bool of each response token: whether the policy sampled it."""
    if "response_mask" in batch:
        return batch.ragged("response_mask")
    responses = batch.ragged("response_ids")
    return responses.with_values(np.ones(len(responses.values), np.bool_))


def _row_of_token(column: Ragged) -> Ints:
    return np.repeat(np.arange(len(column)), column.lengths)


def _tokens_per_row(column: Ragged) -> Ints:
    """How many of each row's values are not 0."""
    counts: Ints = np.bincount(_row_of_token(column)[column.values != 0], minlength=len(column))
    return counts


def _totals(done: list[Learned]) -> dict[str, float]:
    """Sums over this rank's micro-batches; one transfer from the device."""
    names = list(done[0].metrics) if done else []
    sums = [torch.stack([learned.loss.detach().float(), *learned.metrics.values()]) for learned in done]
    loss, *metrics = torch.stack(sums).double().sum(0).tolist() if sums else [0.0]
    return {
        "loss": loss,
        "ranks": 1.0,
        "tokens": float(sum(len(learned.tokens) for learned in done)),
        "inputs": float(sum(learned.inputs for learned in done)),
        **{f"metric/{name}": value for name, value in zip(names, metrics, strict=True)},
    }


def _fault(batch: Batch, parts: list[Ints], done: list[Learned | None]) -> str | None:
    """The first learned token of this rank whose loss is NaN or infinite."""
    for rows, learned in zip(parts, done, strict=True):
        if learned is None:
            continue
        bad = np.flatnonzero(~torch.isfinite(learned.losses).cpu().numpy())
        if len(bad):
            row = int(rows[_row_of_token(batch.ragged("response_ids").take(rows))[learned.tokens[bad[0]]]])
            return f"the loss is {learned.losses[bad[0]].item()} in {_name_of(batch, row)}."
    return None


def _check_finite(batch: Batch, name: str, values: NDArray[np.float32]) -> None:
    bad = np.flatnonzero(~np.isfinite(values))
    if not len(bad):
        return
    responses = batch.ragged("response_ids")
    row = int(_row_of_token(responses)[bad[0]])
    token = bad[0] - responses.offsets[row]
    known = "" if math.isnan(values[bad[0]]) else " The token is one of sampling.banned_tokens."
    raise EngineError(
        f"{name} is {values[bad[0]]} at response token {token} (id {responses[row][token]}) of {_name_of(batch, row)}, "
        f"and at {len(bad) - 1} others.{known}"
    )


def _name_of(batch: Batch, row: int) -> str:
    """A row of this rank, and what tells it among those of all ranks."""
    known = ", ".join(f"{name} {batch.array(name)[row]}" for name in ("group_id", "sample") if name in batch)
    return f"row {row} ({known})" if known else f"row {row}"
