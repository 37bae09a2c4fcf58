"""Every mistake in a configuration, and the message that answers it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hybridflow.errors import ConfigError
from hybridflow.trainer.config import compose, unread_by_roles

pytestmark = pytest.mark.unit

PLUGINS = """
def no_apology(response: str) -> float:
    return float("sorry" not in response)


def soft_clip(logprobs, old_logprobs, advantages, *, width: float = 0.2):
    return -advantages


def median_baseline(reward, group_id, keep, *, scale: float = 1.0):
    return scale * reward


class Other:
    class no_apology:
        pass
"""

BASE = "model=smollm2 data=gsm8k "
MISTAKES = {
    # ---- keys
    BASE + "samplng.n=4": "samplng.n: no such key. Did you mean sampling.n? (all keys: hybridflow RECIPE --cfg job)",
    BASE + "lr=1e-5": "lr: no such key. Did you mean training.lr? (all keys: hybridflow RECIPE --cfg job)",
    BASE
    + "algorithm.lr=1": "algorithm.lr: no such key. Did you mean training.lr? (all keys: hybridflow RECIPE --cfg job)",
    BASE + "xylophone=1": "xylophone: no such key. (all keys: hybridflow RECIPE --cfg job)",
    BASE
    + "sampling.n.deeper=1": "sampling.n.deeper: no such key. Did you mean sampling.n? (all keys: hybridflow RECIPE --cfg job)",
    BASE + "data.tsk.a=1": "data.tsk.a: no such key. Did you mean data.task? (all keys: hybridflow RECIPE --cfg job)",
    BASE + "options.k=1": "options.k: no such key: this recipe has no options of its own.",
    BASE + "defaults=1": "defaults: no such key. (all keys: hybridflow RECIPE --cfg job)",
    BASE + "reference=x": "reference=x: reference has keys of its own; set those: reference.path.",
    BASE + "training.engine=megatron": "training.engine=megatron: say training=megatron.",
    BASE + "algorithm.name=sft": "algorithm.name=sft: say algorithm=sft.",
    BASE + "loss.name=sft": "loss.name=sft: say loss=sft.",
    # ---- how an override is written
    BASE + "sampling.n": "sampling.n: overrides are written key=value, such as training.lr=1e-6.",
    BASE + "=3": "=3: overrides are written key=value, such as training.lr=1e-6.",
    BASE + "+sampling.n=4": "+sampling.n=4: keys can't be added or removed; write sampling.n=value.",
    BASE + "~run.trackers": "~run.trackers: keys can't be added or removed; write run.trackers=value.",
    BASE + "training.lr=1e-6,3e-6": "training.lr=1e-6,3e-6: several values are a sweep: add -m. A list is written "
    "training.lr=[1e-6,3e-6].",
    BASE
    + "sampling.stop=[<a>": "sampling.stop=[<a>: cannot be read. Text with special characters goes in quotes, and these "
    "in quotes for the shell: 'sampling.stop=\"...\"', or 'sampling.stop=[\"...\"]' for a list.",
    # ---- options of groups
    "model=Qwen/Qwen2.5-0.5B-Instruct data=gsm8k": "model=Qwen/Qwen2.5-0.5B-Instruct: no such configuration. Known: default, "
    "smollm2. For a path write model.path=Qwen/Qwen2.5-0.5B-Instruct.",
    "model=smollm2 data=./rows.jsonl": "data=./rows.jsonl: no such configuration. Known: arithmetic, default, gsm8k, "
    "reasoning_gym. For a path write data.path=./rows.jsonl.",
    BASE + "training=fsdp2": "training=fsdp2: no such configuration. Known: fsdp. Did you mean fsdp?",
    BASE
    + "rollout=transformer": "rollout=transformer: no such configuration. Known: transformers. Did you mean transformers?",
    BASE + "algorithm=gppo": "algorithm=gppo: no such configuration. Known: grpo, reinforce, sft. Did you mean grpo?",
    "data=gsm8k": "model.path is not set: say model.path=... or pick model=smollm2.",
    "model=smollm2": "data.path is not set: say data.path=... or pick data=arithmetic|gsm8k|reasoning_gym.",
    # ---- types
    BASE
    + "training.lr=fast": "training.lr=fast: wrong type. Value 'fast' of type 'str' could not be converted to Float",
    BASE
    + "sampling.n=1.5": "sampling.n=1.5: wrong type. Value '1.5' of type 'float' could not be converted to Integer",
    BASE + "sampling.n=null": "sampling.n=null: wrong type. field 'sampling.n' is not Optional",
    BASE + "training.lr=${sampling.m}": "training: Interpolation key 'sampling.m' not found",
    # ---- plug-ins
    BASE
    + "loss=reinforce loss.dual_clip=3": "loss.dual_clip: loss=reinforce has no such key; it belongs to loss=ppo_clip.",
    BASE + "algorithm=sft loss.clip_low=1": "loss.clip_low: loss=sft has no such key; it belongs to loss=ppo_clip.",
    BASE
    + "loss.clip_hihg=3": "loss.clip_hihg: loss=ppo_clip has no such key. Did you mean clip_high? Its keys: clip_low, "
    "clip_high, dual_clip.",
    BASE + "loss.clip_high=wide": "loss.clip_high=wide: wrong type. loss=ppo_clip has the default 0.2.",
    BASE
    + "loss=ppo_clp": "loss 'ppo_clp' is not registered. Known: ppo_clip, reinforce, sft. Did you mean ppo_clip? For your "
    "own, write path/to/file.py:name.",
    BASE + "advantage=gae": "advantage 'gae' is not registered. Known: grpo, reinforce. For your own, write "
    "path/to/file.py:name.",
    BASE
    + "loss=./my_plugins.py:soft_clip loss.wdth=1": "loss.wdth: loss=./my_plugins.py:soft_clip has no such key. Did you "
    "mean width? Its keys: width.",
    BASE + "loss=./my.py:f": "loss './my.py:f': no file ./my.py.",
    BASE + "reward.functions=./my.py:f": "reward './my.py:f': no file ./my.py.",
    BASE
    + "reward.functions=[maths]": "reward 'maths' is not registered. Known: exact, last_integer, math. Did you mean math? "
    "For your own, write path/to/file.py:name.",
    BASE
    + "reward.functions=[./my_plugins.py:no_apologies]": "reward './my_plugins.py:no_apologies': ./my_plugins.py defines "
    "no_apology, soft_clip, median_baseline, Other, not no_apologies.",
    BASE
    + "reward.functions=[math,math]": "reward.functions: two are called 'math', but reward/math is one column: rename one.",
    BASE
    + "reward.functions=[math,exact] reward.weights=[1]": "reward.weights has 1 values for the 2 of reward.functions: give "
    "one each, or none for all 1.",
    BASE + "run.trackers=tensorbord": "tracker 'tensorbord' is not registered. Known: tensorboard, wandb. Did you mean "
    "tensorboard? For your own, write path/to/file.py:name.",
    # ---- legal values
    BASE + "data.kind=pairs": "data.kind=pairs: it is one of prompts, examples.",
    BASE + "data.overlong_prompt=drp": "data.overlong_prompt=drp: it is one of drop, error. Did you mean drop?",
    BASE + "model.attention=flsh": "model.attention=flsh: it is one of auto, sdpa, flash. Did you mean flash?",
    BASE + "training.precision=fp16": "training.precision=fp16: it is one of auto, fp32, bf16. Did you mean bf16?",
    BASE
    + "algorithm.aggregation=mean": "algorithm.aggregation=mean: it is one of token_mean, sequence_mean_token_mean, "
    "sequence_mean_token_sum, sequence_sum_constant, group_mean.",
    BASE + "algorithm.kl=los": "algorithm.kl=los: it is one of none, reward, loss. Did you mean loss?",
    BASE + "algorithm.kl_estimator=k4": "algorithm.kl_estimator=k4: it is one of k1, k2, k3.",
    BASE + "algorithm.old_policy=old": "algorithm.old_policy=old: it is one of recompute, rollout, current.",
    BASE
    + "run.resume=atuo": "run.resume=atuo: it is auto, never or a checkpoint folder, and there is no folder atuo. Did you "
    "mean auto?",
    BASE + "sampling.n=0": "sampling.n=0: it is at least 1.",
    BASE + "validation.sampling.n=0": "validation.sampling.n=0: it is at least 1.",
    BASE + "sampling.temperature=-1": "sampling.temperature=-1.0: it is at least 0.",
    BASE + "training.lr=-1": "training.lr=-1.0: it is 0 or more.",
    BASE + "training.lr=nan": "training.lr=nan: a finite number is needed.",
    BASE + "run.max_hours=inf": "run.max_hours=inf: a finite number is needed.",
    BASE + "run.steps=0": "run.steps=0: it is at least 1.",
    BASE + "data.rows_per_step=0": "data.rows_per_step=0: it is at least 1.",
    BASE + "rollout.max_concurrent=0": "rollout.max_concurrent=0: it is at least 1.",
    BASE + "algorithm.minibatches=0": "algorithm.minibatches=0: it is at least 1.",
    BASE
    + "validation.sampling.top_p=0": "validation.sampling.top_p=0.0: it is above 0 and at most 1 (1 = all tokens).",
    BASE + "validation.sampling.top_k=0": "validation.sampling.top_k=0: it is at least 1, or -1 for all tokens.",
    BASE + "validation.sampling.min_p=2": "validation.sampling.min_p=2.0: it is between 0 (all tokens) and 1.",
    BASE + "sampling.banned_tokens=-1": "sampling.banned_tokens=[-1]: token ids are 0 or more.",
    BASE + "sampling.stop=[\"''\"]": "sampling.stop=['']: an empty string would end every response at once.",
    # ---- several keys together
    BASE
    + "sampling.n=1": "advantage=grpo compares samples of one prompt, but sampling.n=1: every advantage would be 0. Set "
    "sampling.n>=2, or advantage=reinforce.",
    BASE
    + "data.rows_per_step=2 sampling.n=2 algorithm.minibatches=8": "algorithm.minibatches=8 optimizer steps, but a step has "
    "only 4 rollouts (data.rows_per_step=2 prompts x sampling.n=2).",
    BASE
    + "algorithm=sft data.rows_per_step=2 algorithm.minibatches=3": "algorithm.minibatches=3 optimizer steps, but a step "
    "has only 2 rows (data.rows_per_step=2).",
    BASE
    + "sampling.top_p=0.9": "sampling.top_p=0.9: top_p is for validation, validation.sampling.top_p=0.9. In training its "
    "effect on the log-probs would need a correction; leave sampling.top_p=1.0.",
    BASE
    + "sampling.top_k=20": "sampling.top_k=20: top_k is for validation, validation.sampling.top_k=20. In training its effect "
    "on the log-probs would need a correction; leave sampling.top_k=-1.",
    BASE
    + "sampling.min_p=0.1": "sampling.min_p=0.1: min_p is for validation, validation.sampling.min_p=0.1. In training its "
    "effect on the log-probs would need a correction; leave sampling.min_p=0.0.",
    BASE
    + "sampling.temperature=0": "sampling.temperature=0 is greedy: all samples of a prompt would be equal, and the trainer "
    "divides its logits by it. Set it above 0; for greedy validation say validation.sampling.temperature=0.",
    BASE
    + "algorithm.old_policy=current algorithm.epochs=2 algorithm.minibatches=2": "algorithm.old_policy=current with 4 "
    "optimizer steps per batch (algorithm.minibatches=2 x algorithm.epochs=2): the ratio would always be 1. Say "
    "algorithm.old_policy=recompute or rollout, or take one optimizer step.",
    BASE
    + "algorithm.kl=reward algorithm.old_policy=current": "algorithm.kl=reward needs old log-probs before the update, and "
    "algorithm.old_policy=current has none: say algorithm.old_policy=recompute or rollout.",
    BASE
    + "validation.pass_at=[1,16] validation.sampling.n=4": "validation.pass_at=[1, 16]: pass@16 needs 16 samples of each "
    "prompt, but validation.sampling.n=4. Set validation.sampling.n=16, or drop 16.",
    BASE + "validation.patience=3 validation.every_steps=0": "validation.patience=3 counts validations, but "
    "validation.every_steps=0 makes none: set validation.every_steps.",
    BASE + "rollout.max_context_tokens=1024": "rollout.max_context_tokens=1024 is prompt and response together, but "
    "data.max_prompt_tokens=1024 leaves no room for a response: raise the one or lower the other.",
    # ---- set, and read by nothing
    BASE
    + "algorithm.kl_coef=0.01": "algorithm.kl_coef is set, but algorithm.kl=none reads it nowhere: say algorithm.kl=loss or "
    "algorithm.kl=reward.",
    BASE + "algorithm.kl_estimator=k1": "algorithm.kl_estimator is set, but algorithm.kl=none reads it nowhere: say "
    "algorithm.kl=loss or algorithm.kl=reward.",
    BASE + "algorithm.kl_target=6": "algorithm.kl_target is set, but algorithm.kl=none reads it nowhere: say "
    "algorithm.kl=reward.",
    BASE
    + "algorithm.kl=loss algorithm.kl_target=6": "algorithm.kl_target is set, but algorithm.kl=loss reads it nowhere: say "
    "algorithm.kl=reward.",
    BASE + "algorithm.kl_horizon=6": "algorithm.kl_horizon is set, but algorithm.kl=none reads it nowhere: say "
    "algorithm.kl=loss or algorithm.kl=reward.",
    BASE + "algorithm.kl=loss algorithm.kl_horizon=6": "algorithm.kl_horizon is set, but algorithm.kl=loss has a fixed "
    "coefficient and reads it nowhere: say algorithm.kl=reward.",
    BASE
    + "algorithm.kl=reward algorithm.kl_horizon=6": "algorithm.kl_horizon is set, but the coefficient only adapts to a "
    "target: set algorithm.kl_target.",
    BASE
    + "algorithm.kl_stop=0.1": "algorithm.kl_stop is set, but there is one optimizer step per batch, nothing to stop early: "
    "set algorithm.epochs or algorithm.minibatches.",
    BASE
    + "reference.path=x": "reference.path is set, but algorithm.kl=none builds no reference: say algorithm.kl=loss or "
    "algorithm.kl=reward.",
    BASE
    + "reward.workers=0 reward.timeout_s=3": "reward.timeout_s is set, but reward.workers=0 scores in the driver, where "
    "nothing times out: set reward.workers.",
    BASE
    + "run.steps=10 run.epochs=2": "run.epochs is set, but run.steps says how long the run is: leave out one of the two.",
    # ---- reasoning-gym tasks
    BASE
    + "data.task.min_terms=2": "data.task.min_terms is set, but data.path=openai/gsm8k:main reads it nowhere: data.task.* "
    "is for data.path=reasoning_gym:TASK.",
    "model=smollm2 data=reasoning_gym data.task.min_trms=2": "data.task.min_trms: reasoning_gym:chain_sum has no such key. Did "
    "you mean min_terms? Its keys: min_terms, max_terms, min_digits, max_digits, allow_negation, seed, size.",
    "model=smollm2 data.path=reasoning_gym:chain_summ": "data.path=reasoning_gym:chain_summ: no such task. Did you mean "
    "chain_sum?",
}


@pytest.fixture(autouse=True)
def _in_a_folder_with_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_plugins.py").write_text(PLUGINS)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_answered_with_its_remedy(command: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(shlex.split(command))
    assert str(caught.value) == MISTAKES[command]


def test_a_task_itself_judges_its_values() -> None:
    with pytest.raises(ConfigError, match=r"data\.task: reasoning_gym:chain_sum refuses min_terms=-2: .*positive"):
        compose(["model=smollm2", "data=reasoning_gym", "data.task.min_terms=-2"])


UNREAD_BY_ROLES = {
    ("reward.functions=[math]", "algorithm=sft"): "reward.functions is set, but sft has no reward.",
    ("reference.path=x", "algorithm=sft", "algorithm.kl=loss"): "algorithm.kl is set, but sft has no reference.",
    ("sampling.n=4", "algorithm=sft"): "sampling.n is set, but sft samples nothing (data.kind=examples).",
    ("rollout=transformers", "algorithm=sft"): "rollout is set, but sft samples nothing (data.kind=examples).",
    ("rollout.max_concurrent=4", "algorithm=sft"): "rollout.max_concurrent is set, but sft samples nothing "
    "(data.kind=examples).",
    ("advantage=grpo", "algorithm=sft"): "advantage is set, but sft samples nothing (data.kind=examples).",
    (
        "validation.pass_at=[1]",
        "algorithm=sft",
    ): "validation.pass_at is set, but sft samples nothing (data.kind=examples).",
}


@pytest.mark.parametrize("words", UNREAD_BY_ROLES)
def test_keys_of_roles_that_a_recipe_lacks_are_refused(words: tuple[str, ...]) -> None:
    config = compose([*BASE.split(), *words])
    with pytest.raises(ConfigError) as caught:
        unread_by_roles(config, {"actor"}, "sft")
    assert str(caught.value) == UNREAD_BY_ROLES[words]


def test_max_new_tokens_is_read_in_fine_tuning_where_the_aggregation_divides_by_it() -> None:
    words = ["algorithm=sft", "sampling.max_new_tokens=9", "algorithm.aggregation=sequence_sum_constant"]
    unread_by_roles(compose([*BASE.split(), *words]), {"actor"}, "sft")


def test_a_recipe_with_a_reward_needs_a_function() -> None:
    config = compose(BASE.split())
    with pytest.raises(ConfigError, match=r"^grpo needs a reward: say reward\.functions=\[exact\]"):
        unread_by_roles(config, {"actor", "reward"}, "grpo")
    unread_by_roles(config, {"actor", "reward"}, "grpo", has_reward=True)
    unread_by_roles(compose([*BASE.split(), "reward.functions=math"]), {"actor", "reward"}, "grpo")


@pytest.mark.parametrize("word", ["loss=reinforce", "algorithm.epochs=2", "run.steps=3", "validation.patience=3"])
def test_what_only_training_reads_is_refused_where_nothing_trains(word: str) -> None:
    config = compose([*BASE.split(), "reward.functions=math", word])
    with pytest.raises(ConfigError, match=rf"^{word.partition('=')[0]} is set, but evaluate does not train\.$"):
        unread_by_roles(config, {"actor", "reward"}, "evaluate", trains=False)


def test_how_to_validate_is_refused_where_nothing_is_validated() -> None:
    config = compose([*BASE.split(), "validation.every_steps=0", "validation.sampling.temperature=0.5"])
    with pytest.raises(ConfigError, match=r"^validation\.sampling\.temperature is set, but validation\.every_steps=0"):
        unread_by_roles(config, {"actor"}, "grpo")


def test_what_a_recipe_says_itself_is_never_called_unread() -> None:
    recipe = ("algorithm.kl=loss", "algorithm.kl_coef=0.1", "sampling.n=4")
    config = compose([*BASE.split(), "algorithm.kl=none"], recipe=recipe)
    assert config.said == {"model", "data", "algorithm.kl"}
