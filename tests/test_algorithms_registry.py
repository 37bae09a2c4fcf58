"""Plug-ins: how a name, a file, a module or an object becomes a function, and what is said when it does not."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest

from hybridflow.algorithms import registry
from hybridflow.algorithms.losses.ppo_clip import ppo_clip
from hybridflow.algorithms.registry import (
    Loss,
    checked_options,
    columns_of,
    known,
    options_of,
    register,
    required_columns_of,
    resolve,
)
from hybridflow.errors import ConfigError

pytestmark = pytest.mark.unit

PLUGINS = """
from __future__ import annotations
import math
from dataclasses import dataclass

SCALE = 2.0

def no_apology(response: str) -> float | None:
    return None if not response else SCALE * ("sorry" not in response)

async def polite(prompt: str, response: str, judge): ...

def _hidden(response): ...

@dataclass
class Maze:
    size: int = 3
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my_plugins.py"
    path.write_text(PLUGINS)
    return path


@pytest.fixture
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it; built-ins are there before, since they are imported only once."""
    known("loss")
    monkeypatch.setattr(registry, "_registered", {kind: {**table} for kind, table in registry._registered.items()})
    monkeypatch.setattr(registry, "_checks", dict(registry._checks))


@pytest.fixture
def two_rewards(own_names: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(registry.BUILT_INS, "reward", ())
    monkeypatch.setitem(registry._registered, "reward", {"math": lambda response: 1.0, "exact": lambda response: 0.0})
    registry._import_built_ins.cache_clear()
    yield
    registry._import_built_ins.cache_clear()


def message_of(spec: Any, kind: str = "reward") -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(spec, kind)
    return str(caught.value)


def scaled(
    logprobs: Any, advantages: Any, values: Any = None, *, scale: float = 1.0, mode: str = "a", on: bool = True
) -> Any:
    return -scale * logprobs * advantages


def test_built_in_names_are_known_without_importing_their_modules() -> None:
    assert {"grpo", "reinforce"} <= set(known("advantage"))
    assert {"ppo_clip", "reinforce", "sft"} <= set(known("loss"))
    assert known("loss") == sorted(known("loss"))


@pytest.mark.parametrize(
    "statement",
    ["import hybridflow.algorithms", "known('advantage'), known('loss')", "options_of(resolve('ppo_clip', 'loss'))"],
)
def test_reading_signatures_of_built_ins_imports_no_torch(statement: str) -> None:
    code = f"from hybridflow.algorithms.registry import *\n{statement}\nimport sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_name_means_the_registered_function_and_an_object_itself() -> None:
    assert resolve("ppo_clip", "loss") is ppo_clip
    assert resolve(scaled, "loss") is scaled


def test_an_unknown_name_is_answered_with_the_known_ones(two_rewards: None) -> None:
    assert message_of("maths") == (
        "reward 'maths' is not registered. Known: exact, math. Did you mean math? "
        "For your own, write path/to/file.py:name."
    )


def test_a_wrong_name_in_a_file_is_answered_with_what_the_file_defines(plugins: Path) -> None:
    assert message_of("./my_plugins.py:no_apologies") == (
        "reward './my_plugins.py:no_apologies': ./my_plugins.py defines no_apology, polite, Maze, not no_apologies."
    )


def test_a_file_that_is_not_there_is_named_as_it_was_written(plugins: Path) -> None:
    assert message_of("./my.py:f") == "reward './my.py:f': no file ./my.py."


def test_a_name_that_is_no_function_is_refused(plugins: Path) -> None:
    assert "SCALE in ./my_plugins.py is a float, not a function" in message_of("./my_plugins.py:SCALE")
    assert "is neither a name nor a function" in message_of(3)


@pytest.mark.parametrize(
    ("source", "line", "cause"),
    [
        ("import math\n\ndef f(n):\n    return 1 / n\n\nf(0)\n", 6, ZeroDivisionError),
        ("def f(:\n", 1, SyntaxError),
        ("import no_such_module_anywhere\n", 1, ModuleNotFoundError),
    ],
)
def test_a_file_that_raises_is_named_with_the_line_and_the_cause_is_kept(
    plugins: Path, source: str, line: int, cause: type[Exception]
) -> None:
    Path("broken.py").write_text(source)
    with pytest.raises(
        ConfigError, match=rf"reward './broken.py:f': ./broken.py, line \d+, raised {cause.__name__}"
    ) as at:
        resolve("./broken.py:f", "reward")
    assert isinstance(at.value.__cause__, cause)
    expected = 4 if cause is ZeroDivisionError else line  # the innermost line of the file
    assert f"line {expected}," in str(at.value)
    assert not [name for name in sys.modules if name.startswith("broken_")]


def test_a_file_is_read_once_and_an_edited_file_again(plugins: Path) -> None:
    first = resolve("./my_plugins.py:no_apology", "reward")
    assert resolve(f"{plugins}:no_apology", "reward") is first
    plugins.write_text(PLUGINS.replace("SCALE = 2.0", "SCALE = 3.0"))
    again = resolve("./my_plugins.py:no_apology", "reward")
    assert (first("fine"), again("fine")) == (2.0, 3.0)


def test_a_function_of_a_file_ships_by_value(plugins: Path, tmp_path: Path) -> None:
    shipped = tmp_path / "shipped.pickle"
    shipped.write_bytes(cloudpickle.dumps(resolve("./my_plugins.py:no_apology", "reward")))
    plugins.unlink()
    code = f"import pickle; f = pickle.load(open({str(shipped)!r}, 'rb')); assert f('fine') == 2.0"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd="/")


def test_a_file_keeps_its_own_meaning_of_annotations(plugins: Path) -> None:
    plugins.write_text("def f(response: int): ...\n")
    assert resolve("./my_plugins.py:f", "reward").__annotations__ == {"response": int}


def test_a_function_of_an_installed_module_is_found() -> None:
    assert resolve("math:sqrt", "reward")(4.0) == 2.0
    assert resolve("os.path:join", "reward")("a", "b") == "a/b"


def test_a_module_that_cannot_be_imported_is_named(plugins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert message_of("no_such_package.rewards:f") == (
        "reward 'no_such_package.rewards:f': there is no module no_such_package on Python's path. "
        "For a file, write path/to/file.py:name."
    )
    assert "there is no module math.rewards" in message_of("math.rewards:f")
    Path("raising_module.py").write_text("x = 1\nraise RuntimeError('not today')\n")
    monkeypatch.syspath_prepend(str(plugins.parent))
    assert message_of("raising_module:f").endswith("raising_module.py, line 2, raised RuntimeError: not today.")


def test_a_module_that_lacks_the_name_says_what_it_defines() -> None:
    assert message_of("hybridflow.algorithms.losses.sft:nll") == (
        "reward 'hybridflow.algorithms.losses.sft:nll': hybridflow.algorithms.losses.sft defines sft, not nll."
    )


def test_registering_makes_a_function_known_and_a_second_of_the_name_is_refused(own_names: None) -> None:
    @register("loss", "mine")
    def first(logprobs: Any) -> Any: ...

    assert resolve("mine", "loss") is first
    with pytest.raises(ConfigError, match=r"loss 'mine' is registered by .*first and by .*second"):

        @register("loss", "mine")
        def second(logprobs: Any) -> Any: ...

    register("reward", "mine")(first)  # kinds have names of their own


def test_a_function_defined_again_replaces_itself(own_names: None) -> None:
    def cell() -> Any:
        @register("loss", "mine")
        def mine(logprobs: Any) -> Any: ...

        return mine

    cell()
    again = cell()
    assert resolve("mine", "loss") is again


def test_an_unknown_kind_of_plugin_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no kind of plug-in 'losses'\. Known: advantage, .* Did you mean loss\?"):
        register("losses")


def test_positional_parameters_are_columns_and_keyword_only_ones_are_options() -> None:
    assert columns_of(scaled) == ("logprobs", "advantages", "values")
    assert required_columns_of(scaled) == ("logprobs", "advantages")
    assert options_of(scaled) == {"scale": 1.0, "mode": "a", "on": True}


def test_an_option_without_a_default_is_refused() -> None:
    def f(reward: Any, *, scale: float) -> Any: ...

    with pytest.raises(ConfigError, match="f: the option 'scale' needs a default"):
        options_of(f)


def test_a_loss_carries_all_its_options_and_replace_leaves_it_as_it_was() -> None:
    loss = Loss("ppo_clip", clip_high=0.3)
    other = loss.replace(clip_low=0.1)
    assert loss.name == other.name == "ppo_clip"
    assert loss.options == {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}
    assert other.options == {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 3.0}
    assert repr(other) == "Loss('ppo_clip', clip_low=0.1, clip_high=0.3, dual_clip=3.0)"
    assert pickle.loads(cloudpickle.dumps(other)).options == other.options


def test_a_loss_may_be_any_function() -> None:
    loss = Loss(scaled, scale=2)
    assert (loss.name, loss.options) == ("scaled", {"scale": 2, "mode": "a", "on": True})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dual_clip": 3}, "loss.dual_clip: loss=scaled has no such key; it belongs to loss=ppo_clip."),
        ({"scal": 3}, "loss.scal: loss=scaled has no such key. Did you mean scale? Its keys: scale, mode, on."),
        ({"scale": "fast"}, "loss.scale=fast: wrong type. loss=scaled has the default 1.0."),
        ({"scale": None}, "loss.scale=None: wrong type. loss=scaled has the default 1.0."),
        ({"on": 1}, "loss.on=1: wrong type. loss=scaled has the default True."),
        ({"mode": 1}, "loss.mode=1: wrong type. loss=scaled has the default 'a'."),
    ],
)
def test_a_wrong_option_is_answered_with_the_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Loss(scaled, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "options", [{"clip_low": 1.0}, {"clip_low": -0.1}, {"clip_high": -0.1}, {"dual_clip": 1.0}, {"dual_clip": -2}]
)
def test_a_value_that_makes_no_sense_is_refused_with_its_key(options: dict[str, Any]) -> None:
    (key,) = options
    with pytest.raises(ConfigError, match=rf"^loss\.{key}={options[key]}: "):
        Loss("ppo_clip").replace(**options)


def test_options_of_any_kind_are_checked_alike() -> None:
    assert checked_options(resolve("grpo", "advantage"), "advantage", {}) == {"normalize_std": True}
    with pytest.raises(ConfigError, match=r"^advantage\.baseline=median: it is mean or none\.$"):
        checked_options(resolve("reinforce", "advantage"), "advantage", {"baseline": "median"})
