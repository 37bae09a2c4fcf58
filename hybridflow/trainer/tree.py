"""The configuration of a run: one typed tree. A node's keys are documented in its dataclass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from omegaconf import II, OmegaConf

from ..algorithms.config import AlgorithmConfig
from ..algorithms.registry import Loss
from ..engines import Sampling
from ..errors import ConfigError
from ..workers.models.config import ModelConfig
from ..workers.rollout.config import RolloutConfig
from ..workers.scoring import RewardConfig
from ..workers.training.config import FSDPConfig
from .data_config import DataConfig
from .placement import PlacementConfig


@dataclass
class SamplingConfig:
    """How to sample in training."""

    n: int = 8
    """Samples per prompt: the size of a group."""
    temperature: float = 1.0
    """Divides the logits, the trainer's too; 0 = greedy (validation only)."""
    top_p: float = 1.0
    """Smallest set of tokens of this probability; 1 = all (validation only)."""
    top_k: int = -1
    """So many most probable tokens; -1 = all (validation only)."""
    min_p: float = 0.0
    """Tokens of at least this share of the most probable one's probability; 0 = all (validation only)."""
    max_new_tokens: int = 512
    """Sampled tokens of one turn."""
    stop: list[str | int] = field(default_factory=list)
    """Strings or token ids that end a response, beside the model's own end of text; they are part of it."""
    banned_tokens: list[int] = field(default_factory=list)
    """Token ids never sampled, and masked in the trainer's logits too."""

    def sampling(self) -> Sampling:
        """The same as the engines take it."""
        return Sampling(**{**asdict(self), "stop": tuple(self.stop), "banned_tokens": tuple(self.banned_tokens)})


def _following_sampling() -> SamplingConfig:
    """One sample; every other key is the one of `sampling` until it is set apart."""
    followers: dict[str, Any] = {key.name: II(f"sampling.{key.name}") for key in fields(SamplingConfig)}
    return SamplingConfig(**{**followers, "n": 1})


@dataclass
class FollowingTraining(FSDPConfig):
    """`critic.training.*`: every key is the one of `training` until it is set apart."""

    def __post_init__(self) -> None:
        """Errors: ConfigError for a value out of its range."""
        lr: Any = self.lr
        if isinstance(lr, str):  # a reference to training.lr, which nobody has resolved yet
            return
        try:
            super().__post_init__()
        except ConfigError as error:
            raise ConfigError(f"critic.{error.message}") from None


def _following_training() -> FollowingTraining:
    followers: dict[str, Any] = {key.name: II(f"training.{key.name}") for key in fields(FollowingTraining)}
    return FollowingTraining(**followers)


@dataclass
class CriticConfig:
    """The model that says how much reward is still to come. Built only where the recipe has a critic."""

    path: str | None = None
    """Hugging Face folder or hub name of a model with the policy's tokenizer: a language model gets a new head, a
    reward model keeps its own; null = the actor's initial weights."""
    clip_value: float | None = 0.2
    """How far a value may move from the one before the update and still be learned from, in units of reward; null = as
    far as it likes."""
    training: FSDPConfig = field(default_factory=_following_training)
    """The keys of `training`, for the critic: each follows training.* until it is set apart. All weights are trained,
    whatever model.freeze says."""

    def __post_init__(self) -> None:
        """Errors: ConfigError for a value out of its range."""
        Loss("value_clip", clip_value=self.clip_value)


@dataclass
class ReferenceConfig:
    """The frozen model that a KL penalty holds the policy to. Built only where algorithm.kl is not none."""

    path: str | None = None
    """Hugging Face folder or hub name; null = the actor's initial weights."""


@dataclass
class ValidationConfig:
    """When and how to measure on the validation rows."""

    sampling: SamplingConfig = field(default_factory=_following_sampling)
    """n = 1; every other key follows sampling.* until it is set apart."""
    every_steps: int = 20
    """Steps between validations; 0 = never."""
    before_training: bool = True
    """Also validate before the first step."""
    pass_at: list[int] = field(default_factory=lambda: [1])
    """k of each pass@k to report; at most validation.sampling.n. A sample is solved if its first reward function that
    applies gives at least 0.999."""
    metric: str = "reward"
    """The validation number that the best checkpoint and the early stop go by."""
    patience: int | None = None
    """Validations without improvement before the run stops; null = no early stop."""


@dataclass
class RunConfig:
    """The run itself: its folder, length, checkpoints and trackers."""

    dir: str = "runs/run"
    """The run folder."""
    seed: int = 0
    """Orders rows, draws samples and mini-batches."""
    steps: int | None = None
    """Steps to train; null = as many as run.epochs make."""
    epochs: int = 1
    """Passes over the training rows."""
    max_hours: float | None = None
    """Hours after which the run checkpoints and ends; null = no limit."""
    resume: str = "auto"
    """auto (from the newest checkpoint in run.dir) | never | a checkpoint folder."""
    checkpoint_steps: int = 50
    """Steps between checkpoints; 0 = only at the end."""
    checkpoints_kept: int = 2
    """Newest checkpoints kept, beside the best."""
    export: bool = True
    """Write a Hugging Face folder at the end."""
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Where numbers go beside metrics.jsonl: registered names or path/file.py:name."""
    completions_shown: int = 2
    """Completions of a step printed to the console; 0 = none."""
    runtime: str = "auto"
    """inline (one rank in this process) | ray (a cluster) | auto: inline wherever one device is enough."""
    call_timeout_s: float = 1800.0
    """Seconds a call to a worker may execute before the run ends and says where it hangs; 0 = no limit. Ray only."""
    start_timeout_s: float = 600.0
    """Seconds in which devices must become free and each role start. Ray only."""
    debug: str = "none"
    """none | ROLE:RANK: that rank waits for a debugger at each call, without deadlines. Ray only."""
    deterministic: bool = False
    """Repeat bit for bit on the same machine and layout, at some cost in speed."""


@dataclass(frozen=True)
class Plugin:
    """A chosen advantage or loss: its registered name or file.py:name, and all keyword-only parameters of it."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Config:
    """A complete, checked configuration; `compose` and `configure` make it.

    options: the recipe's own options object; None if it has none. said: keys that the user set.
    """

    model: ModelConfig
    data: DataConfig
    sampling: SamplingConfig
    training: FSDPConfig
    rollout: RolloutConfig
    advantage: Plugin
    loss: Plugin
    algorithm: AlgorithmConfig
    reward: RewardConfig
    critic: CriticConfig
    reference: ReferenceConfig
    validation: ValidationConfig
    placement: PlacementConfig
    run: RunConfig
    options: Any = None
    said: frozenset[str] = frozenset()


def resolved(config: Config) -> dict[str, Any]:
    """The configuration as plain nested values, in the order of the tree; `options` only where the recipe has some."""
    tree = asdict(config)
    del tree["said"]
    for kind in ("advantage", "loss"):
        tree[kind] = {"name": tree[kind]["name"], **tree[kind]["options"]}
    if config.options is None:
        del tree["options"]
    return tree


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a nested mapping with their values; an empty mapping is a value."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def to_yaml(config: Config) -> str:
    """`resolved` as YAML text."""
    return OmegaConf.to_yaml(OmegaConf.create(resolved(config)))
