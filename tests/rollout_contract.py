"""What every rollout engine must do, as checks that know no engine.

A test module of an engine gives each of `CHECKS` a `Subject`: how to build the engine, and the same model in plain
transformers, which is the oracle. The checks sync the weights themselves and leave an engine with nothing in flight, so
that `build` may hand out one engine many times, as long as it was built for the same options.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_contract(check: Check, subject: Subject) -> None:
        check(subject)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from hybridflow.batch import Batch, concat
from hybridflow.columns import FinishReason, Ragged
from hybridflow.engines import ParameterShard, RolloutEngine, Sampling
from hybridflow.errors import BatchError, EngineError

COLUMNS = {
    "group_id",
    "sample",
    "response_ids",
    "response_mask",
    "rollout_logprobs",
    "policy_version",
    "finish_reason",
}
LENGTHS = (5, 1, 23, 12, 2, 40)
GREEDY = Sampling(temperature=0.0, max_new_tokens=12)


class Build(Protocol):
    """An engine over the subject's model folder, without weights."""

    def __call__(
        self, *, seed: int = 0, max_context_tokens: int | None = None, max_concurrent: int = 256
    ) -> RolloutEngine: ...


@dataclass(frozen=True)
class Subject:
    """An engine under test.

    model: the transformers model of the weights to sync, fp32. repeats: the same seed gives the same tokens whatever
    else is in flight. renormalises: where top-k, top-p or min-p narrow the draw, log-probabilities are those of what is
    left. tolerance: of log-probabilities against the model's.
    """

    build: Build
    model: Any
    tokenizer: Any
    repeats: bool = True
    renormalises: bool = False
    tolerance: float = 1e-5

    def started(self, version: int = 1, **options: Any) -> RolloutEngine:
        """An engine with the model's weights."""
        engine = self.build(**options)
        engine.sync(shards_of(self.model), version)
        return engine


Check = Callable[[Subject], None]
CHECKS: list[Check] = []


def contract(check: Check) -> Check:
    """Every engine must pass this check."""
    CHECKS.append(check)
    return check


# ---- helpers
def shards_of(model: Any) -> list[ParameterShard]:
    """All parameters of a transformers model, as one rank that holds them whole gives them to `sync`."""
    return [
        ParameterShard(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor.detach())
        for name, tensor in model.named_parameters()
    ]


def prompts_of(lengths: Sequence[int] = LENGTHS, first_group: int = 0, seed: int = 0) -> Batch:
    """Random prompts of these lengths, of tokens that are characters; group ids count up from `first_group`."""
    random = np.random.default_rng(seed)
    rows = [random.integers(3, 99, length) for length in lengths]
    return Batch({"prompt_ids": Ragged.from_rows(rows, np.int64), "group_id": first_group + np.arange(len(rows))})


def drain(engine: RolloutEngine) -> Batch:
    """All that is in flight, by group and sample."""
    rows = concat(list(engine.completed()))
    return rows.take(np.lexsort((rows.array("sample"), rows.array("group_id"))))


def responses(rollouts: Batch) -> list[list[int]]:
    return [ids.tolist() for ids in rollouts.ragged("response_ids")]


def reasons(rollouts: Batch) -> list[FinishReason]:
    return [FinishReason(reason) for reason in rollouts.array("finish_reason")]


