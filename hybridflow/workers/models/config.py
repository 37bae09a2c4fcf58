"""Configuration of the model that is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class ModelConfig:
    """`model.*`."""

    path: str = MISSING
    """A Hugging Face folder or a hub name."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; null = path."""
    chat_template: str | None = None
    """A jinja file; null = the tokenizer's own template."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    attention: str = "auto"
    """auto | sdpa | flash. flash (torch's variable-length attention) needs an accelerator and training.precision=bf16;
    auto takes it where it can run."""
    freeze: list[str] = field(default_factory=list)
    """Globs of checkpoint names that are not trained, such as "model.embed_tokens.*"."""
