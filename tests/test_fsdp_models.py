"""Loading models and tokenizers, and what is said of those that can't be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hybridflow.errors import ConfigError, ModelError
from hybridflow.workers.models import smollm2
from hybridflow.workers.models.config import ModelConfig
from hybridflow.workers.models.loading import empty_causal_lm, load_causal_lm, load_tokenizer, model_path
from tests.fsdp_oracle import engine
from tests.models import FAMILIES, tiny_model_folder

pytestmark = pytest.mark.fsdp

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def load(folder: Path) -> object:
    return load_causal_lm(str(folder), ModelConfig(path=str(folder)), torch.float32)


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def cut_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def one_layer_more(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(num_hidden_layers=3, layer_types=["full_attention"] * 3)
    (folder / "config.json").write_text(json.dumps(config))


def wider(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 77}))


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_folder, "no such folder"),
        (without_config, "no config.json there"),
        (without_weights, r"no weights there \(\*.safetensors"),
        (cut_weights, "model.safetensors is damaged or cut short"),
        (cut_header, "model.safetensors is damaged or cut short"),
        (broken_config, "its configuration could not be read.*JSON"),
        (one_layer_more, "12 weights are missing or of another shape: model.layers.2"),
        (wider, "weights"),
    ],
)
def test_a_folder_that_is_no_model_says_what_is_missing(
    damage: Callable[[Path], None], message: str, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    damage(folder)
    with pytest.raises(ModelError, match=message) as raised:
        load(folder)
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_weights_that_differ_where_the_configuration_ties_them_are_refused(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path, tied=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(ModelError, match=r"ties lm_head.weight to .* correct config.json"):
        load(folder)


def test_a_name_that_no_hub_knows_is_an_error_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"no folder here, so it was looked up on the hub. OSError"):
        load_causal_lm("nobody/nothing", ModelConfig(path="nobody/nothing"), torch.float32)
    with pytest.raises(ModelError, match="no tokenizer could be loaded"):
        load_tokenizer(ModelConfig(path="nobody/nothing"))


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="BertForSequenceClassification is no causal language model"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=16)), "sliding_window"),
        (lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8)), "sliding_attention"),
        (
            lambda: Qwen2ForCausalLM(
                Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1)
            ),
            "layers of type sliding_attention",
        ),
        (
            lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, rope_parameters=DYNAMIC_ROPE)),
            "rope_type=dynamic",
        ),
        (lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0)), "packing rows changes its logits by"),
        (
            lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, moe_intermediate_size=16, num_experts=4)),
            "fused experts",
        ),
    ],
)
def test_a_model_that_packed_attention_would_get_wrong_is_refused(
    model: Callable[[], PreTrainedModel], message: str, tmp_path: Path
) -> None:
    model().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        engine(tmp_path)


def test_a_tokenizer_without_files_is_an_error_rather_than_an_empty_one(tmp_path: Path) -> None:
    Qwen2ForCausalLM(Qwen2Config(**SMALL)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no tokenizer there \(tokenizer.json"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_the_end_token_stands_in_for_a_missing_padding_token_and_no_id_changes(
    tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    file = tmp_path / "model/tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token": None}))
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path / "model")))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.get_vocab() == load_tokenizer(ModelConfig(path=str(tiny_model))).get_vocab()


def test_a_tokenizer_and_a_template_of_ones_own(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}!")
    config = ModelConfig(path="unused", tokenizer=str(tiny_model), chat_template=str(tmp_path / "own.jinja"))
    tokenizer = load_tokenizer(config)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello!"
    with pytest.raises(ConfigError, match=r"model.chat_template=gone.jinja: No such file"):
        load_tokenizer(ModelConfig(path=str(tiny_model), chat_template="gone.jinja"))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_model_has_the_names_shapes_and_buffers_of_the_whole_one(family: str, tmp_path: Path) -> None:
    path = str(tiny_model_folder(tmp_path, family, tied=family == "qwen3"))
    empty, whole = (f(path, ModelConfig(path=path), torch.float32) for f in (empty_causal_lm, load_causal_lm))
    shapes = [{name: p.shape for name, p in model.named_parameters()} for model in (empty, whole)]
    assert shapes[0] == shapes[1]
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    buffers = dict(whole.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in empty.named_buffers())


def test_smollm2_is_its_folder_where_that_is_there_and_its_hub_name_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "folder", lambda: tmp_path / "smollm2")
    assert model_path("smollm2") == smollm2.HUB_NAME
    (tmp_path / "smollm2").mkdir()
    assert model_path("smollm2") == str(tmp_path / "smollm2")
    assert model_path("some/other") == "some/other"
