"""A key that somebody set and nobody will read is an error: what the user thinks happens does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..algorithms.objective import head_of, reads_old_logprobs
from ..algorithms.registry import Loss, columns_of, required_columns_of, resolve
from ..errors import ConfigError
from .data_sources import has_splits
from .tree import Config


@dataclass(frozen=True)
class Rule:
    """`keys` (or nodes, with all their keys) are read by nothing while `idle`; `why`, a format of the configuration
    `c`, completes `KEY is set, but`."""

    keys: tuple[str, ...]
    idle: Callable[[Config], bool]
    why: str


def _old_logprobs_are_read(config: Config) -> bool:
    return reads_old_logprobs(_loss(config), config.algorithm, resolve(config.advantage.name, "advantage"))


def _loss(config: Config) -> Loss:
    return Loss(config.loss.name, **config.loss.options)


RULES = (
    Rule(
        ("algorithm.aggregation", "algorithm.entropy_coef", "algorithm.kl_stop"),
        lambda c: head_of(_loss(c)) == "score",
        "loss={c.loss.name} is a mean over pairs of scores and reads it nowhere: leave it out.",
    ),
    Rule(
        ("algorithm.kl_coef", "algorithm.kl_estimator", "algorithm.kl_horizon", "placement.reference"),
        lambda c: c.algorithm.kl == "none",
        "algorithm.kl=none reads it nowhere: say algorithm.kl=loss or algorithm.kl=reward.",
    ),
    Rule(
        ("algorithm.kl_horizon",),
        lambda c: c.algorithm.kl == "loss",
        "algorithm.kl=loss has a fixed coefficient and reads it nowhere: say algorithm.kl=reward.",
    ),
    Rule(
        ("algorithm.kl_horizon",),
        lambda c: c.algorithm.kl_target is None,
        "the coefficient only adapts to a target: set algorithm.kl_target.",
    ),
    Rule(
        ("algorithm.kl_stop",),
        lambda c: c.algorithm.epochs * c.algorithm.minibatches == 1,
        "there is one optimizer step per batch, nothing to stop early: set algorithm.epochs or algorithm.minibatches.",
    ),
    Rule(
        ("algorithm.old_policy",),
        lambda c: not _old_logprobs_are_read(c),
        "loss={c.loss.name} reads no old log-probs: leave it out, or say loss=ppo_clip or algorithm.kl=reward.",
    ),
    Rule(
        ("data.split",),
        lambda c: not has_splits(c.data.path),
        "data.path={c.data.path} has no splits: leave it out, or give a folder with a file for each.",
    ),
    Rule(
        ("data.validation_split",),
        lambda c: c.data.validation_path is None and not has_splits(c.data.path),
        "data.path={c.data.path} has no splits: set data.validation_path.",
    ),
    Rule(
        ("data.validation_split",),
        lambda c: c.data.validation_path is not None and not has_splits(c.data.validation_path),
        "data.validation_path={c.data.validation_path} has no splits: leave it out.",
    ),
    Rule(
        ("reference",),
        lambda c: c.algorithm.kl == "none",
        "algorithm.kl=none builds no reference: say algorithm.kl=loss or algorithm.kl=reward.",
    ),
    Rule(
        ("reward.model",),
        lambda c: c.data.kind == "prompts" and "model" not in c.reward.functions,
        "reward.functions does not name its score: add model to reward.functions.",
    ),
    Rule(
        ("reward.timeout_s",),
        lambda c: c.reward.workers == 0,
        "reward.workers=0 scores in the driver, where nothing times out: set reward.workers.",
    ),
    Rule(
        ("placement.reward_model",),
        lambda c: c.reward.model is None and head_of(_loss(c)) != "score",
        "nothing asks for a reward model: say reward.functions=[model] reward.model=PATH.",
    ),
    Rule(
        ("run.epochs",),
        lambda c: c.run.steps is not None,
        "run.steps says how long the run is: leave out one of the two.",
    ),
)

NODE_OF_ROLE = {
    "critic": ("critic", "algorithm.critic_warmup_steps", "placement.critic"),
    "reference": ("reference", "algorithm.kl", "placement.reference"),
    "reward": ("reward.functions", "reward.weights", "reward.workers", "reward.timeout_s", "reward.max_error_fraction"),
    "reward_model": ("reward.model", "placement.reward_model"),
}
"""Role -> the nodes and keys that it alone reads."""

LEARNER = {"lm": "actor", "value": "critic", "score": "reward_model"}
"""What a loss is of -> the role that learns by it."""
BUILT_IN = {"actor", *NODE_OF_ROLE}
"""The roles whose work is known; one of a user's own may do any."""

