"""rollout=transformers: continuous batching over a transformers model in this process.

    queue --admit--> live --a token a row and step--> done --> completed()
          prefill once a group, copy          compact: rows that ended leave at once
          to its samples' slots

A prompt is prefilled without its last token, which is each sample's first token to decode: so all sampling happens in
one place, and all logits come from the model's own forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from ...columns import FinishReason
from ...device import current_device
from ...engines import ParameterShard
from ...errors import ConfigError, ModelError
from ..models.config import ModelConfig
from ..models.loading import empty_causal_lm, forget_weights, load_tokenizer, model_path
from .config import TransformersConfig
from .embedded import EmbeddedRollout, end_ids
from .kv_cache import ATTENTION, SlotCache
from .requests import Group, Rollout
from .sampling import draw, uniforms
from .weights import adopt

PREFILL_TOKENS = 8192  # of one prefill forward, padding included

Arrival = tuple[Group, list[Rollout]]


class TransformersRollout(EmbeddedRollout):
    """Samples with the trainer's own tensors, which `sync` adopts; with several ranks, with copies gathered from them,
    which `release` frees. Starts without weights and refuses to sample before.

    A sync while rollouts are in flight lets them go on with the keys and values they have; each token carries the
    version that sampled it. The weights must hold still while `completed` runs.
    """

    def __init__(
        self, model: ModelConfig, config: TransformersConfig, *, seed: int, dtype: torch.dtype, path: str | None = None
    ) -> None:
        folder = model_path(path or model.path)
        self.model = empty_causal_lm(folder, model, dtype).eval()
        self.model.set_attn_implementation(ATTENTION)
        tokenizer, network = load_tokenizer(model), self.model.config
        context = _context_tokens(network, config)
        ends = end_ids(folder, network, tokenizer)
        super().__init__(tokenizer, ends, context=context, vocabulary=network.vocab_size, seed=seed)
        self._max_concurrent, self._dtype = config.max_concurrent, dtype
        self._device = current_device()
        self._queue: deque[Group] = deque()
        self._live: list[Rollout] = []  # rollout i is in slot i of the cache
        self._cache = SlotCache(self._max_concurrent, self._context)

    # ---- the service
    def sync(self, shards: Iterable[ParameterShard], version: int) -> None:
        self._ready = False
        self.received_bytes = adopt(self.model, shards, self._dtype, self._device)
        for group in self._queue:
            group.prefill = None  # made with the weights of before
        self.version, self._ready = version, True

    def release(self) -> None:
        self._ready = False
        forget_weights(self.model)

    def _enqueue(self, group: Group) -> None:
        self._queue.append(group)

    def _unfinished(self, group_ids: set[int]) -> list[Rollout]:
        queued = [rollout for group in self._queue for rollout in group.waiting]
        return [rollout for rollout in (*queued, *self._live) if rollout.group.group_id in group_ids]

    @torch.inference_mode()
    def _end(self, rollouts: Sequence[Rollout]) -> None:
        for group in self._queue:
            self._done += [rollout for rollout in group.waiting if rollout.reason is not None]
            group.waiting = [rollout for rollout in group.waiting if rollout.reason is None]
        self._queue = deque(group for group in self._queue if group.waiting)
        self._retire()

    # ---- one step
    @torch.inference_mode()
    def _step(self) -> None:
        """Fill free slots, then sample one token for every live rollout."""
        self._admit()
        rows = self._live
        positions = np.array([rollout.position for rollout in rows])
        drawn = self._draw(rows, positions, self._logits(rows, positions))
        for slot, (token, logprob, sound) in enumerate(drawn):
            if sound:
                rows[slot].add(int(token), logprob, self.version)
            else:
                rows[slot].reason = FinishReason.ERROR
                self._cache.clear(slot)
        self._retire()

    def _logits(self, rows: Sequence[Rollout], positions: NDArray[np.int64]) -> torch.Tensor:
        """Forward of each row's last token, [rows, vocabulary]."""
        tokens = torch.tensor([[rollout.last] for rollout in rows], device=self._device)
        at = torch.from_numpy(positions).to(self._device)
        mask = self._cache.begin_step(at, int(positions.max()) + 1, self._dtype)
        out = self.model(
            input_ids=tokens, position_ids=at[:, None], attention_mask=mask, past_key_values=self._cache, use_cache=True
        )
        logits: torch.Tensor = out.logits[:, 0]
        return logits

    def _draw(
        self, rows: Sequence[Rollout], positions: NDArray[np.int64], logits: torch.Tensor
    ) -> list[tuple[float, float, float]]:
        """(token, log-probability, whether the logits were sound) of each row; the step's one wait for the device."""
        keys = np.array([rollout.key for rollout in rows], np.uint64)
        uniform = torch.from_numpy(uniforms(keys, positions.astype(np.uint64))).to(self._device)
        kinds = list(dict.fromkeys(rollout.group.rules for rollout in rows))
        table = torch.empty(len(rows), 3, dtype=torch.float64, device=self._device)  # holds token ids exactly
        for rules in kinds:
            mine: Any = slice(None)
            if len(kinds) > 1:
                mine = [slot for slot, rollout in enumerate(rows) if rollout.group.rules is rules]
            drawn = draw(logits[mine], uniform[mine], rules.sampling, rules.banned)
            table[mine] = torch.stack([part.double() for part in drawn], 1)
        values: list[tuple[float, float, float]] = table.tolist()
        return values

    def _retire(self) -> None:
        """Ended rollouts leave; the last ones move into the slots that this frees, so that live ones stay in front."""
        rows = self._live
        kept = sum(rollout.reason is None for rollout in rows)
        if kept == len(rows):
            return
        self._done += [rollout for rollout in rows if rollout.reason is not None]
        target = [slot for slot in range(kept) if rows[slot].reason is not None]
        source = [slot for slot in range(kept, len(rows)) if rows[slot].reason is None]
        if source:
            self._cache.move(source, target, max(rows[slot].position for slot in source))
        for old, new in zip(source, target, strict=True):
            rows[new] = rows[old]
        del rows[kept:]
        if not rows and not self._queue:
            self._cache = SlotCache(self._max_concurrent, self._context)  # frees its memory

    # ---- admission
    def _admit(self) -> None:
        """Move rollouts from the queue into free slots, as many as there are."""
        for batch in _prefill_batches(self._arrivals()):
            self._prefill([group for group, _ in batch if group.prefill is None])
            arriving = sum(len(rollouts) for _, rollouts in batch)
            self._cache.reserve(len(self._live) + arriving, max(len(group.prompt) for group, _ in batch))
            for group, rollouts in batch:
                at, length = len(self._live), len(group.prompt) - 1
                self._cache.insert(at, len(rollouts), group.prefill, group.prefill_row, length)
                self._live += rollouts
                if not group.waiting:
                    group.prefill = None

    def _arrivals(self) -> list[Arrival]:
        """The next rollouts that get a slot, with their group; a group that does not fit goes on waiting in part."""
        arrivals: list[Arrival] = []
        free = self._max_concurrent - len(self._live)
        while self._queue and free:
            group = self._queue[0]
            taken, group.waiting = group.waiting[:free], group.waiting[free:]
            arrivals.append((group, taken))
            free -= len(taken)
            if not group.waiting:
                self._queue.popleft()
        return arrivals

    def _prefill(self, groups: Sequence[Group]) -> None:
        """One forward over the groups' prompts less their last tokens, padded on the right; sets their `prefill`."""
        length = max((len(group.prompt) - 1 for group in groups), default=0)
        prompts = DynamicCache()
        if length:
            rows = [np.pad(group.prompt, (0, length + 1 - len(group.prompt)), "edge") for group in groups]
            tokens = torch.from_numpy(np.stack(rows)[:, :-1]).to(self._device)
            self.model.get_decoder()(input_ids=tokens, past_key_values=prompts, use_cache=True)
        for row, group in enumerate(groups):
            group.prefill, group.prefill_row = prompts, row


def _prefill_batches(arrivals: list[Arrival]) -> Iterator[list[Arrival]]:
    """Prompts of like length together, so that little of a prefill is padding; PREFILL_TOKENS at most."""
    batch: list[Arrival] = []
    for arrival in sorted(arrivals, key=lambda arrival: len(arrival[0].prompt)):
        if batch and (len(batch) + 1) * len(arrival[0].prompt) > PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(arrival)
    if batch:
        yield batch


def _context_tokens(model_config: Any, config: TransformersConfig) -> int:
    """Most tokens of prompt and response together. Errors: ConfigError, ModelError where the model cannot hold them."""
    most: int = model_config.max_position_embeddings
    context = config.max_context_tokens or most
    if context > most:
        raise ConfigError(f"rollout.max_context_tokens={context}: the model was made for at most {most}.")
    other = set(getattr(model_config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise ModelError(
            f"rollout=transformers has no cache for layers of {', '.join(sorted(other))}: choose another engine."
        )
    window: int | None = getattr(model_config, "sliding_window", None)
    if window and context > window:
        raise ModelError(
            f"rollout=transformers attends to the whole context, but this model has a sliding window of {window}: "
            f"set rollout.max_context_tokens={window} or less, or choose another engine."
        )
    return context
