"""Language models with one number in the place of logits: what a critic and a reward model are.

In transformers' own form, a sequence classifier of one label: a body, and a head `score`, a linear map without bias. So
a folder of either kind can be loaded: a language model, which gets a new head, or a reward model, whoever trained it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from ...errors import ModelError
from .config import ModelConfig
from .loading import (
    NAMES_SHOWN,
    WEIGHT_FILES,
    _check_files,
    _check_folder,
    _explained,
    forget_weights,
    load_tokenizer,
    model_path,
    quiet,
)

HEAD = "score.weight"


def load_scalar_config(path: str, config: ModelConfig) -> Any:
    """The transformers configuration of the model at `path`, as one with a scalar head.

    Its padding token, which says where a sequence ends, is the tokenizer's where it names none.
    Errors: ModelError if the model's family has no such head.
    """
    path = model_path(path)
    _check_folder(path)
    with _explained(path, "model.path", "its configuration could not be read"):
        loaded = AutoConfig.from_pretrained(path, num_labels=1, trust_remote_code=config.trust_remote_code)
    own = "AutoModelForSequenceClassification" in (getattr(loaded, "auto_map", None) or {})
    if type(loaded) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not (own and config.trust_remote_code):
        raise ModelError(f"model.path={path}: transformers has no sequence classifier for {loaded.model_type}.")
    if loaded.pad_token_id is None:
        loaded.pad_token_id = load_tokenizer(config).pad_token_id
    return loaded


def load_scalar_model(path: str, config: ModelConfig, dtype: torch.dtype) -> Any:
    """The model at `path` with a scalar head, on the CPU: its own, or a new one of zeros.

    Zeros, so that a new critic says 0 everywhere, adds no noise to the first advantages, and needs no seed: the head
    has a gradient all the same, and the body from the second step on.
    Errors: ModelError naming what is missing.
    """
    path = model_path(path)
    loaded = load_scalar_config(path, config)
    _check_files(path, "model.path", WEIGHT_FILES, "weights")
    with _explained(path, "model.path", "its weights could not be loaded"), quiet():
        loader: Any = AutoModelForSequenceClassification
        model, report = loader.from_pretrained(
            path, config=loaded, dtype=dtype, trust_remote_code=config.trust_remote_code, output_loading_info=True
        )
    _check_head(model)
    missing = sorted({*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])} - {HEAD})
    if missing:
        names = ", ".join(missing[:NAMES_SHOWN])
        raise ModelError(f"model.path={path}: {len(missing)} weights are missing or of another shape: {names}.")
    if HEAD in report["missing_keys"]:
        nn.init.zeros_(model.score.weight)
    return model


def empty_scalar_model(path: str, config: ModelConfig, dtype: torch.dtype) -> Any:
    """The same model without weights, as `empty_causal_lm`."""
    loaded = load_scalar_config(path, config)
    with no_init_weights():
        maker: Any = AutoModelForSequenceClassification
        model = maker.from_config(loaded, dtype=dtype, trust_remote_code=config.trust_remote_code)
    _check_head(model)
    forget_weights(model)
    return model


def check_is_reward_model(path: str, config: ModelConfig) -> None:
    """Errors: ModelError if the folder at `path` holds no trained head."""
    names = load_scalar_config(path, config).architectures or ["it"]
    if not any(name.endswith("ForSequenceClassification") for name in names):
        raise ModelError(
            f"reward.model={path}: {names[0]} has no score head. Train one with `hybridflow reward_model "
            f"model.path={path} data.path=pairs.jsonl`, and give its export."
        )


def same_vocabulary(tokenizer: Any, other: Any) -> bool:
    """Whether every token id means the same text to both."""
    return bool(tokenizer.get_vocab() == other.get_vocab())


def _check_head(model: Any) -> None:
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1 or len(list(head.parameters())) > 1:
        raise ModelError(f"{type(model).__name__}: its head `score` is no linear map without bias to one number.")
