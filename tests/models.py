"""Tiny random models and a character tokenizer with a chat template, saved as a Hugging Face folder."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>")
CHARACTERS = string.printable[:95] + "\n"  # digits, letters, punctuation, space, newline
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


def character_tokenizer() -> Qwen2Tokenizer:
    """One token an ASCII character; `<pad>` 0, `<|im_start|>` 1, `<|im_end|>` 2 (the end of a turn).

    A byte-level BPE without merges, because transformers rebuilds Qwen's tokenizer from its vocabulary and drops any
    other kind of tokenizer that a Qwen2 folder holds.
    """
    pieces = [bytes_to_unicode()[ord(character)] for character in CHARACTERS]
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *pieces))}
    tokenizer = Qwen2Tokenizer(
        vocabulary, [], unk_token=None, pad_token="<pad>", eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(
    family: str = "qwen2",
    hidden: int = 64,
    layers: int = 2,
    vocab: int = 100,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = True,
    seed: int = 0,
    **overrides: Any,
) -> Any:
    """A random causal LM. Its weights are three times wider than at a usual start, so that logits differ visibly."""
    config_class, model_class = FAMILIES[family]
    if family == "qwen3":
        overrides = {"head_dim": hidden // heads, **overrides}
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        initializer_range=0.06,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        **overrides,
    )
    torch.manual_seed(seed)
    return model_class(config)


def tiny_model_folder(
    path: Path,
    family: str = "qwen2",
    hidden: int = 64,
    layers: int = 2,
    vocab: int = 100,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Path:
    """Saves a tiny random model and the character tokenizer to `path`; the options are those of `tiny_model`."""
    tiny_model(family, hidden, layers, vocab, **options).to(dtype).save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return path
