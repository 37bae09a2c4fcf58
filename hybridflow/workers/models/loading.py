"""Tokenizers and causal language models from Hugging Face folders or the hub, with errors that say what is wrong."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as hf_logging

from ...errors import ConfigError, ModelError
from . import smollm2
from .config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

log = logging.getLogger(__name__)

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json")
NAMES_SHOWN = 3


def model_path(path: str) -> str:
    """What to load for `model.path`: a folder, or a hub name.

    `smollm2` is the folder that `python -m hybridflow.workers.models.smollm2` makes, or the model's hub name where that
    folder is not there.
    """
    if path != "smollm2":
        return os.path.expanduser(path)
    folder = smollm2.folder()
    return str(folder) if folder.is_dir() else smollm2.HUB_NAME


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of `config`, with its chat template. Where it has no padding token, the end token stands in, so
    that no id changes.

    Errors: ModelError for a folder without a tokenizer; ConfigError for a chat template that is no file.
    """
    path = model_path(config.tokenizer or config.path)
    key = "model.tokenizer" if config.tokenizer else "model.path"
    _check_folder(path, key)
    _check_files(path, key, TOKENIZER_FILES, "tokenizer")  # transformers would make an empty one
    with _explained(path, key, "no tokenizer could be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    if config.chat_template is not None:
        tokenizer.chat_template = _read_template(config.chat_template)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def load_config(path: str, config: ModelConfig) -> Any:
    """The transformers configuration of the model at `path`. Errors: ModelError if it isn't one of a causal LM."""
    path = model_path(path)
    _check_folder(path)
    with _explained(path, "model.path", "its configuration could not be read"):
        loaded = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    names = loaded.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(loaded.model_type, loaded.model_type)]
    own = "AutoModelForCausalLM" in (getattr(loaded, "auto_map", None) or {}) and config.trust_remote_code
    if not own and not set(names) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        raise ModelError(
            f"model.path={path}: {names[0]} is no causal language model: give one, such as Qwen2ForCausalLM."
        )
    return loaded


def load_causal_lm(path: str, config: ModelConfig, dtype: torch.dtype) -> Any:
    """The transformers model at `path` with all its weights, on the CPU.

    Errors: ModelError, naming what is missing: the folder, its config.json, weight files, some of the weights.
    """
    path = model_path(path)
    loaded = load_config(path, config)
    _check_files(path, "model.path", WEIGHT_FILES, "weights")
    with _explained(path, "model.path", "its weights could not be loaded"), quiet():
        loader: Any = AutoModelForCausalLM
        model, report = loader.from_pretrained(
            path, config=loaded, dtype=dtype, trust_remote_code=config.trust_remote_code, output_loading_info=True
        )
    if report["unexpected_keys"]:
        log.warning(
            "model.path=%s: weights that %s does not have: %s", path, type(model).__name__, report["unexpected_keys"]
        )
    missing = sorted({*report["missing_keys"], *(key[0] for key in report["mismatched_keys"])})
    if missing:
        names = ", ".join(missing[:NAMES_SHOWN])
        raise ModelError(f"model.path={path}: {len(missing)} weights are missing or of another shape: {names}.")
    untied = sorted(
        model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys.keys()
    )
    if untied:
        raise ModelError(
            f"model.path={path}: config.json (tie_word_embeddings) ties {untied[0]} to another weight, from which it "
            "differs in the weight files: correct config.json."
        )
    return model


def empty_causal_lm(path: str, config: ModelConfig, dtype: torch.dtype) -> Any:
    """The same model without weights: parameters are on the meta device, to be replaced by tensors from elsewhere;
    buffers (rotary frequencies) are real. Errors: ModelError as `load_config`."""
    loaded = load_config(path, config)
    with no_init_weights():  # parameters are allocated but never written, so take no memory
        maker: Any = AutoModelForCausalLM
        model = maker.from_config(loaded, dtype=dtype, trust_remote_code=config.trust_remote_code)
    forget_weights(model)
    return model


def forget_weights(model: Any) -> None:
    """Parameters of a transformers model to the meta device, where they take no memory; tied ones stay tied."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty_like(parameter, device="meta")
            setattr(module, name, torch.nn.Parameter(empty, parameter.requires_grad))
    model.tie_weights(recompute_mapping=False)


def source_dtype(loaded: Any) -> torch.dtype:
    """The dtype that a model folder's configuration says its weights have; float32 if it says none."""
    dtype = getattr(loaded, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"model.chat_template={path}: {error.strerror}. It is the path of a jinja file.") from error


def _is_local(path: str) -> bool:
    """Whether `path` can only be a folder: it is there, or no hub name (owner/name, or name) looks like it."""
    return Path(path).exists() or path.startswith((".", os.sep)) or path.count("/") > 1


def _check_folder(path: str, key: str = "model.path") -> None:
    if not _is_local(path):
        return
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"{key}={path}: {'not a folder' if folder.exists() else 'no such folder'}.")
    if not (folder / "config.json").is_file() and key == "model.path":
        raise ModelError(f"{key}={path}: no config.json there, so it is no Hugging Face model folder.")


def _check_files(path: str, key: str, patterns: Sequence[str], what: str) -> None:
    if _is_local(path) and not any(file for pattern in patterns for file in Path(path).glob(pattern)):
        raise ModelError(f"{key}={path}: no {what} there ({', '.join(patterns)}).")


@contextmanager
def _explained(path: str, key: str, what: str) -> Iterator[None]:
    """Whatever transformers raises, as one ModelError with its cause; a damaged file is named."""
    try:
        yield
    except Exception as error:
        damaged = [file.name for file in sorted(Path(path).glob("*.safetensors")) if not _readable(file)]
        if damaged:
            raise ModelError(f"{key}={path}: {damaged[0]} is damaged or cut short: fetch it again.") from error
        where = "" if _is_local(path) else " It is no folder here, so it was looked up on the hub."
        cause = str(error).strip().splitlines() or [""]
        raise ModelError(f"{key}={path}: {what}.{where} {type(error).__name__}: {cause[0]}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars for what takes no time, and no table of missing weights: those are an error here."""
    settings: Any = hf_logging
    bars, verbosity = settings.is_progress_bar_enabled(), settings.get_verbosity()
    settings.disable_progress_bar()
    settings.set_verbosity_error()
    try:
        yield
    finally:
        settings.set_verbosity(verbosity)
        if bars:
            settings.enable_progress_bar()


def _readable(file: Path) -> bool:
    try:
        with safe_open(file, "pt"):
            return True
    except (SafetensorError, OSError):
        return False
