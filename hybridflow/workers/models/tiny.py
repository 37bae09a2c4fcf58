"""A tiny Qwen2 with a character vocabulary, made on the spot, for the demo and the doctor."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
PAD, USER, ASSISTANT, END = "<pad>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny_model(
    folder: Path, seed: int, *, characters: str = CHARACTERS, hidden: int = 128, layers: int = 2
) -> Path:
    """Write a randomly initialised model and its tokenizer as a Hugging Face folder; returns the folder.

    With the defaults and a short alphabet it has about 0.5 M parameters.
    """
    import torch
    import transformers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    from .loading import quiet

    hf: Any = transformers  # its classes are typed only in part
    byte_names: Any = bytes_to_unicode
    # A byte-level BPE without merges: transformers rebuilds a Qwen2 folder's tokenizer from its vocabulary as one.
    pieces = [byte_names()[ord(character)] for character in characters]
    vocabulary = {token: i for i, token in enumerate((PAD, USER, ASSISTANT, END, *pieces))}
    tokenizer = hf.Qwen2Tokenizer(
        vocabulary, [], unk_token=None, pad_token=PAD, eos_token=END, extra_special_tokens=[USER, ASSISTANT]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    config = hf.Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary[END],
        pad_token_id=vocabulary[PAD],
    )
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    with quiet():
        hf.Qwen2ForCausalLM(config).save_pretrained(folder)
    torch.set_rng_state(generator_state)
    tokenizer.save_pretrained(folder)
    return folder
