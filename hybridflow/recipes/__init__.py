"""The drivers. Each is one screen; copy one and edit it."""

from .evaluate import evaluate as evaluate
from .grpo import grpo as grpo
from .ppo import ppo as ppo
from .reward_model import reward_model as reward_model
from .sft import sft as sft
