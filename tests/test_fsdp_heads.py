"""Values and scores of the training engine, and their gradients, against plain padded transformers and autograd."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.algorithms.objective import PairObjective, TokenObjective
from hybridflow.algorithms.registry import Loss
from hybridflow.batch import Batch
from hybridflow.errors import BatchError, EngineError, ModelError
from hybridflow.workers.training.fsdp import FSDPEngine
from hybridflow.workers.training.heads import pack_whole
from tests.fsdp_oracle import engine, gradients, largest_difference, random_batch, same, weights
from tests.models import FAMILIES, tiny_model_folder

pytestmark = pytest.mark.fsdp

HIDDEN, CLIP, PAD = 64, 0.3, 0
HEAD_WEIGHT = 0.2 * torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(0))
VALUES = TokenObjective(Loss("value_clip", clip_value=CLIP), AlgorithmConfig(), 32, "value")
SCORES = PairObjective(Loss("bradley_terry", centering=0.1), AlgorithmConfig(), 32)


def with_columns(batch: Batch) -> Batch:
    """The batch with what the two losses read."""
    rng = np.random.default_rng(1)
    responses = batch.ragged("response_ids")
    tokens = {
        name: responses.with_values(rng.normal(size=len(responses.values)).astype(np.float32))
        for name in ("old_values", "returns")
    }
    margin = np.repeat(rng.random((len(batch) + 1) // 2), 2)[: len(batch)].astype(np.float32)
    return batch | Batch({**tokens, "chosen": np.arange(len(batch)) % 2 == 0, "margin": margin})


BATCH = with_columns(random_batch(24))


def scalar_engine(path: Path, head: str, **options: Any) -> FSDPEngine:
    """An engine whose head is not zero."""
    of = engine(path, head=head, **options)
    next(shard for shard in of.parameters() if shard.name == "score.weight").tensor.copy_(HEAD_WEIGHT)
    return of


def plain(path: Path) -> tuple[Any, torch.nn.Linear]:
    """The model's body and the same head, by transformers' and torch's own means."""
    head = torch.nn.Linear(HIDDEN, 1, bias=False)
    with torch.no_grad():
        head.weight.copy_(HEAD_WEIGHT)
    return AutoModel.from_pretrained(path, dtype=torch.float32), head


