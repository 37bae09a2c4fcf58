"""Every mistake in a configuration, and the message that answers it."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path

import pytest

from hybridflow.errors import ConfigError
from hybridflow.trainer.config import compose, unread_by_roles
from hybridflow.trainer.unread import unread_without_validation

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

BASE = ["model=smollm2", "data=gsm8k"]
COMMAND = "$ hybridflow grpo "
ANSWER = "error: "


def mistakes() -> dict[str, str]:
    """Overrides -> message, as docs/configuration.md lists them."""
    lines = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text().splitlines()
    return {
        command.removeprefix(COMMAND): answer.removeprefix(ANSWER)
        for command, answer in itertools.pairwise(lines)
        if command.startswith(COMMAND) and answer.startswith(ANSWER)
    }


@pytest.fixture(autouse=True)
def _in_a_folder_with_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_plugins.py").write_text(PLUGINS)
    (tmp_path / "my_rows.jsonl").write_text('{"prompt": "1+1"}')
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("words", "message"), mistakes().items(), ids=list(mistakes()))
def test_a_mistake_is_answered_as_documented(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(shlex.split(words))
    assert str(caught.value) == message


def test_the_documented_mistakes_are_found() -> None:
    assert len(mistakes()) > 80


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
    config = compose([*BASE, *words])
    with pytest.raises(ConfigError) as caught:
        unread_by_roles(config, {"actor"}, "sft")
    assert str(caught.value) == UNREAD_BY_ROLES[words]


def test_max_new_tokens_is_read_in_fine_tuning_where_the_aggregation_divides_by_it() -> None:
    words = ["algorithm=sft", "sampling.max_new_tokens=9", "algorithm.aggregation=sequence_sum_constant"]
    unread_by_roles(compose([*BASE, *words]), {"actor"}, "sft")


def test_a_recipe_with_a_reward_needs_a_function() -> None:
    config = compose(BASE)
    with pytest.raises(ConfigError, match=r"^grpo needs a reward: say reward\.functions=\[exact\]"):
        unread_by_roles(config, {"actor", "reward"}, "grpo")
    unread_by_roles(compose([*BASE, "reward.functions=math"]), {"actor", "reward"}, "grpo")


@pytest.mark.parametrize("word", ["loss=reinforce", "algorithm.epochs=2", "run.steps=3", "validation.patience=3"])
def test_what_only_training_reads_is_refused_where_nothing_trains(word: str) -> None:
    config = compose([*BASE, "reward.functions=math", word])
    with pytest.raises(ConfigError, match=rf"^{word.partition('=')[0]} is set, but evaluate does not train\.$"):
        unread_by_roles(config, {"actor", "reward"}, "evaluate", trains=False)


def test_when_to_validate_is_refused_where_nothing_is_validated() -> None:
    config = compose([*BASE, "validation.every_steps=0", "validation.before_training=true"])
    with pytest.raises(ConfigError, match=r"^validation\.before_training is set, but validation\.every_steps=0"):
        unread_by_roles(config, {"actor"}, "grpo")


def test_old_log_probs_that_the_advantage_alone_reads_are_read(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def weighed(reward, old_logprobs): return reward")
    compose([*BASE, "loss=reinforce", f"advantage={tmp_path}/own.py:weighed", "algorithm.old_policy=rollout"])


def test_several_steps_with_the_current_policy_are_fine_for_a_loss_without_a_ratio() -> None:
    compose([*BASE, "algorithm.minibatches=2"], recipe=("algorithm=reinforce", "algorithm.old_policy=current"))


@pytest.mark.parametrize("key", ["data.validation_rows=3", "data.validation_split=dev", "validation.pass_at=[1]"])
def test_keys_of_validation_are_refused_where_there_are_no_rows_for_it(key: str) -> None:
    config = compose([*BASE, key])
    with pytest.raises(ConfigError, match=rf"^{key.partition('=')[0]} is set, but there are no validation rows: why"):
        unread_without_validation(config, "why")


def test_what_a_recipe_says_itself_is_never_called_unread() -> None:
    recipe = ("algorithm.kl=loss", "algorithm.kl_coef=0.1", "sampling.n=4")
    config = compose([*BASE, "algorithm.kl=none"], recipe=recipe)
    assert config.said == {"model", "data", "algorithm.kl"}
