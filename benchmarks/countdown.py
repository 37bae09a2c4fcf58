"""A model whose prompt says how long its completion gets, so that two frameworks sample exactly as many tokens.

Token <k> is followed by <k-1>, <0> by the end token. Weights are random but for this: token embeddings outweigh what
the layers add to them, and the output row of <k-1> points along the embedding of <k>. The layers are any Qwen2's.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

LONGEST = 128
PAD, END = "<pad>", "<end>"
LEAST_LOGIT_GAP = (
    16.0  # between the next token and any other: wrong about once in a million tokens, yet no denormal gradients
)


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and of completions, both ends included; uniform between them."""

    prompt: tuple[int, int]
    completion: tuple[int, int]
    max_new_tokens: int


MIXED = Lengths(prompt=(8, 64), completion=(8, LONGEST), max_new_tokens=LONGEST)
FIXED = Lengths(prompt=(32, 32), completion=(LONGEST, LONGEST), max_new_tokens=64)


def prompts(count: int, lengths: Lengths, seed: int) -> list[str]:
    """Letters, then the token that sets the completion's length."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        letters = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(*lengths.prompt) - 1))
        made.append(f"{letters}<{draw.randint(*lengths.completion) - 1}>")
    return made


def save_model(folder: Path, hidden: int, layers: int, seed: int) -> int:
    """Writes model and tokenizer as a Hugging Face folder; the number of parameters."""
    tokenizer = _tokenizer()
    number = tokenizer.get_vocab()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=number[END],
        pad_token_id=number[PAD],
    )
    model = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    _count_down(model, number[END], [number[f"<{k}>"] for k in range(LONGEST)])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def _tokenizer() -> Qwen2Tokenizer:
    """One token per letter and per count; no chat template, so that prompts are taken as they are."""
    vocabulary = {token: i for i, token in enumerate((PAD, END, *string.ascii_lowercase))}
    tokenizer = Qwen2Tokenizer(vocabulary, [], unk_token=PAD, pad_token=PAD, eos_token=END)
    tokenizer.add_tokens([f"<{k}>" for k in range(LONGEST)])
    return tokenizer


@torch.no_grad()
def _count_down(model: Qwen2ForCausalLM, end: int, counts: list[int]) -> None:
    embeddings = model.model.embed_tokens.weight
    embeddings.normal_()
    directions = torch.nn.functional.normalize(embeddings[counts], dim=1)
    likeness = (directions @ directions.T).fill_diagonal_(0).max()
    scale = LEAST_LOGIT_GAP / (model.config.hidden_size**0.5 * (1 - likeness))
    model.lm_head.weight.zero_()
    model.lm_head.weight[[end, *counts[:-1]]] = scale * directions