def padded_numbers(body: Any, head: torch.nn.Linear, batch: Batch) -> list[torch.Tensor]:
    """The head's number at every position of each row, from one right-padded forward."""
    rows = [np.concatenate([p, r]) for p, r in zip(batch["prompt_ids"], batch["response_ids"], strict=True)]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.from_numpy(row)
        mask[i, : len(row)] = 1
    numbers = head(body(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state).squeeze(-1)
    return [numbers[i, : len(row)] for i, row in enumerate(rows)]


def plain_values(body: Any, head: torch.nn.Linear, batch: Batch) -> list[torch.Tensor]:
    """Of the state before each response token."""
    starts = batch["prompt_ids"].lengths - 1
    return [row[start:-1] for row, start in zip(padded_numbers(body, head, batch), starts, strict=True)]


def plain_scores(body: Any, head: torch.nn.Linear, batch: Batch) -> torch.Tensor:
    """At the last token of each row."""
    return torch.stack([row[-1] for row in padded_numbers(body, head, batch)])


def value_loss(path: Path, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """PPO's clipped value loss, averaged over the sampled tokens of kept rows."""
    body, head = plain(path)
    terms = []
    for i, values in enumerate(plain_values(body, head, batch)):
        if batch["keep"][i]:
            old, returns = (torch.from_numpy(batch[name][i].copy()) for name in ("old_values", "returns"))
            clipped = old + (values - old).clamp(-CLIP, CLIP)
            errors = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) / 2
            terms.append(errors[torch.from_numpy(batch["response_mask"][i].copy())])
    return backward(torch.cat(terms).mean(), body, head)


def pair_loss(path: Path, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Bradley-Terry over the pairs of which both rows are kept and have a sampled token."""
    body, head = plain(path)
    scores = plain_scores(body, head, batch)
    counts = [bool(batch["keep"][i] and batch["response_mask"][i].any()) for i in range(len(batch))]
    terms = []
    for i in range(0, len(batch), 2):
        if counts[i] and counts[i + 1]:
            gap = scores[i] - scores[i + 1] - batch["margin"][i]
            terms.append(-torch.nn.functional.logsigmoid(gap) + 0.1 * (scores[i] + scores[i + 1]) ** 2)
    assert len(terms) > 1
    return backward(torch.stack(terms).mean(), body, head)


def backward(loss: torch.Tensor, body: Any, head: torch.nn.Linear) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and its gradients under the engine's names."""
    loss.backward()
    grads = {f"model.{name}": p.grad.clone() for name, p in body.named_parameters()}
    return loss.item(), {**grads, "score.weight": head.weight.grad.clone()}


CASES: dict[str, tuple[Any, Callable[..., Any]]] = {"value": (VALUES, value_loss), "score": (SCORES, pair_loss)}


@pytest.fixture(scope="module", params=list(CASES))
def trained(request: pytest.FixtureRequest, tiny_model: Path) -> Any:
    """Objective, engine, and what plain transformers gives, for tests that take no optimizer step."""
    objective, oracle = CASES[request.param]
    return objective, scalar_engine(tiny_model, request.param), oracle(tiny_model, BATCH)


# ---- what is read
@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_read_before_each_token_and_scores_at_the_last(family: str, tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, family, tied=family == "qwen2")
    body, head = plain(folder)
    sampled = BATCH["response_mask"].values
    values = scalar_engine(folder, "value", tokens_per_microbatch=90).forward(BATCH, ["values"])["values"]
    expected = torch.cat(plain_values(body, head, BATCH)).detach().numpy()
    np.testing.assert_allclose(values.values, np.where(sampled, expected, 0), atol=1e-5)
    scores = scalar_engine(folder, "score", tokens_per_microbatch=90).forward(BATCH, ["score"])["score"]
    np.testing.assert_allclose(scores, plain_scores(body, head, BATCH).detach().numpy(), atol=1e-5)


def test_a_score_needs_no_sampled_token_and_no_response(tiny_model: Path) -> None:
    batch = Batch({"prompt_ids": [[5, 6], [], [7]], "response_ids": [[], [5, 6], [8]]}, np.array([3, 1, 2]))
    scored = scalar_engine(tiny_model, "score").forward(batch, ["score"])
    assert scored.ids.tolist() == [3, 1, 2]
    assert scored["score"][0] == pytest.approx(scored["score"][1], abs=1e-6)
    with pytest.raises(BatchError, match="row 1 has no token"):
        scalar_engine(tiny_model, "score").forward(
            Batch({"prompt_ids": [[5], []], "response_ids": [[], []]}), ["score"]
        )


def test_a_score_is_read_at_the_last_token_that_is_no_padding() -> None:
    batch = Batch({"prompt_ids": [[5, PAD], [PAD], [7]], "response_ids": [[6, PAD, PAD], [PAD], [8, 9]]})
    packed = pack_whole(batch, PAD)
    assert packed.read.tolist() == [2, 5, 9]
    assert packed.input_ids.tolist() == [5, PAD, 6, PAD, PAD, PAD, PAD, 7, 8, 9]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2]
    assert pack_whole(batch, None).read.tolist() == [4, 6, 9]


def test_a_new_head_is_zero_and_an_output_of_another_head_is_an_error(tiny_model: Path) -> None:
    critic, model = engine(tiny_model, head="value"), engine(tiny_model, head="score")
    assert not critic.forward(BATCH, ["values"])["values"].values.any()
    assert not model.forward(BATCH, ["score"])["score"].any()
    with pytest.raises(BatchError, match=r"no output \['logprobs'\]; there are values"):
        critic.forward(BATCH, ["logprobs"])


def test_case_10_a_nan_is_an_error_in_a_value_and_left_to_the_caller_in_a_score(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    batch = Batch({"prompt_ids": [[4], [4, 9]], "response_ids": [[5, 6], [8, 7]], "group_id": [3, 8]})
    for head in ("value", "score"):
        broken = scalar_engine(folder, head)
        next(shard for shard in broken.parameters() if "embed_tokens" in shard.name).tensor[9] = torch.nan
        if head == "value":
            with pytest.raises(
                EngineError, match=r"values is nan at response token 0 \(id 8\) of row 1 \(group_id 8\)"
            ):
                broken.forward(batch, ["values"])
        else:
            assert np.isnan(broken.forward(batch, ["score"])["score"]).tolist() == [False, True]


# ---- what is learned
def test_loss_and_gradients_are_those_of_plain_transformers(trained: Any) -> None:
    objective, trainer, (loss, grads) = trained
    trainer._config.tokens_per_microbatch = 10_000
    found, metrics = gradients(trainer, BATCH, objective)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert largest_difference(found, grads) < 1e-5
    assert found["score.weight"].abs().max() > 1e-3


PAIRS = len(BATCH) // 2


@settings(max_examples=8)
@given(budget=st.integers(1, 400), order=st.permutations(range(PAIRS)))
def test_case_01_neither_the_cut_nor_the_order_changes_loss_or_gradient(
    trained: Any, budget: int, order: list[int]
) -> None:
    objective, trainer, (loss, grads) = trained
    trainer._config.tokens_per_microbatch = budget
    rows = [row for pair in order for row in (2 * pair + 1, 2 * pair)]
    found, metrics = gradients(trainer, BATCH.take(rows), objective)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert largest_difference(found, grads) < 1e-5


def test_activation_checkpointing_changes_no_gradient(tiny_model: Path, trained: Any) -> None:
    objective, trainer, _ = trained
    trainer._config.tokens_per_microbatch = 10_000
    head = "score" if objective is SCORES else "value"
    with_it, _ = gradients(scalar_engine(tiny_model, head, activation_checkpointing=True), BATCH, objective)
    assert largest_difference(with_it, gradients(trainer, BATCH, objective)[0]) < 1e-6


def test_metrics_of_pairs_are_means_over_pairs_however_long_their_rows(tiny_model: Path) -> None:
    trainer = scalar_engine(tiny_model, "score", tokens_per_microbatch=60)
    _, metrics = gradients(trainer, BATCH, SCORES)
    body, head = plain(tiny_model)
    scores = plain_scores(body, head, BATCH)
    counts = np.array([keep and mask.any() for keep, mask in zip(BATCH["keep"], BATCH["response_mask"], strict=True)])
    whole = [i for i in range(0, len(BATCH), 2) if counts[i] and counts[i + 1]]
    assert metrics["tokens"] == 2 * len(whole)
    assert metrics["accuracy"] == pytest.approx(np.mean([float(scores[i] > scores[i + 1]) for i in whole]))
    assert metrics["score_gap"] == pytest.approx(np.mean([(scores[i] - scores[i + 1]).item() for i in whole]), abs=1e-5)


def test_evaluate_gives_each_row_its_pairs_loss(tiny_model: Path) -> None:
    trainer = scalar_engine(tiny_model, "score", tokens_per_microbatch=60)
    losses = trainer.evaluate(BATCH, SCORES)["loss"]
    known = ~np.isnan(losses)
    assert (known[::2] == known[1::2]).all() and known.any() and not known.all()
    np.testing.assert_array_equal(losses[::2][known[::2]], losses[1::2][known[1::2]])
    assert losses[known].mean() == pytest.approx(pair_loss(tiny_model, BATCH)[0], abs=1e-5)


def test_a_pair_cut_in_two_is_an_error(tiny_model: Path) -> None:
    apart = BATCH.take([0, 12]).drop("group_id") | Batch({"group_id": [7, 7]})
    with pytest.raises(BatchError, match="the rows of group_id 7 are no pair"):
        scalar_engine(tiny_model, "score").step(apart, SCORES)


def test_bf16_keeps_float32_masters_and_stays_near(tiny_model: Path) -> None:
    half, full = (scalar_engine(tiny_model, "value", precision=precision) for precision in ("bf16", "fp32"))
    assert {shard.tensor.dtype for shard in half.parameters()} == {torch.float32}
    low, high = (e.forward(BATCH, ["values"])["values"].values for e in (half, full))
    assert 0 < np.abs(low - high).max() < 0.1


def test_steps_from_a_head_of_zero_move_the_head_first_and_then_the_body(tiny_model: Path) -> None:
    trainer = engine(tiny_model, head="value", lr=1e-2)
    history = [weights(trainer)]
    for _ in range(2):
        trainer.step(BATCH, VALUES)
        history.append(weights(trainer))
    moved = [{name for name in old if not torch.equal(old[name], new[name])} for old, new in pairwise(history)]
    assert moved[0] == {"score.weight"}
    assert {"score.weight", "model.layers.0.mlp.up_proj.weight"} <= moved[1]


# ---- what is written
@pytest.mark.parametrize("head", list(CASES))
def test_training_goes_on_bit_for_bit_after_a_load(head: str, tiny_model: Path, tmp_path: Path) -> None:
    objective, _ = CASES[head]
    first = engine(tiny_model, head=head)
    for _ in range(2):
        first.step(BATCH, objective)
    first.save(tmp_path / "checkpoint")
    second = engine(tiny_model_folder(tmp_path / "other", seed=1), head=head)
    second.load(tmp_path / "checkpoint")
    assert first.step(BATCH, objective) == second.step(BATCH, objective)
    assert same(weights(first), weights(second))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_a_sequence_classifier_of_one_label_with_the_same_scores(family: str, tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path / "model", family, tied=family == "qwen2")
    trainer = engine(folder, head="score", lr=1e-2)
    for _ in range(2):
        trainer.step(BATCH, SCORES)
    trainer.export(tmp_path / "export")
    scores = trainer.forward(BATCH, ["score"])["score"]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export")
    assert model.config.num_labels == 1
    rows = [np.concatenate([p, r]).tolist() for p, r in zip(BATCH["prompt_ids"], BATCH["response_ids"], strict=True)]
    padded = AutoTokenizer.from_pretrained(tmp_path / "export").pad({"input_ids": rows}, return_tensors="pt")
    with torch.no_grad():
        found = model(**padded).logits.squeeze(-1)
    assert np.ptp(scores) > 0.1
    np.testing.assert_allclose(found.numpy(), scores, atol=1e-5)
    again = engine(tmp_path / "export", head="score", trainable=False)
    np.testing.assert_array_equal(again.forward(BATCH, ["score"])["score"], scores)


def test_scores_are_transformers_own_also_where_the_padding_ends_every_turn(tmp_path: Path) -> None:
    """As with many chat models: the end-of-turn token is the padding token too."""
    folder = tiny_model_folder(tmp_path / "model")
    trainer = scalar_engine(folder, "score")
    trainer._policy.lm.config.pad_token_id = 2
    ended = BATCH.select("prompt_ids") | Batch({"response_ids": [[*ids, 2] for ids in BATCH["response_ids"]]})
    trainer.export(tmp_path / "export")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export")
    model.config.pad_token_id = 2
    scores = trainer.forward(ended, ["score"])["score"]
    for row in range(4):
        ids = torch.tensor([[*ended["prompt_ids"][row], *ended["response_ids"][row]]])
        with torch.no_grad():
            assert model(ids).logits.item() == pytest.approx(scores[row], abs=1e-5)


def test_a_critic_can_begin_as_a_reward_model(tiny_model: Path, tmp_path: Path) -> None:
    scalar_engine(tiny_model, "score").export(tmp_path / "export")
    critic = engine(tmp_path / "export", head="value")
    assert torch.equal(weights(critic)["score.weight"], HEAD_WEIGHT)


def test_a_folder_with_several_labels_or_another_family_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=3).save_pretrained(tmp_path / "three")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "three")
    with pytest.raises(ModelError, match=r"its weights could not be loaded|weights are missing or of another shape"):
        engine(tmp_path / "three", head="score")


