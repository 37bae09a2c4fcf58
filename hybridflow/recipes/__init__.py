"""The drivers. Each is one screen; copy one and edit it."""

from .evaluate import evaluate as evaluate
from .grpo import grpo as grpo
from .sft import sft as sft