READ_BY_SAMPLING = (
    "sampling",
    "rollout",
    "advantage",
    "validation.sampling",
    "validation.pass_at",
    "algorithm.old_policy",
)
READ_BY_TRAINING = (
    "training.lr",
    "training.lr_schedule",
    "training.warmup_steps",
    "training.weight_decay",
    "training.adam_betas",
    "training.grad_clip",
    "training.activation_checkpointing",
    "algorithm",
    "loss",
    "advantage",
    "sampling.n",
    "data.split",
    "data.shuffle",
    "data.rows_per_step",
    "validation.every_steps",
    "validation.before_training",
    "validation.metric",
    "validation.patience",
    "run.steps",
    "run.epochs",
    "run.max_hours",
    "run.resume",
    "run.checkpoint_steps",
    "run.checkpoints_kept",
    "run.export",
)
READ_BETWEEN_STEPS = ("validation.before_training", "validation.metric")
"""What only validation by steps() reads; a driver's own run.validate reads the rest of the node."""
READ_BY_VALIDATION = ("validation", "data.validation_rows", "data.validation_split")


def unread(config: Config) -> None:
    """Errors: ConfigError for the first key (by name) that was set and that other keys leave unread."""
    for key in sorted(config.said):
        for rule in RULES:
            if _among(key, rule.keys) and rule.idle(config):
                raise ConfigError(f"{key} is set, but {rule.why.format(c=config)}")


def unread_by_roles(config: Config, roles: Iterable[str], recipe: str, *, trains: bool = True) -> None:
    """What can be seen once the driver has declared its roles: keys of roles that it lacks, a reward that it needs.

    trains: whether it takes steps. Errors: ConfigError.
    """
    declared = set(roles)
    for role, keys in NODE_OF_ROLE.items():
        if role not in declared:
            refuse(config, keys, f"{recipe} has no {role}.")
    if config.data.kind != "prompts":
        keep = ("sampling.max_new_tokens",) if config.algorithm.aggregation == "sequence_sum_constant" else ()
        refuse(config, READ_BY_SAMPLING, f"{recipe} samples nothing (data.kind={config.data.kind}).", but=keep)
    if not trains:
        refuse(config, READ_BY_TRAINING, f"{recipe} does not train.")
    elif config.validation.every_steps == 0:
        refuse(config, READ_BETWEEN_STEPS, "validation.every_steps=0 validates never: set it above 0.")
    if "reward" in declared and not config.reward.functions:
        raise ConfigError(
            f"{recipe} needs a reward: say reward.functions=[exact], math or last_integer (a response against the "
            "row's answer), or [path/to/file.py:name] for your own."
        )
    if trains:
        _check_learners(config, declared, recipe)


def _check_learners(config: Config, declared: set[str], recipe: str) -> None:
    """Errors: ConfigError for a loss that none of the roles can learn by, and for a critic that nothing listens to, or
    an estimator that nothing gives values."""
    learner = LEARNER[head_of(_loss(config))]
    if learner not in declared <= BUILT_IN:
        raise ConfigError(f"loss={config.loss.name} is what a role {learner} learns by, and {recipe} has none.")
    if config.data.kind != "prompts" or "actor" not in declared:
        return
    name, estimator = config.advantage.name, resolve(config.advantage.name, "advantage")
    if "critic" in declared and "values" not in columns_of(estimator):
        raise ConfigError(f"{recipe} has a critic, but advantage={name} reads no values of it: say advantage=gae.")
    if "values" in required_columns_of(estimator) and "critic" not in declared <= BUILT_IN:
        raise ConfigError(
            f"advantage={name} reads the values of a critic, and {recipe} has none: take another advantage, or a "
            "recipe that has one, such as ppo."
        )


def unread_without_validation(config: Config, why: str) -> None:
    """Errors: ConfigError for a key of validation that was set, though there are no validation rows; `why` says why."""
    refuse(config, READ_BY_VALIDATION, f"there are no validation rows: {why}")


def refuse(config: Config, keys: tuple[str, ...], why: str, but: tuple[str, ...] = ()) -> None:
    """Errors: ConfigError if one of these keys (or one of a node) was set; `why` completes `KEY is set, but`."""
    for key in sorted(config.said):
        if _among(key, keys) and key not in but:
            raise ConfigError(f"{key} is set, but {why}")


def _among(key: str, keys: tuple[str, ...]) -> bool:
    """Whether a key is one of `keys` or lies under one."""
    return any(key == each or key.startswith(f"{each}.") for each in keys)
