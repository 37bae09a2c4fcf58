"""Which token a row draws, from which random number, with which log-probability."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.engines import Sampling
from hybridflow.workers.rollout.sampling import Drawn, draw, stream_key, uniforms

pytestmark = pytest.mark.unit

PLAIN = Sampling()
LAST = np.nextafter(1.0, 0.0)  # the largest uniform there can be


def drawn_at(logits: torch.Tensor, uniform: list[float], plan: Sampling = PLAIN, banned: tuple[int, ...] = ()) -> Drawn:
    """`draw` with the same logits [vocabulary] in each row."""
    rows = logits.expand(len(uniform), -1)
    return draw(rows, torch.tensor(uniform, dtype=torch.float64), plan, torch.tensor(banned, dtype=torch.int64))


def test_a_token_is_drawn_where_the_cumulated_probability_passes_the_uniform() -> None:
    logits = torch.tensor([0.2, 0.5, 0.3]).log()
    assert drawn_at(logits, [0.0, 0.19, 0.21, 0.69, 0.71, LAST]).tokens.tolist() == [0, 0, 1, 1, 2, 2]
    assert drawn_at(torch.zeros(4), [0.0, 0.25, 0.5, 0.75]).tokens.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dead", [[0], [2, 3, 4], [0, 1, 4]])
def test_a_token_of_no_probability_is_not_drawn_at_either_end(dead: list[int]) -> None:
    logits = torch.zeros(5)
    logits[dead] = -torch.inf
    by_logits = drawn_at(logits, [0.0, LAST]).tokens
    by_ban = drawn_at(torch.zeros(5), [0.0, LAST], banned=tuple(dead)).tokens
    assert not set(by_logits.tolist()) & set(dead)
    assert by_ban.tolist() == by_logits.tolist()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.1, 3.0, 40.0]),
    top_k=st.sampled_from([-1, 1, 2, 7, 500]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-3]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    banned=st.sets(st.integers(0, 39), max_size=30),
)
def test_no_draw_leaves_the_allowed_set(
    seed: int, spread: float, top_k: int, top_p: float, min_p: float, temperature: float, banned: set[int]
) -> None:
    random = np.random.default_rng(seed)
    logits = torch.from_numpy(random.normal(0, spread, 40).astype(np.float32))
    plan = Sampling(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    drawn = drawn_at(logits, [0.0, *random.random(50).tolist(), LAST], plan, tuple(banned))
    scores = np.where(np.isin(np.arange(40), list(banned)), -np.inf, logits.double().numpy() / temperature)
    probabilities = np.exp(scores - np.logaddexp.reduce(scores))
    assert set(drawn.tokens.tolist()) <= allowed(probabilities, top_k, top_p, min_p)
    np.testing.assert_allclose(drawn.logprobs, np.log(probabilities[drawn.tokens]), atol=1e-5, rtol=1e-5)
    assert drawn.sound.all()


def allowed(probabilities: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The most probable tokens by each rule in turn, in float64; a hair of tolerance at the borders."""
    order = np.argsort(-probabilities, kind="stable")[: top_k if top_k > 0 else None]
    mass = np.cumsum(probabilities[order]) / probabilities[order].sum()
    before = np.concatenate([[0.0], mass[:-1]])
    order = order[(before < top_p + 1e-6) & (probabilities[order] > 0)]
    return {int(token) for token in order if probabilities[token] >= min_p * probabilities.max() * (1 - 1e-5)}


def test_everything_allowed_can_be_drawn() -> None:
    logits = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log()
    grid = np.linspace(0, LAST, 400).tolist()
    for plan, expected in (
        (replace(PLAIN, top_k=3), {0, 1, 2}),
        (replace(PLAIN, top_p=0.71), {0, 1, 2}),
        (replace(PLAIN, top_p=0.69), {0, 1}),
        (replace(PLAIN, min_p=0.3), {0, 1, 2}),
        (replace(PLAIN, top_k=2, top_p=0.5), {0}),  # 0.4 of 0.7 is more than half: top-p is of what top-k left
        (PLAIN, {0, 1, 2, 3, 4}),
    ):
        assert set(drawn_at(logits, grid, plan).tokens.tolist()) == expected


def test_greedy_takes_the_most_probable_token_at_temperature_1() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 4.9]])
    plan = Sampling(temperature=0.0)
    drawn = draw(logits, torch.tensor([0.9, 0.99], dtype=torch.float64), plan, torch.tensor([0]))
    assert drawn.tokens.tolist() == [1, 2]
    expected = torch.tensor([[3.0, 2.0], [0.0, 4.9]]).log_softmax(-1)[[0, 1], [0, 1]]
    torch.testing.assert_close(drawn.logprobs, expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_case_10_a_row_with_nan_or_infinity_is_not_sound_and_the_others_are(bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    for plan in (PLAIN, Sampling(temperature=0.0), Sampling(top_k=2, top_p=0.5)):
        drawn = draw(logits, torch.full((3,), 0.5, dtype=torch.float64), plan, torch.empty(0, dtype=torch.int64))
        assert drawn.sound.tolist() == [True, False, True]
        assert ((drawn.tokens >= 0) & (drawn.tokens < 5)).all()


def test_a_vocabulary_that_is_banned_whole_is_not_sound() -> None:
    assert not drawn_at(torch.zeros(3), [0.5], banned=(0, 1, 2)).sound.any()


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    plan = Sampling(temperature=0.7, top_k=3, top_p=0.9, min_p=0.1)
    draw(logits, torch.rand(4, dtype=torch.float64), plan, torch.tensor([1]))
    draw(logits, torch.rand(4, dtype=torch.float64), PLAIN, torch.tensor([1]))
    assert (logits == before).all()


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    keys = np.array([stream_key(0, group, 0) for group in range(4000)])
    uniform = uniforms(keys, np.full(4000, 17, np.uint64)).tolist()
    counts = np.bincount(drawn_at(probabilities.log(), uniform).tokens, minlength=5)
    expected = probabilities.numpy() * 4000
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-square of 4 degrees of freedom, 99.9 %


def test_case_11_a_random_number_depends_on_seed_group_sample_and_position_alone() -> None:
    keys = np.array([stream_key(*names) for names in ((0, 3, 1), (1, 3, 1), (0, 4, 1), (0, 3, 2))])
    positions = np.arange(4, dtype=np.uint64)
    together = np.array([uniforms(keys, np.full(4, position)) for position in positions])
    assert len(np.unique(together)) == 16
    assert uniforms(keys[2:3], positions[3:]) == together[3, 2]


def test_random_numbers_are_even_and_not_correlated_with_those_of_neighbours() -> None:
    keys = np.array([stream_key(5, group, sample) for group in range(40) for sample in range(5)])
    table = np.array([uniforms(keys, np.full(200, position, np.uint64)) for position in range(100)])
    assert table.min() >= 0
    assert table.max() < 1
    counts = np.histogram(table, 50, (0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 49 + 4 * np.sqrt(2 * 49)
    for a, b in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1]), (table[:, 5:], table[:, :-5])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / np.sqrt(a.size)


def test_group_ids_and_seeds_may_be_any_64_bit_number() -> None:
    assert len({int(stream_key(seed, group, 0)) for seed in (0, -1, 2**63) for group in (0, -1, 2**62)}) == 9
