"""rollout=vllm: vLLM's engine in the actor's own process.

    submit --add_request, one a sample--> vLLM's scheduler --a token a step and request--> done --> completed()

vLLM schedules, keeps keys and values, and samples; what ends a response is decided here, by the same rules for all
engines. Its log-probabilities are taken after temperature and banned tokens, as a trainer mirrors them.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist

from ...columns import FinishReason
from ...device import init_process_group_once, is_accelerated, kept_state
from ...engines import ParameterShard
from ...errors import ConfigError, did_you_mean
from ..models.config import ModelConfig
from ..models.loading import empty_causal_lm, load_tokenizer, model_path
from .config import VLLMConfig
from .embedded import EmbeddedRollout, end_ids
from .requests import Group, Rollout
from .weights import Manifest

REMEDY = "Install vLLM: pip install vllm; on a CPU `make vllm-env` in the clone makes an environment with it."
SEED_BITS = 63
CPU_CACHE_BYTES = 1 << 30
"""Keys and values on a CPU, where a share of the memory would be taken from the other processes of the machine."""
KEYS = {
    "model": "model.path",
    "dtype": "training.precision",
    "max_model_len": "rollout.max_context_tokens",
    "max_num_seqs": "rollout.max_concurrent",
    "gpu_memory_utilization": "rollout.memory_fraction",
}
"""Arguments of vLLM that have a key of their own."""
FIXED: dict[str, Any] = {
    "load_format": "dummy",  # weights come with a sync
    "enable_chunked_prefill": False,  # a part of a prompt would disturb the random numbers of its request
    "skip_tokenizer_init": True,
    "logprobs_mode": "processed_logprobs",
    "async_scheduling": False,
    "disable_log_stats": True,
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads are the host's to choose
}


class VLLMRollout(EmbeddedRollout):
    """Starts without weights, and refuses to sample before the first sync. What was in flight waits over a sync, and
    goes on from the keys and values it has."""

    def __init__(self, model: ModelConfig, config: VLLMConfig, *, seed: int, dtype: torch.dtype) -> None:
        if not is_accelerated() and config.memory_fraction != VLLMConfig.memory_fraction:
            raise ConfigError(
                f"rollout.memory_fraction={config.memory_fraction} is not read on a CPU: say how much memory keys and "
                "values may take with rollout.options.kv_cache_memory_bytes."
            )
        folder, tokenizer = model_path(model.path), load_tokenizer(model)
        empty = empty_causal_lm(folder, model, dtype)
        most = empty.config.max_position_embeddings
        context = config.max_context_tokens or most
        if context > most:
            raise ConfigError(f"rollout.max_context_tokens={context}: the model was made for at most {most}.")
        ends, vocabulary = end_ids(folder, empty.config, tokenizer), empty.config.vocab_size
        super().__init__(tokenizer, ends, context=context, vocabulary=vocabulary, seed=seed)
        self._manifest = Manifest.of(empty)
        self._requests: dict[str, Rollout] = {}
        ours = {
            "model": folder,
            "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": context,
            "max_num_seqs": config.max_concurrent,
            "gpu_memory_utilization": config.memory_fraction,
        }
        self._engine = _engine(ours, config.options)

    # ---- the service
    def sync(self, shards: Iterable[ParameterShard], version: int) -> None:
        self._ready = False
        received: list[int] = []

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for shard in self._manifest.checked(shards):
                received.append(shard.received)
                yield shard.name, shard.tensor.detach()

        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights()})
        self._engine.collective_rpc(_pack_tied)
        self._engine.reset_prefix_cache()
        self.received_bytes, self.version, self._ready = sum(received), version, True

    def release(self) -> None:
        self._ready = False

    def _enqueue(self, group: Group) -> None:
        for rollout in group.waiting:
            name = f"{group.group_id}.{rollout.sample}"
            self._requests[name] = rollout
            prompt: Any = {"prompt_token_ids": group.prompt.tolist()}
            self._engine.add_request(name, prompt, self._parameters(rollout))
        group.waiting = []

    def _unfinished(self, group_ids: set[int]) -> list[Rollout]:
        return [rollout for rollout in self._requests.values() if rollout.group.group_id in group_ids]

    def _end(self, rollouts: Sequence[Rollout]) -> None:
        names = [f"{rollout.group.group_id}.{rollout.sample}" for rollout in rollouts]
        self._engine.abort_request(names)
        self._done += [self._requests.pop(name) for name in names]

    # ---- one step
    def _step(self) -> None:
        """One step of vLLM's scheduler: a token for every request that it decodes."""
        ended = []
        for output in self._engine.step():
            rollout = self._requests.get(output.request_id)
            if rollout is None:
                continue
            [made] = output.outputs
            for token, logprobs in zip(made.token_ids, made.logprobs or (), strict=True):
                self._add(rollout, token, logprobs[token].logprob)
            if rollout.reason is not None:
                ended.append(rollout)
        self._end(ended)
        if any(rollout.reason is FinishReason.ERROR for rollout in ended):
            self._engine.collective_rpc(_clean_cache)

    def _add(self, rollout: Rollout, token: int, logprob: float) -> None:
        """A token that was sampled, unless the rollout has ended before it."""
        if rollout.reason is not None:
            return
        if isfinite(logprob):
            rollout.add(token, logprob, self.version)
        else:
            rollout.reason = FinishReason.ERROR

    def _parameters(self, rollout: Rollout) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = rollout.group.rules.sampling
        allowed = None
        if sampling.banned_tokens:
            allowed = sorted(set(range(self._vocabulary)) - set(sampling.banned_tokens))
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(0, sampling.top_k),
            min_p=sampling.min_p,
            seed=int(rollout.key) & ((1 << SEED_BITS) - 1),
            max_tokens=rollout.group.limit,
            ignore_eos=True,
            allowed_token_ids=allowed,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )


