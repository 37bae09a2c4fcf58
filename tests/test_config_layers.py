"""Where a value comes from: defaults, preset, recipe, user; and what a plug-in's signature adds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.errors import ConfigError
from hybridflow.trainer.config import Plugin, compose, printable, resolved
from hybridflow.trainer.formats import gsm8k

pytestmark = pytest.mark.unit

BASE = ["model=smollm2", "data=gsm8k"]
PLUGINS = """
def soft_clip(logprobs, old_logprobs, advantages, *, width: float = 0.2, mode: str = "tanh", steps: list = []):
    return -advantages


def median_baseline(reward, group_id, keep, *, scale=1.0):
    return scale * reward
"""


@pytest.fixture
def _plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_plugins.py").write_text(PLUGINS)
    monkeypatch.chdir(tmp_path)


def test_presets_hold_what_differs() -> None:
    grpo, reinforce, sft = (compose([*BASE, f"algorithm={name}"]) for name in ("grpo", "reinforce", "sft"))
    assert resolved(compose(BASE)) == resolved(grpo)
    assert (reinforce.advantage.name, reinforce.loss.name, reinforce.sampling.n) == ("reinforce", "reinforce", 8)
    assert (sft.loss, sft.data.kind, sft.algorithm.name) == (Plugin("sft", {}), "examples", "sft")
    assert sft.validation.metric == "loss"
    assert sft.data.path == grpo.data.path


def test_the_user_wins_over_the_recipe_and_the_recipe_over_the_preset() -> None:
    recipe = ["algorithm=sft", "loss=reinforce", "sampling.n=4", "training.lr=0.1"]
    config = compose([*BASE, "sampling.n=6"], recipe=recipe)
    assert (config.loss.name, config.sampling.n, config.training.lr) == ("reinforce", 6, 0.1)
    assert compose([*BASE, "algorithm=grpo"], recipe=["algorithm=sft"]).loss.name == "ppo_clip"
    assert compose([*BASE, "loss=ppo_clip"], recipe=recipe).loss.name == "ppo_clip"


def test_options_go_with_the_function_they_were_written_for() -> None:
    recipe = ["loss=ppo_clip", "loss.clip_high=0.28"]
    assert compose(BASE, recipe=recipe).loss.options["clip_high"] == 0.28
    assert compose([*BASE, "loss.clip_low=0.1"], recipe=recipe).loss.options == {
        "clip_low": 0.1,
        "clip_high": 0.28,
        "dual_clip": 3.0,
    }
    assert compose([*BASE, "loss=reinforce"], recipe=recipe).loss == Plugin("reinforce", {})


def test_of_two_values_for_a_key_the_later_holds() -> None:
    config = compose([*BASE, "sampling.n=2", "loss=sft", "sampling.n=3", "loss=ppo_clip"])
    assert (config.sampling.n, config.loss.name) == (3, "ppo_clip")


@pytest.mark.usefixtures("_plugins")
def test_a_file_s_function_brings_its_own_keys() -> None:
    words = ["loss=./my_plugins.py:soft_clip", "loss.width=1", "loss.mode=a, b", "loss.steps=3"]
    config = compose([*BASE, *words, "advantage=./my_plugins.py:median_baseline", "advantage.scale=2"])
    assert config.loss == Plugin("./my_plugins.py:soft_clip", {"width": 1, "mode": "a, b", "steps": [3]})
    assert config.advantage == Plugin("./my_plugins.py:median_baseline", {"scale": 2})
    assert "  scale: 2\n" in printable(["advantage=./my_plugins.py:median_baseline", "advantage.scale=2"])


@pytest.mark.usefixtures("_plugins")
@settings(max_examples=10, deadline=None)
@given(
    st.permutations([*BASE, "loss=./my_plugins.py:soft_clip", "loss.width=1", "sampling.n=4", "algorithm=reinforce"])
)
def test_the_order_of_keys_means_nothing(words: list[str]) -> None:
    config = compose(words)
    assert (config.loss.options["width"], config.sampling.n, config.advantage.name) == (1, 4, "reinforce")


@dataclass
class Options:
    window: int
    clip_start: float = 0.4


def test_a_recipe_s_own_options_are_typed_keys() -> None:
    config = compose([*BASE, "options.window=8"], options=Options)
    assert config.options == Options(window=8)
    assert resolved(config)["options"] == {"window": 8, "clip_start": 0.4}
    with pytest.raises(ConfigError, match=r"^options\.window is not set: say options\.window=\.\.\.$"):
        compose(BASE, options=Options)
    with pytest.raises(ConfigError, match=r"options\.windw: no such key\. Did you mean options\.window\?"):
        compose([*BASE, "options.windw=8"], options=Options)


def test_text_is_taken_as_it_stands() -> None:
    for text in ("a, b (c)", "x=y", "~/runs", "it's", "1e-6", "[no list]", "{a}", "yes", " padded "):
        assert compose([*BASE, f"data.system_prompt={text}"]).data.system_prompt == text
    assert compose([*BASE, "data.system_prompt='null'"]).data.system_prompt == "null"
    assert compose([*BASE, "data.system_prompt=null"]).data.system_prompt is None
    assert compose([*BASE, "data.system_prompt=${run.dir}/p"]).data.system_prompt == "runs/run/p"


def test_a_single_value_is_a_list_of_one() -> None:
    config = compose([*BASE, "reward.functions=math", "sampling.stop=</s>", "validation.pass_at=1", "model.freeze=a.*"])
    assert config.reward.functions == ["math"]
    assert config.sampling.stop == ["</s>"]
    assert config.validation.pass_at == [1]
    assert config.model.freeze == ["a.*"]
    assert compose([*BASE, "run.trackers="]).run.trackers == []
    assert compose([*BASE, "sampling.stop=['1',2]"]).sampling.stop == ["1", 2]


def test_task_keys_need_no_plus_and_keep_their_types() -> None:
    words = ["data.path=reasoning_gym:chain_sum", "data.task.min_terms=3", "data.task.allow_negation=true"]
    config = compose(["model=smollm2", *words])
    assert config.data.task == {"min_terms": 3, "allow_negation": True}
    assert config.said >= {"data.task.min_terms"}


def test_the_configuration_shows_what_must_be_given() -> None:
    text = printable(["loss=reinforce"], recipe=["algorithm=sft"])
    assert text.startswith("model:\n  path: ???\n")
    assert "loss:\n  name: reinforce\nalgorithm:\n  name: sft\n" in text


def test_an_application_that_uses_hydra_keeps_its_own() -> None:
    with hydra.initialize(version_base="1.3", config_path=None):
        theirs = GlobalHydra.instance().hydra
        compose([*BASE, "model.path=elsewhere"])
        assert GlobalHydra.instance().hydra is theirs


def test_configurations_share_nothing() -> None:
    one, two = compose(BASE), compose(BASE)
    one.sampling.stop.append("x")
    one.loss.options["clip_low"] = 9
    assert two.sampling.stop == []
    assert compose(BASE).loss.options["clip_low"] == 0.2


def test_the_gsm8k_format_takes_the_number_after_the_hashes() -> None:
    row = {"question": "How many?", "answer": "6*7 = <<6*7=42>>1,042\n#### 1,042"}
    assert gsm8k(row) == {"prompt": "How many?", "answer": "1042"}
