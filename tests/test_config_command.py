"""The command `hybridflow`: what it prints, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow import __version__, cli
from hybridflow.cli import main
from hybridflow.errors import EngineError
from hybridflow.trainer import doctor

pytestmark = pytest.mark.unit

DRIVER = '''
"""Drivers of a user."""

from dataclasses import dataclass

from hybridflow.errors import EngineError
from hybridflow.trainer.recipe import recipe


@dataclass
class Options:
    window: int
    clip_start: float = 0.4


@recipe("algorithm=sft", "training.lr=0.1")
def windowed(run, options: Options) -> None:
    """Learns in windows.

    More about it.
    """
'''


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "mine.py").write_text(DRIVER)
    monkeypatch.chdir(tmp_path)
    return "./mine.py:windowed"


def test_help_lists_the_recipes_with_what_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for line in (
        "  grpo        Group-relative",
        "  sft         Supervised",
        "  evaluate ",
        "  doctor ",
        "  training.lr=1e-6 ",
    ):
        assert line in printed


def test_no_command_at_all_is_a_wrong_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: hybridflow RECIPE" in capsys.readouterr().out


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hybridflow {__version__}\n"


def test_help_of_a_recipe_says_what_it_does_and_which_keys_are_its_own(
    driver: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([driver, "--help"]) == 0
    assert capsys.readouterr().out == (
        "Learns in windows.\n\nMore about it.\n\nDrivers of a user.\n\n"
        "Sets by itself: algorithm=sft training.lr=0.1\n\n"
        "Its own keys:\n  options.window (int)\n  options.clip_start (float)\n\n"
        f"All keys with their values: hybridflow {driver} --cfg job\n"
    )


def test_cfg_job_prints_the_recipe_s_configuration(driver: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([driver, "options.window=8", "--cfg", "job", "model=smollm2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("model:\n  path: smollm2\n")
    assert "  lr: 0.1\n" in printed
    assert printed.endswith("options:\n  window: 8\n  clip_start: 0.4\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["grpo", "model=smollm2", "data=gsm8k", "samplng.n=4"], "samplng.n: no such key. Did you mean sampling.n?"),
        (["grpo", "--training.lr=3"], "unrecognized arguments: --training.lr=3. Usage: hybridflow RECIPE"),
        (["model=smollm2", "grpo"], "model=smollm2: the recipe comes first. Usage: hybridflow RECIPE"),
        (["gppo"], "recipe 'gppo' is not registered. Known: "),
        (["./nothing.py:fn"], "recipe './nothing.py:fn': no file ./nothing.py."),
        (["grpo", "--cfg", "all"], "argument --cfg: invalid choice: 'all'"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {message}")
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def raising(error: BaseException) -> object:
    def command(_: object) -> int:
        raise error

    return command


def test_a_run_that_fails_with_an_error_of_ours_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_command", raising(EngineError("NaN in the logits", where="actor rank 0")))
    assert main(["grpo"]) == 1
    assert capsys.readouterr().err == "error: actor rank 0: NaN in the logits\n"


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_command", raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["grpo"])


def test_an_interrupted_run_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_command", raising(KeyboardInterrupt()))
    assert main(["grpo"]) == 130
    assert capsys.readouterr().err == "\ninterrupted; the same command goes on from the last checkpoint\n"


def test_printing_a_configuration_imports_no_engine() -> None:
    code = (
        "import sys; from hybridflow.cli import main; main(['grpo', '--cfg', 'job']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'ray')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_python_m_hybridflow_is_the_command() -> None:
    words = [sys.executable, "-m", "hybridflow", "--version"]
    assert subprocess.run(words, check=True, capture_output=True, text=True).stdout == f"hybridflow {__version__}\n"


def test_the_doctor_names_what_fails_and_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "NEEDED", ("numpy", "no-such-package"))
    monkeypatch.setattr(doctor, "TRAIN", {"broken": "hybridflow.no_such_engine:Engine"})
    monkeypatch.setattr(doctor, "ROLLOUT", {})
    monkeypatch.setattr(doctor, "_step", raising(RuntimeError("out of memory")))
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "no-such-package: not installed: pip install no-such-package" in printed
    assert "training=broken: fails: no module hybridflow.no_such_engine" in printed
    assert "one step with a tiny model: fails: " in printed
    assert printed.endswith("not everything works: see above\n")
