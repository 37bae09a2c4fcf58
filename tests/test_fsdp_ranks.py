"""Many ranks do what one does: sharded, replicated, sharing rows, and all of it at once."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.algorithms.objective import PolicyObjective, TokenObjective
from hybridflow.algorithms.registry import Loss
from hybridflow.batch import Batch
from hybridflow.columns import Ragged
from hybridflow.device import join_process_group
from hybridflow.errors import ConfigError, EngineError, ModelError
from hybridflow.workers.models.config import ModelConfig
from hybridflow.workers.rollout.config import TransformersConfig
from hybridflow.workers.rollout.transformers import TransformersRollout
from hybridflow.workers.training.config import FSDPConfig, check_heads, check_ranks
from hybridflow.workers.training.fsdp import FSDPEngine
from hybridflow.workers.training.heads import HEADS
from tests.fsdp_oracle import engine, gradients, random_batch, same, weights
from tests.models import tiny_model_folder
from tests.rollout_contract import GREEDY, prompts_of, responses

pytestmark = pytest.mark.fsdp

MODES: dict[int, dict[str, dict[str, Any]]] = {
    2: {"fsdp": {}, "replicas": {"shard_size": 1}, "sequence": {"sequence_parallel": 2}},
    4: {
        "fsdp": {},
        "hsdp": {"shard_size": 2},
        "sequence": {"sequence_parallel": 2},
        "hsdp+sequence": {"shard_size": 2, "sequence_parallel": 4},  # twice as many ranks as key-value heads
    },
}
ALL_MODES = [(ranks, mode) for ranks, modes in MODES.items() for mode in modes]
BATCHES = [random_batch(13, seed) for seed in range(4)]
WITHOUT_ACTIVE_TOKENS = [row for row in range(13) if row % 4 == 3 or row % 5 == 4]
OBJECTIVE = PolicyObjective(Loss("ppo_clip"), AlgorithmConfig(entropy_coef=0.05), 32)
HEAD_WEIGHT = 0.2 * torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
BUDGET, CLIP = 60, 0.1
VOCAB = 101  # which neither 2 nor 4 ranks can share evenly


def rows_of(step: int, part: int, parts: int) -> Batch:
    """The rows that one of `parts` data-parallel ranks has of a step's batch: unequally many everywhere; in the second
    step the last rank has no active token, in the third the first one has no row."""
    cuts, every = [4, 5, 11], np.arange(13)
    active = np.setdiff1d(every, WITHOUT_ACTIVE_TOKENS)
    placed = [every]
    if parts > 1:
        placed = {
            0: np.split(every, cuts[: parts - 1]),
            1: [*np.split(active, cuts[: parts - 2]), np.array(WITHOUT_ACTIVE_TOKENS)],
            2: [every[:0], *np.split(every, cuts[: parts - 2])],
        }[step % 3]
    return BATCHES[step].take(placed[part])


def made(model: Path, **options: Any) -> FSDPEngine:
    """An engine whose optimizer does not magnify rounding where a gradient is almost 0."""
    trainer = engine(model, tokens_per_microbatch=BUDGET, grad_clip=CLIP, **options)
    assert trainer._optimization is not None
    for group in trainer._optimization._optimizer.param_groups:
        group["eps"] = 1e-5
    return trainer


def squared_error(values: Tensor, advantages: Tensor) -> Tensor:
    """A critic's loss."""
    return (values - advantages) ** 2


def sequence_ratio(
    response_mask: Tensor, advantages: Tensor, row_of_token: Tensor, old_logprobs: Tensor, logprobs: Tensor
) -> Tensor:
    """GSPO's ratio, a mean over the sequence; its columns are listed in no order."""
    zeros = torch.zeros(int(row_of_token.max()) + 1)
    totals = zeros.index_add(0, row_of_token, (logprobs - old_logprobs) * response_mask)
    counts = zeros.index_add(0, row_of_token, response_mask.float())
    return -advantages * torch.exp(totals / counts.clamp(min=1))[row_of_token]


OF_SEQUENCES = PolicyObjective(Loss(sequence_ratio), AlgorithmConfig(), 32)


@dataclass
class Seen:
    """What one rank saw of an engine. shards: name -> where they start, the whole shape, this rank's part."""

    start: dict[str, Tensor]
    grads: dict[str, Tensor]
    metrics: dict[str, float]
    scores: dict[str, np.ndarray]
    losses: np.ndarray
    of_sequences: np.ndarray
    skipped: dict[str, float]
    steps: list[dict[str, float]]
    end: dict[str, Tensor]
    totals: dict[str, float]
    places: dict[str, tuple[int, tuple[int, ...]]]