def _pack_tied(worker: Any) -> None:
    """On a CPU vLLM multiplies by packed copies of weights. A head that is tied to the embeddings has one too, which a
    reload passes by: the head has no weights of its own."""
    for module in worker.model_runner.get_model().modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def _clean_cache(worker: Any) -> None:
    """No NaN stays among the keys and values: attention multiplies what it masks by 0, and NaN times 0 is NaN."""
    for cache in worker.model_runner.kv_caches:
        cache.nan_to_num_(0.0, 0.0, 0.0)


def _device_arguments() -> dict[str, Any]:
    """What differs between devices."""
    return {} if is_accelerated() else {"kv_cache_memory_bytes": CPU_CACHE_BYTES}


def _check_options(options: dict[str, Any], known: Sequence[str]) -> None:
    for name in options:
        if name in KEYS:
            raise ConfigError(f"rollout.options.{name}: say {KEYS[name]}.")
        if name in FIXED:
            raise ConfigError(f"rollout.options.{name}: it is always {FIXED[name]} here; leave it out.")
        if name not in known:
            raise ConfigError(f"rollout.options.{name}: vLLM has no such argument.{did_you_mean(name, known)}")


def _engine(ours: dict[str, Any], options: dict[str, Any]) -> Any:
    """vLLM's engine, with dummy weights. Errors: ConfigError for an option that vLLM does not know or take."""
    init_process_group_once()
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # which a CPU does without
    with kept_state(), warnings.catch_warnings(), _launched() as launched:
        warnings.simplefilter("ignore")
        try:
            from vllm import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine
        except ModuleNotFoundError as error:
            raise ConfigError(f"rollout=vllm: {error}. {REMEDY}") from error
        _check_options(options, [field.name for field in fields(EngineArgs)])
        changeable = {"enforce_eager": True, **_device_arguments(), **options}
        try:
            return LLMEngine.from_engine_args(EngineArgs(**changeable, **FIXED, **launched, **ours))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"rollout=vllm: {error}") from error


@contextmanager
def _launched() -> Iterator[dict[str, Any]]:
    """Arguments for this process to be one of those that a launcher started: each of them an engine of its own, on the
    one device that it sees."""
    if dist.get_world_size() == 1:
        yield {}
        return
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    before = dict(os.environ)
    os.environ |= {"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": "1"}
    try:
        yield {"distributed_executor_backend": "external_launcher"}
    finally:
        os.environ.clear()
        os.environ.update(before)