# ---- two ranks
ROWS_OF_RANK = (np.arange(4), np.arange(4, len(BATCH)))


def work(rank: int, folder: Path, model: Path) -> None:
    """One rank: gradients, metrics and forward outputs of both heads into a file, and an export of both ranks."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    rows = BATCH.take(ROWS_OF_RANK[rank])
    found: dict[str, Any] = {}
    for head, (objective, _) in CASES.items():
        trainer = engine(folder / "start", head=head, tokens_per_microbatch=60)
        grads, metrics = gradients(trainer, rows, objective)
        offsets = {shard.name: shard.offset[0] for shard in trainer.parameters()}
        output = "values" if head == "value" else "score"
        column = trainer.forward(rows, [output])[output]
        numbers = column if head == "score" else column.values
        found[head] = {"grads": grads, "offsets": offsets, "metrics": metrics, "numbers": numbers}
        trainer.step(rows, objective)
        trainer.save(folder / f"checkpoint-{head}")
        trainer.export(folder / f"export-{head}")
    torch.save(found, folder / f"rank{rank}")
    dist.destroy_process_group()


def test_two_ranks_with_unequal_rows_do_what_one_does(tiny_model: Path, tmp_path: Path) -> None:
    scalar_engine(tiny_model, "score").export(tmp_path / "start")
    mp.spawn(work, (tmp_path, tiny_model), nprocs=2)  # type: ignore[no-untyped-call]
    ranks = [torch.load(tmp_path / f"rank{rank}", weights_only=False) for rank in range(2)]
    for head, (objective, _) in CASES.items():
        one = engine(tmp_path / "start", head=head, tokens_per_microbatch=60)
        grads, metrics = gradients(one, BATCH, objective)
        output = "values" if head == "value" else "score"
        column = one.forward(BATCH, [output])[output]
        numbers = np.concatenate([rank[head]["numbers"] for rank in ranks])
        np.testing.assert_allclose(numbers, column if head == "score" else column.values, atol=1e-5)
        for rank in ranks:
            assert rank[head]["metrics"]["loss"] == pytest.approx(metrics["loss"], abs=1e-5)
            for name, part in rank[head]["grads"].items():
                start = rank[head]["offsets"][name]
                torch.testing.assert_close(part, grads[name][start : start + len(part)], atol=1e-5, rtol=0)
        one.load(tmp_path / f"checkpoint-{head}")
        assert same(weights(one), weights(engine(tmp_path / f"export-{head}", head=head)))