def log_softmax_of(
    model: Any, prompt: Any, response: Any, temperature: float, banned: Sequence[int] = ()
) -> torch.Tensor:
    """The model's log-probabilities [len(response), vocabulary] of each next token, from one plain forward."""
    ids = torch.tensor([[*map(int, prompt), *map(int, response)]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    logits[:, list(banned)] = -torch.inf
    return (logits / temperature).log_softmax(-1)


def each(prompts: Batch, rollouts: Batch, n: int) -> Iterator[tuple[Any, Any, Any]]:
    """(prompt, response, its rollout_logprobs) of each rollout in the order of `generate`."""
    columns = rollouts.ragged("response_ids"), rollouts.ragged("rollout_logprobs")
    for row, (response, logprobs) in enumerate(zip(*columns, strict=True)):
        yield prompts.ragged("prompt_ids")[row // n], response, logprobs


def greedy_by_transformers(model: Any, prompt: Any, tokens: int) -> list[int]:
    """What model.generate gives for this prompt alone."""
    ids = torch.tensor([prompt.tolist()])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens)
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


# ---- numbers
@contract
def greedy_equals_transformers_token_for_token(subject: Subject) -> None:
    prompts = prompts_of()
    rollouts = subject.started().generate(prompts, replace(GREEDY, max_new_tokens=24))
    expected = [greedy_by_transformers(subject.model, prompt, 24) for prompt in prompts.ragged("prompt_ids")]
    assert responses(rollouts) == expected


@contract
def rollouts_have_the_contract_s_columns(subject: Subject) -> None:
    rollouts = subject.started(version=3).generate(prompts_of(), Sampling(n=2, max_new_tokens=6))
    assert set(rollouts.names) == COLUMNS
    assert rollouts.array("group_id").tolist() == [group for group in range(len(LENGTHS)) for _ in range(2)]
    assert rollouts.array("sample").tolist() == [0, 1] * len(LENGTHS)
    assert rollouts.ragged("response_mask").values.all()
    assert set(rollouts.ragged("policy_version").values) == {3}


@contract
def case_06_rollout_logprobs_are_the_model_s_at_the_sampling_temperature(subject: Subject) -> None:
    engine, prompts = subject.started(), prompts_of()
    for group, temperature in ((0, 0.7), (100, 1.0), (200, 1.5)):
        sampling = Sampling(n=2, temperature=temperature, max_new_tokens=16)
        rollouts = engine.generate(_regrouped(prompts, group), sampling)
        for prompt, response, logprobs in each(prompts, rollouts, 2):
            expected = log_softmax_of(subject.model, prompt, response, temperature)
            np.testing.assert_allclose(
                logprobs, expected[range(len(response)), response.tolist()], atol=subject.tolerance
            )


@contract
def greedy_logprobs_are_those_of_temperature_1(subject: Subject) -> None:
    prompts = prompts_of()
    for prompt, response, logprobs in each(prompts, subject.started().generate(prompts, GREEDY), 1):
        expected = log_softmax_of(subject.model, prompt, response, 1.0)
        np.testing.assert_allclose(logprobs, expected[range(len(response)), response.tolist()], atol=subject.tolerance)


@contract
def case_06_banned_tokens_are_never_sampled_and_leave_the_logprobs(subject: Subject) -> None:
    prompts, banned = prompts_of(), tuple(range(20, 90))
    rollouts = subject.started().generate(prompts, Sampling(n=2, max_new_tokens=16, banned_tokens=banned))
    assert not np.isin(rollouts.ragged("response_ids").values, banned).any()
    for prompt, response, logprobs in each(prompts, rollouts, 2):
        expected = log_softmax_of(subject.model, prompt, response, 1.0, banned)
        np.testing.assert_allclose(logprobs, expected[range(len(response)), response.tolist()], atol=subject.tolerance)


@contract
def first_tokens_are_distributed_as_the_softmax(subject: Subject) -> None:
    prompts, n = prompts_of([9]), 2048
    rollouts = subject.started().generate(prompts, Sampling(n=n, temperature=0.8, max_new_tokens=1))
    probabilities = log_softmax_of(subject.model, prompts.ragged("prompt_ids")[0], [0], 0.8)[0].exp().double().numpy()
    counts = np.bincount(rollouts.ragged("response_ids").values, minlength=len(probabilities))
    often = probabilities * n >= 5  # the rest is one bin, as the test asks for
    rest = int((~often).any())
    observed = np.append(counts[often], [counts[~often].sum()] * rest)
    expected = np.append(probabilities[often], [probabilities[~often].sum()] * rest) * n
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


@contract
def narrowed_sampling_stays_inside_top_k_top_p_and_min_p(subject: Subject) -> None:
    engine, prompts = subject.started(), prompts_of()
    plans = (Sampling(top_k=3), Sampling(top_p=0.4), Sampling(min_p=0.3), Sampling(top_k=8, top_p=0.8, min_p=0.1))
    for number, plan in enumerate(plans):
        plan = replace(plan, n=2, temperature=0.9, max_new_tokens=12)
        rollouts = engine.generate(_regrouped(prompts, 100 * number), plan)
        for prompt, response, logprobs in each(prompts, rollouts, 2):
            table = log_softmax_of(subject.model, prompt, response, 0.9)
            whole = table[range(len(response)), response.tolist()]
            if not subject.renormalises:
                np.testing.assert_allclose(logprobs, whole, atol=subject.tolerance)
            for token, row in zip(response, table.exp().double().numpy(), strict=True):
                assert token in _allowed(row, plan)


def _allowed(probabilities: Any, plan: Sampling) -> list[int]:
    """Tokens inside top-k, then top-p of what is left, then min-p; those at the very border count as inside."""
    order = np.argsort(-probabilities)[: plan.top_k if plan.top_k > 0 else None]
    sorted_mass = probabilities[order] / probabilities[order].sum()
    order = order[np.cumsum(sorted_mass) - sorted_mass < plan.top_p + 1e-5]
    return [int(t) for t in order if probabilities[t] >= plan.min_p * probabilities.max() - 1e-6]


@contract
def case_11_the_seed_controls_the_rollout(subject: Subject) -> None:
    sampling = Sampling(n=3, max_new_tokens=12)
    first, again = (subject.started(seed=7).generate(prompts_of(), sampling) for _ in range(2))
    other = subject.started(seed=8).generate(prompts_of(), sampling)
    if subject.repeats:
        assert responses(first) == responses(again)
        assert (first.ragged("rollout_logprobs").values == again.ragged("rollout_logprobs").values).all()
    assert responses(first) != responses(other)


@contract
def samples_of_a_group_and_draws_of_a_prompt_differ(subject: Subject) -> None:
    engine = subject.started()
    rollouts = engine.generate(prompts_of([9]), Sampling(n=8, max_new_tokens=8))
    later = engine.generate(prompts_of([9], first_group=1), Sampling(n=8, max_new_tokens=8))
    assert len({tuple(ids) for ids in responses(rollouts) + responses(later)}) == 16


@contract
def a_row_s_tokens_do_not_depend_on_the_other_rows(subject: Subject) -> None:
    if not subject.repeats:
        return
    sampling, prompts = Sampling(n=2, max_new_tokens=16), prompts_of()
    together = responses(subject.started().generate(prompts, sampling))
    for row in (0, 3):
        assert responses(subject.started().generate(prompts.take([row]), sampling)) == together[2 * row : 2 * row + 2]


@contract
def few_rows_at_a_time_give_the_same_as_all_at_once(subject: Subject) -> None:
    prompts = prompts_of()
    sampling = Sampling(n=4, temperature=1.0 if subject.repeats else 0.0, max_new_tokens=16)
    together = subject.started().generate(prompts, sampling)
    in_turn = subject.started(max_concurrent=3).generate(prompts, sampling)
    assert responses(together) == responses(in_turn)
    logprobs = (rollouts.ragged("rollout_logprobs").values for rollouts in (together, in_turn))
    np.testing.assert_allclose(*logprobs, atol=subject.tolerance)


# ---- ends
@contract
def a_stop_token_ends_the_response_and_is_part_of_it(subject: Subject) -> None:
    engine, prompts = subject.started(), prompts_of()
    free = responses(engine.generate(prompts, GREEDY))
    stop = free[0][4]
    stopped = engine.generate(prompts, replace(GREEDY, stop=(stop,)))
    for whole, cut, reason in zip(free, responses(stopped), reasons(stopped), strict=True):
        assert cut == (whole[: whole.index(stop) + 1] if stop in whole else whole)
        assert reason == (FinishReason.STOP if stop in whole else FinishReason.LENGTH)


@contract
def the_model_s_end_token_stops_without_being_named(subject: Subject) -> None:
    end = subject.tokenizer.eos_token_id
    only_ends = tuple(token for token in range(subject.model.config.vocab_size) if token != end)
    rollouts = subject.started().generate(prompts_of(), Sampling(banned_tokens=only_ends))
    assert responses(rollouts) == [[end]] * len(LENGTHS)
    assert set(reasons(rollouts)) == {FinishReason.STOP}


@contract
def a_stop_string_ends_the_response_across_token_borders(subject: Subject) -> None:
    engine, prompts = subject.started(), prompts_of()
    sampling = replace(GREEDY, max_new_tokens=24)
    free = responses(engine.generate(prompts, sampling))
    texts = [[subject.tokenizer.decode(ids[:k]) for k in range(1, len(ids) + 1)] for ids in free]
    stop = texts[0][-1][5:8]
    assert len(stop) == 3
    stopped = engine.generate(prompts, replace(sampling, stop=(stop, "never there")))
    for whole, prefixes, cut in zip(free, texts, responses(stopped), strict=True):
        found = [k for k, text in enumerate(prefixes, 1) if stop in text]
        assert cut == whole[: found[0] if found else None]
    assert reasons(stopped)[0] == FinishReason.STOP


@contract
def case_13_the_turn_s_limit_and_the_context_s_never_mix(subject: Subject) -> None:
    engine = subject.started(max_context_tokens=12)
    rollouts = engine.generate(prompts_of([10, 3, 11]), replace(GREEDY, max_new_tokens=8))
    assert rollouts.ragged("response_ids").lengths.tolist() == [2, 8, 1]
    assert set(reasons(rollouts)) == {FinishReason.LENGTH}


@contract
def case_13_a_prompt_that_fills_the_context_is_refused(subject: Subject) -> None:
    engine = subject.started(max_context_tokens=12)
    with pytest.raises(BatchError, match=r"row 1 .* 12 tokens.* 12 "):
        engine.submit(prompts_of([3, 12]), GREEDY)
    assert engine.pending == 0


@contract
def an_empty_prompt_is_refused(subject: Subject) -> None:
    engine = subject.started()
    with pytest.raises(BatchError, match="row 1 has an empty prompt"):
        engine.submit(prompts_of([3, 0]), GREEDY)
    assert engine.pending == 0


# ---- the service
@contract
def a_group_may_be_in_flight_once(subject: Subject) -> None:
    engine = subject.started()
    twice = prompts_of([3, 4]).take([0, 0])
    with pytest.raises(BatchError, match=r"sampling\.n"):
        engine.submit(twice, GREEDY)
    engine.submit(prompts_of([3]), GREEDY)
    with pytest.raises(BatchError, match="group_id 0 is in flight"):
        engine.submit(prompts_of([3]), GREEDY)
    assert len(drain(engine)) == 1
    engine.submit(prompts_of([3]), GREEDY)
    assert len(drain(engine)) == 1


@contract
def rollouts_come_out_as_they_finish(subject: Subject) -> None:
    engine = subject.started()
    engine.submit(prompts_of([5]), replace(GREEDY, max_new_tokens=60))
    engine.submit(prompts_of([5], first_group=1), replace(GREEDY, max_new_tokens=2))
    assert engine.pending == 2
    order, left = [], []
    for part in engine.completed():
        order += part.array("group_id").tolist()
        left.append(engine.pending)
    assert order == [1, 0]
    assert left == [1, 0]


@contract
def rows_may_be_submitted_while_others_are_decoded(subject: Subject) -> None:
    engine, prompts = subject.started(), prompts_of()
    expected = responses(engine.generate(prompts, GREEDY))
    engine.submit(prompts.take([0, 1]), replace(GREEDY, max_new_tokens=3))
    engine.submit(prompts.take([2, 3]), GREEDY)
    stream = engine.completed()
    parts = [next(stream)]
    engine.submit(prompts.take([4, 5]), GREEDY)
    rollouts = concat([*parts, *stream])
    got = dict(zip(rollouts.array("group_id").tolist(), responses(rollouts), strict=True))
    assert got == {row: ids[: 3 if row < 2 else None] for row, ids in enumerate(expected)}


@contract
def generate_orders_rows_and_reports_progress(subject: Subject) -> None:
    engine, seen = subject.started(), list[tuple[int, int]]()
    prompts = prompts_of().take([3, 0, 5])
    rollouts = engine.generate(prompts, Sampling(n=2, max_new_tokens=5), lambda done, total: seen.append((done, total)))
    assert rollouts.array("group_id").tolist() == [3, 3, 0, 0, 5, 5]
    assert rollouts.array("sample").tolist() == [0, 1] * 3
    assert seen[-1] == (6, 6)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@contract
def aborted_rollouts_come_out_with_what_was_sampled(subject: Subject) -> None:
    engine, prompts = subject.started(max_concurrent=3), prompts_of()
    long = replace(GREEDY, max_new_tokens=200)
    expected = responses(engine.generate(prompts, long))
    engine.submit(prompts.take([0]), replace(GREEDY, max_new_tokens=4))
    engine.submit(prompts.take([1, 2, 3, 4]), long)
    stream = engine.completed()
    first = next(stream)
    assert first.array("group_id").tolist() == [0]
    assert engine.abort([0, 1, 4, 99]) == 2  # 0 has finished, 99 was never there
    rollouts = concat([first, *stream])
    ends = zip(responses(rollouts), reasons(rollouts), strict=True)
    got = dict(zip(rollouts.array("group_id").tolist(), ends, strict=True))
    assert sorted(got) == [0, 1, 2, 3, 4]
    assert got[4] == ([], FinishReason.ABORT)  # it was waiting
    partial, reason = got[1]
    assert reason == FinishReason.ABORT
    assert 0 < len(partial) < len(expected[1])
    assert partial == expected[1][: len(partial)]
    assert (got[2][0], got[3][0]) == (expected[2], expected[3])


@contract
def abort_without_names_ends_all(subject: Subject) -> None:
    engine = subject.started(max_concurrent=2)
    engine.submit(prompts_of([3, 4, 5]), Sampling(n=2))
    assert engine.abort() == 6
    rollouts = drain(engine)
    assert set(reasons(rollouts)) == {FinishReason.ABORT}
    assert engine.pending == 0
    assert engine.abort() == 0


# ---- weights
@contract
def tokens_carry_the_version_that_sampled_them(subject: Subject) -> None:
    engine, prompts = subject.started(version=2), prompts_of([4, 6])
    assert engine.version == 2
    first = engine.generate(prompts, GREEDY)
    engine.sync(shards_of(subject.model), 5)
    assert engine.version == 5
    second = engine.generate(prompts, GREEDY)
    assert set(first.ragged("policy_version").values) == {2}
    assert set(second.ragged("policy_version").values) == {5}


@contract
def case_19_synced_weights_are_sampled_with(subject: Subject) -> None:
    engine, prompts = subject.started(), prompts_of()
    before = responses(engine.generate(prompts, GREEDY))
    changed = [replace(shard, tensor=_rolled(shard.tensor)) for shard in shards_of(subject.model)]
    engine.sync(changed, 2)
    assert responses(engine.generate(prompts, GREEDY)) != before
    engine.sync(shards_of(subject.model), 3)
    assert responses(engine.generate(prompts, GREEDY)) == before


@contract
def sampling_before_the_first_sync_is_refused(subject: Subject) -> None:
    with pytest.raises(EngineError, match="sync"):
        subject.build(seed=1234).generate(prompts_of(), GREEDY)


@contract
def released_weights_are_not_sampled_with_until_they_are_synced_again(subject: Subject) -> None:
    engine, prompts = subject.started(version=2), prompts_of()
    before = responses(engine.generate(prompts, GREEDY))
    for _ in range(2):
        engine.release()
    with pytest.raises(EngineError, match="sync"):
        engine.generate(prompts, GREEDY)
    assert engine.pending == 0
    engine.sync(shards_of(subject.model), 2)
    assert responses(engine.generate(prompts, GREEDY)) == before


@contract
def case_23_a_wrong_set_of_weights_is_refused_by_name(subject: Subject) -> None:
    shards = shards_of(subject.model)
    last = shards[-1].name
    wrong: list[tuple[list[ParameterShard], str]] = [
        (shards[:-1], last),
        ([], shards[0].name),
        ([*shards, replace(shards[-1], name="model.layers.9.odd")], "model.layers.9.odd"),
        ([*shards[:-1], _misshapen(shards[-1])], last),
    ]
    for parts, name in wrong:
        engine = subject.started()
        with pytest.raises(EngineError, match=name.replace(".", r"\.")):
            engine.sync(iter(parts), 2)
        with pytest.raises(EngineError, match="sync"):
            engine.generate(prompts_of(), GREEDY)
        assert engine.pending == 0
        engine.sync(shards, 3)
        assert len(engine.generate(prompts_of(), GREEDY)) == len(LENGTHS)


@contract
def case_10_nan_ends_a_rollout_as_an_error(subject: Subject) -> None:
    engine = subject.started()
    engine.sync([replace(s, tensor=torch.full_like(s.tensor, torch.nan)) for s in shards_of(subject.model)], 2)
    rollouts = engine.generate(prompts_of(), Sampling(n=2))
    assert set(reasons(rollouts)) == {FinishReason.ERROR}
    assert responses(rollouts) == [[]] * 2 * len(LENGTHS)
    engine.sync(shards_of(subject.model), 3)
    healthy = engine.generate(prompts_of(), GREEDY)
    assert responses(healthy) == responses(subject.started().generate(prompts_of(), GREEDY))


def _regrouped(prompts: Batch, first: int) -> Batch:
    return prompts.drop("group_id") | Batch({"group_id": first + np.arange(len(prompts))})


def _rolled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.roll(1, 0)


def _misshapen(shard: ParameterShard) -> ParameterShard:
    longer = torch.cat([shard.tensor, shard.tensor[:1]])
    return replace(shard, tensor=longer, shape=tuple(longer.shape))
