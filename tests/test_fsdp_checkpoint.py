"""What the training engine writes and reads back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.algorithms.objective import PolicyObjective
from hybridflow.algorithms.registry import Loss
from hybridflow.errors import CheckpointError
from tests.fsdp_oracle import engine, random_batch, same, weights
from tests.models import tiny_model_folder

pytestmark = pytest.mark.fsdp

BATCH = random_batch(6)
OBJECTIVE = PolicyObjective(Loss("ppo_clip"), AlgorithmConfig(entropy_coef=0.01), 32)
SCHEDULE = {"lr_schedule": "cosine", "warmup_steps": 1, "total_steps": 10, "weight_decay": 0.1}


@pytest.mark.parametrize("steps_before", [0, 2])
def test_training_goes_on_bit_for_bit_after_a_load(steps_before: int, tiny_model: Path, tmp_path: Path) -> None:
    first = engine(tiny_model, **SCHEDULE)
    for _ in range(steps_before):
        first.step(BATCH, OBJECTIVE)
    first.save(tmp_path / "checkpoint")
    second = engine(tiny_model_folder(tmp_path / "other", seed=1), **SCHEDULE)
    second.load(tmp_path / "checkpoint")
    assert same(weights(first), weights(second))
    for _ in range(2):
        assert first.step(BATCH, OBJECTIVE) == second.step(BATCH, OBJECTIVE)
    assert same(weights(first), weights(second))


def test_a_load_takes_the_place_of_weights_that_a_forward_has_gathered(tiny_model: Path, tmp_path: Path) -> None:
    trainer = engine(tiny_model, lr=1e-2)
    trainer.save(tmp_path / "checkpoint")
    before = trainer.forward(BATCH, ["logprobs"])["logprobs"].values
    trainer.step(BATCH, OBJECTIVE)
    trainer.forward(BATCH, ["logprobs"])
    trainer.load(tmp_path / "checkpoint")
    assert (trainer.forward(BATCH, ["logprobs"])["logprobs"].values == before).all()


@pytest.fixture(scope="module")
def checkpoint(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    engine(tiny_model).save(folder)
    return folder


@pytest.mark.parametrize("name", ["engine.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_missing_or_damaged_file_is_named(
    name: str, damage: str, checkpoint: Path, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder)
    if damage == "missing":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes((folder / name).read_bytes()[:100])
    with pytest.raises(CheckpointError, match=name):
        engine(tiny_model).load(folder)


def test_a_folder_that_is_no_checkpoint_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        engine(tiny_model).load(tmp_path / "nowhere")


def test_the_checkpoint_of_another_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    wider = engine(tiny_model_folder(tmp_path / "wider", hidden=96))
    with pytest.raises(CheckpointError, match="checkpoint"):
        wider.load(checkpoint)
    deeper = engine(tiny_model_folder(tmp_path / "deeper", layers=3))
    with pytest.raises(CheckpointError, match=r"model.layers.2"):
        deeper.load(checkpoint)


def test_a_folder_that_cannot_be_written_is_a_checkpoint_error(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        engine(tiny_model).save(tmp_path / "file" / "checkpoint")


def test_an_export_is_read_by_transformers_with_the_same_bits(tiny_model: Path, tmp_path: Path) -> None:
    trainer = engine(tiny_model, lr=1e-2)
    trainer.step(BATCH, OBJECTIVE)
    trainer.export(tmp_path / "export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert same(weights(trainer), {name: p.detach() for name, p in model.named_parameters()})
    assert not same(weights(trainer), weights(engine(tiny_model)))
    tokenizer, source = (AutoTokenizer.from_pretrained(path) for path in (tmp_path / "export", tiny_model))
    assert tokenizer.get_vocab() == source.get_vocab()
    assert tokenizer.chat_template == source.chat_template
    assert model.generation_config.eos_token_id == 2


@pytest.mark.parametrize("tied", [True, False])
def test_an_export_has_the_dtype_and_names_that_its_source_had(tied: bool, tmp_path: Path) -> None:
    source = tiny_model_folder(tmp_path / "source", dtype=torch.bfloat16, tied=tied)
    trainer = engine(source)
    trainer.export(tmp_path / "export")
    assert json.loads((tmp_path / "export/config.json").read_text())["dtype"] == "bfloat16"
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (source, tmp_path / "export"))
    assert after.dtype == torch.bfloat16
    assert same(dict(before.named_parameters()), dict(after.named_parameters()))
    assert same(dict(after.float().named_parameters()), weights(engine(tmp_path / "export")))


def test_parameters_come_once_under_their_names_on_disk_and_share_the_engines_memory(tiny_model: Path) -> None:
    trainer = engine(tiny_model)
    shards = list(trainer.parameters())
    expected = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())
    assert [shard.name for shard in shards] == list(expected)
    assert all(shard.shape == expected[shard.name].shape == shard.tensor.shape for shard in shards)
    assert all(set(shard.offset) == {0} for shard in shards)
    assert [s.tensor.data_ptr() for s in trainer.parameters()] == [s.tensor.data_ptr() for s in shards]