def values_of(critic: FSDPEngine, part: int, parts: int) -> dict[str, Any]:
    """Values by a head that is not zero, whose one row only some ranks have a part of, and an optimizer step."""
    head = next(shard for shard in critic.parameters() if shard.name == "score.weight")
    head.tensor.copy_(HEAD_WEIGHT[: len(head.tensor)])
    rows, objective = rows_of(0, part, parts), TokenObjective(Loss(squared_error), AlgorithmConfig(), 32, "value")
    values = critic.forward(rows, ["values"])["values"].values
    metrics = critic.step(rows, objective)
    return {"values": values, "loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}


def look(trainer: FSDPEngine, part: int, parts: int) -> Seen:
    """Gradients and scores, then three optimizer steps, as data-parallel rank `part` of `parts`."""
    rows = rows_of(0, part, parts)
    places = {shard.name: (shard.offset[0], shard.shape) for shard in trainer.parameters()}
    start = weights(trainer)
    grads, metrics = gradients(trainer, rows, OBJECTIVE)
    scores = trainer.forward(rows, ["logprobs", "entropy"])
    return Seen(
        start=start,
        grads=grads,
        metrics=metrics,
        scores={name: scores.ragged(name).values for name in scores.names},
        losses=trainer.evaluate(rows, OBJECTIVE)["loss"],
        of_sequences=trainer.evaluate(rows, OF_SEQUENCES)["loss"],
        skipped=dict(trainer.step(rows.take([]), OBJECTIVE)),
        steps=[dict(trainer.step(rows_of(step, part, parts), OBJECTIVE)) for step in range(3)],
        end=weights(trainer),
        totals=trainer.totals({"rows": len(rows)}, {"longest": rows["response_ids"].lengths.max(initial=0)}),
        places=places,
    )


# ---- what each of many processes does
def work(rank: int, ranks: int, port: int, folder: Path, model: Path) -> None:
    """Everything that is looked at on so many ranks, into a file."""
    torch.set_num_threads(1)
    join_process_group("127.0.0.1", port, rank, ranks, timeout_s=120)
    if rank:
        HEADS.update({name: replace(head, load=only_rank_0_loads) for name, head in HEADS.items()})
    found: dict[str, Any] = {}
    for mode, options in MODES[ranks].items():
        sharing = options.get("sequence_parallel", 1)
        place = (rank // sharing, ranks // sharing)
        trainer = made(model, **options)
        found[mode] = look(trainer, *place)
        trainer.save(folder / f"{ranks}-{mode}")
        trainer.export(folder / f"{ranks}-{mode}-export")
        found[f"{mode} again"] = next_step(folder / f"4-{'hsdp' if mode == 'fsdp' else 'fsdp'}", trainer, *place)
        found[f"{mode} bf16"] = dict(made(model, precision="bf16", **options).step(rows_of(0, *place), OBJECTIVE))
        found[f"{mode} values"] = values_of(made(model, head="value", **options), *place)
    found["errors"] = [message_of(attempt) for attempt in attempts(rank, model)]
    if ranks == 2:
        found["rollout"] = sample(model)
    torch.save(found, folder / f"{ranks}-{rank}")
    dist.destroy_process_group()


def only_rank_0_loads(*_: Any) -> None:
    raise AssertionError("a rank other than the first read the weights")


def next_step(checkpoint: Path, trainer: FSDPEngine, part: int, parts: int) -> tuple[dict[str, Tensor], ...] | None:
    """This rank's weights as `checkpoint` has them, and after one more step; None while it isn't there."""
    if not checkpoint.exists():
        return None
    trainer.load(checkpoint)
    loaded = weights(trainer)
    trainer.step(rows_of(3, part, parts), OBJECTIVE)
    return loaded, weights(trainer)


def attempts(rank: int, model: Path) -> list[Callable[[], object]]:
    """What every rank must refuse, with the same message."""
    rows = rows_of(0, min(rank, 1), 2)
    poisoned = rows["advantages"].values.copy()
    if rank == 1:
        poisoned[rows["response_mask"].values.argmax()] = np.inf  # of the first row, which is row 4 of the batch
    bad = rows.drop("advantages", "keep") | Batch({"advantages": rows["advantages"].with_values(poisoned)})
    trainer = engine(model)
    return [
        lambda: engine(model, shard_size=3),
        lambda: engine(model.with_name("damaged")),
        lambda: trainer.step(bad, OBJECTIVE),
    ]


def message_of(attempt: Callable[[], object]) -> str:
    with pytest.raises((ConfigError, EngineError, ModelError)) as raised:
        attempt()
    return f"{raised.type.__name__}: {raised.value}"


def sample(model: Path) -> dict[str, Any]:
    """A sync from sharded weights, generation, a release, and the same again."""
    trainer = made(model)
    sampler = TransformersRollout(ModelConfig(path=str(model)), TransformersConfig(), seed=0, dtype=torch.float32)
    found: list[list[list[int]]] = []
    for version in (1, 2):
        sampler.sync(trainer.parameters(whole=True), version)
        found.append(responses(sampler.generate(prompts_of(), GREEDY)))
        held = sum(parameter.numel() for parameter in sampler.model.parameters() if not parameter.is_meta)
        sampler.release()
    kept = sum(parameter.numel() for parameter in sampler.model.parameters() if not parameter.is_meta)
    with pytest.raises(EngineError, match="sync it before"):
        sampler.generate(prompts_of(), GREEDY)
    half = FSDPEngine(ModelConfig(path=str(model)), FSDPConfig(precision="bf16"))
    return {
        "responses": found,
        "received": sampler.received_bytes,
        "held": held,
        "kept": kept,
        "received_bf16": sum(shard.received for shard in half.parameters(whole=True)),
    }


# ---- what is said of it
@dataclass
class Runs:
    """All that ranks saw, by how many there were, and where they wrote."""

    ranks: dict[int, list[dict[str, Any]]]
    folder: Path
    model: Path

    def seen(self, ranks: int, mode: str) -> list[Seen]:
        return [found[mode] for found in self.ranks[ranks]]

    def of_rows(self, ranks: int, mode: str, what: str = "") -> list[Any]:
        """Of one rank of each that share their rows."""
        found = [found[f"{mode} {what}".strip()] for found in self.ranks[ranks]]
        return found[:: MODES[ranks][mode].get("sequence_parallel", 1)]

    def whole(self, ranks: int, mode: str, tensors: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The ranks' parts put together; replicas must be equal bit for bit."""
        together: dict[str, Tensor] = {}
        for seen, parts in zip(self.seen(ranks, mode), tensors, strict=True):
            for name, part in parts.items():
                start, shape = seen.places[name]
                target = together.setdefault(name, torch.full(shape, torch.nan))[start : start + len(part)]
                assert torch.isnan(target).all() or torch.equal(target, part)
                target.copy_(part)
        assert not any(torch.isnan(tensor).any() for tensor in together.values())
        return together


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Four ranks first: two read what they wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    model = tiny_model_folder(folder / "model", vocab=VOCAB)
    shutil.copytree(model, folder / "damaged")
    (folder / "damaged" / "model.safetensors").unlink()
    found = {}
    for ranks in (4, 2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        mp.spawn(work, (ranks, port, folder, model), nprocs=ranks)  # type: ignore[no-untyped-call]
        found[ranks] = [torch.load(folder / f"{ranks}-{rank}", weights_only=False) for rank in range(ranks)]
    return Runs(found, folder, model)


@pytest.fixture(scope="module")
def one(runs: Runs) -> Seen:
    """What one rank sees of all rows."""
    return look(made(runs.model), 0, 1)


@pytest.fixture(scope="module")
def critic(runs: Runs) -> dict[str, Any]:
    """What one rank's critic says."""
    return values_of(made(runs.model, head="value"), 0, 1)


def close(found: dict[str, Tensor], expected: dict[str, Tensor], scale: str = "absolute") -> None:
    """Within 1e-5, of each tensor's largest entry if `scale` is relative."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        bound = 1e-5 * (tensor.abs().max().item() if scale == "relative" else 1.0)
        torch.testing.assert_close(
            found[name], tensor, atol=bound, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("ranks", "mode"), ALL_MODES)
def test_all_ranks_start_from_the_weights_that_rank_0_alone_read(ranks: int, mode: str, runs: Runs, one: Seen) -> None:
    assert same(runs.whole(ranks, mode, [seen.start for seen in runs.seen(ranks, mode)]), one.start)


@pytest.mark.parametrize(("ranks", "mode"), ALL_MODES)
def test_case_01_loss_and_gradients_are_those_of_one_rank(ranks: int, mode: str, runs: Runs, one: Seen) -> None:
    found = runs.seen(ranks, mode)
    close(runs.whole(ranks, mode, [seen.grads for seen in found]), one.grads, "relative")
    for seen in found:
        assert seen.metrics == found[0].metrics
        for name in ("loss", "grad_norm", "tokens", "entropy", "kl_old"):
            assert seen.metrics[name] == pytest.approx(one.metrics[name], abs=1e-5), name


@pytest.mark.parametrize(("ranks", "mode"), ALL_MODES)
def test_three_optimizer_steps_are_those_of_one_rank(ranks: int, mode: str, runs: Runs, one: Seen) -> None:
    found = runs.seen(ranks, mode)
    close(runs.whole(ranks, mode, [seen.end for seen in found]), one.end)
    for seen in found:
        assert seen.skipped == {"skipped": 1.0, "tokens": 0.0, "microbatches": 0.0}
        for step, expected in zip(seen.steps, one.steps, strict=True):
            assert expected["grad_norm"] > CLIP
            for name in ("loss", "grad_norm", "tokens"):
                assert step[name] == pytest.approx(expected[name], abs=1e-5), name


@pytest.mark.parametrize(("ranks", "mode"), ALL_MODES)
def test_log_probs_entropies_and_losses_are_those_of_one_rank(ranks: int, mode: str, runs: Runs, one: Seen) -> None:
    found = runs.of_rows(ranks, mode)
    for name, expected in one.scores.items():
        np.testing.assert_allclose(np.concatenate([seen.scores[name] for seen in found]), expected, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([seen.losses for seen in found]), one.losses, atol=1e-5)


@pytest.mark.parametrize(("ranks", "mode"), ALL_MODES)
def test_case_05_and_07_a_loss_of_whole_sequences_has_its_columns_by_name_on_every_rank(
    ranks: int, mode: str, runs: Runs, one: Seen
) -> None:
    found = np.concatenate([seen.of_sequences for seen in runs.of_rows(ranks, mode)])
    np.testing.assert_allclose(found, one.of_sequences, atol=1e-5)
    expected = np.full(13, np.nan)
    for row, (new, old, mask, advantages) in enumerate(
        zip(
            Ragged(one.scores["logprobs"], BATCHES[0]["response_ids"].offsets),
            *(BATCHES[0][name] for name in ("old_logprobs", "response_mask", "advantages")),
            strict=True,
        )
    ):
        if BATCHES[0]["keep"][row] and mask.any():
            expected[row] = (-advantages[mask] * np.exp((new - old)[mask].mean())).mean()
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("ranks", "mode"), ALL_MODES)
def test_values_and_their_loss_are_those_of_one_rank(ranks: int, mode: str, runs: Runs, critic: dict[str, Any]) -> None:
    found = runs.of_rows(ranks, mode, "values")
    np.testing.assert_allclose(np.concatenate([seen["values"] for seen in found]), critic["values"], atol=1e-5)
    assert np.abs(critic["values"]).max() > 0.1
    for seen in found:
        assert (seen["loss"], seen["grad_norm"]) == pytest.approx((critic["loss"], critic["grad_norm"]), abs=1e-5)


@pytest.mark.parametrize(("ranks", "mode"), ALL_MODES)
def test_totals_count_each_row_once(ranks: int, mode: str, runs: Runs, one: Seen) -> None:
    assert one.totals == {"rows": 13, "longest": BATCHES[0]["response_ids"].lengths.max()}
    assert all(seen.totals == one.totals for seen in runs.seen(ranks, mode))


@pytest.mark.parametrize(("ranks", "mode"), ALL_MODES)
def test_bf16_takes_a_step_near_that_of_one_rank(ranks: int, mode: str, runs: Runs, one: Seen) -> None:
    for found in runs.ranks[ranks]:
        assert found[f"{mode} bf16"]["loss"] == pytest.approx(one.metrics["loss"], abs=0.05)
        assert found[f"{mode} bf16"]["grad_norm"] == pytest.approx(one.metrics["grad_norm"], rel=0.1)


# ---- files
@pytest.mark.parametrize(("ranks", "mode"), ALL_MODES)
def test_a_checkpoint_and_an_export_have_on_one_rank_the_weights_of_many(ranks: int, mode: str, runs: Runs) -> None:
    written = runs.whole(ranks, mode, [seen.end for seen in runs.seen(ranks, mode)])
    trainer = made(runs.model)
    trainer.load(runs.folder / f"{ranks}-{mode}")
    assert same(weights(trainer), written)
    assert same(weights(made(runs.folder / f"{ranks}-{mode}-export")), written)


@pytest.mark.parametrize(("ranks", "mode"), [case for case in ALL_MODES if case != (4, "fsdp")])
def test_a_checkpoint_of_four_ranks_goes_on_under_any_other_arrangement(ranks: int, mode: str, runs: Runs) -> None:
    source = "hsdp" if mode == "fsdp" else "fsdp"
    written = runs.whole(4, source, [seen.end for seen in runs.seen(4, source)])
    loaded, after = zip(*(found[f"{mode} again"] for found in runs.ranks[ranks]), strict=True)
    assert same(runs.whole(ranks, mode, list(loaded)), written)
    trainer = made(runs.model)
    trainer.load(runs.folder / f"4-{source}")
    trainer.step(BATCHES[3], OBJECTIVE)
    close(runs.whole(ranks, mode, list(after)), weights(trainer))
    assert not same(weights(trainer), written)


# ---- generation copies
def test_generation_copies_are_gathered_once_per_version_and_freed_after(runs: Runs) -> None:
    model = ModelConfig(path=str(runs.model))
    trainer = made(runs.model)
    alone = TransformersRollout(model, TransformersConfig(), seed=0, dtype=torch.float32)
    alone.sync(trainer.parameters(whole=True), 1)
    assert alone.received_bytes == 0
    expected = responses(alone.generate(prompts_of(), GREEDY))
    entries = sum(shard.tensor.numel() for shard in trainer.parameters())
    found = [ranks["rollout"] for ranks in runs.ranks[2]]
    for seen in found:
        assert seen["responses"] == [expected, expected]
        assert (seen["held"], seen["kept"]) == (entries, 0)
    assert sum(seen["received"] for seen in found) == 4 * entries
    assert sum(seen["received_bf16"] for seen in found) == 2 * entries


def test_one_rank_gives_its_whole_parameters_live(tiny_model: Path) -> None:
    trainer = engine(tiny_model)
    whole, own = list(trainer.parameters(whole=True)), list(trainer.parameters())
    assert [shard.tensor.data_ptr() for shard in whole] == [shard.tensor.data_ptr() for shard in own]
    assert {shard.received for shard in whole} == {0}


# ---- errors
@pytest.mark.parametrize("ranks", MODES)
def test_every_rank_says_the_same_of_what_went_wrong_on_one(ranks: int, runs: Runs) -> None:
    messages = [found["errors"] for found in runs.ranks[ranks]]
    assert all(said == messages[0] for said in messages)
    legal = [size for size in range(1, ranks + 1) if ranks % size == 0]
    config, model, step = messages[0]
    assert config == f"ConfigError: training.shard_size=3 does not divide {ranks} ranks: legal values {legal}."
    assert model.startswith("ModelError: model.path=") and "no weights there" in model
    assert step.startswith("EngineError: optimizer step 1") and "in row 0 (group_id 2)" in step


def test_a_frozen_model_is_arranged_as_its_ranks_allow() -> None:
    training = FSDPConfig(shard_size=4, sequence_parallel=2)
    assert [training.fitted(ranks).layout(ranks).cp for ranks in (1, 2, 3, 4, 6)] == [1, 2, 1, 2, 2]
    assert [training.fitted(ranks).shard_size for ranks in (1, 2, 3, 4, 6)] == [1, 2, 1, 4, 2]
    with pytest.raises(ConfigError, match=r"^critic\.training\.shard_size=4 does not divide 2 ranks: legal values"):
        training.layout(2, "critic.training")


def test_arrangements_that_do_not_divide_name_the_legal_ones() -> None:
    check_ranks(FSDPConfig(), 3)
    check_ranks(FSDPConfig(shard_size=2, sequence_parallel=4), 8)
    with pytest.raises(ConfigError, match=r"training.shard_size=3 does not divide 4 ranks: legal values \[1, 2, 4\]"):
        check_ranks(FSDPConfig(shard_size=3), 4)
    with pytest.raises(ConfigError, match=r"training.sequence_parallel=2 does not divide 1 ranks: legal values \[1\]"):
        check_ranks(FSDPConfig(sequence_parallel=2), 1)
    with pytest.raises(ConfigError, match=r"training.sequence_parallel=4 .* 6 attention heads: .* \[1, 2, 3, 6\]"):
        check_heads(FSDPConfig(sequence_parallel=4), 6)
    for name in ("shard_size", "sequence_parallel"):
        with pytest.raises(ConfigError, match=rf"training.{name}=0: it is 1 or more"):
            FSDPConfig(**{name: 0})
