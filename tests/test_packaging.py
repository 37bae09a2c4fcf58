"""What a newcomer relies on: pins, environments, the links at the root, and the commands in the documentation."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def documented_commands() -> Iterator[tuple[str, str]]:
    """Every `hybridflow RECIPE KEY=VALUE ...` of a code block, with its page and line."""
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")  # a command over several lines is one
        for number, line in enumerate(text.splitlines(), 1):
            if found := re.match(r"(?:\S*/)?(?:python -m )?hybridflow ([a-z]\S*(?: .*)?)$", line):
                yield f"{page.name}:{number}", found[1]


def load_environment_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment", ROOT / "requirements" / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as it stands in a clone with a few pins, installing into a scratch folder without pip."""
    module: Any = load_environment_script()
    clone = tmp_path / "clone"
    (clone / "requirements").mkdir(parents=True)
    (clone / "requirements" / "core.txt").write_text("# a comment\na==1  # why\n")
    (clone / "requirements" / "test.txt").write_text("-r core.txt\nb==2\n")
    monkeypatch.setattr(module, "HERE", clone / "requirements")
    monkeypatch.setenv("HYBRIDFLOW_ENVS", str(tmp_path / "envs"))

    def install(name: str, folder: Path) -> None:
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin" / "python").unlink(missing_ok=True)
        (folder / "bin" / "python").symlink_to(sys.executable)
        (folder / ".complete").touch()
        installed.append(name)

    installed: list[str] = []
    monkeypatch.setattr(module, "install", install)
    module.installed = installed
    return module


def test_included_pins_are_part_of_an_environment(environment: Any) -> None:
    assert environment.pins(environment.HERE / "test.txt") == ["a==1", "b==2"]


def test_a_second_clone_installs_nothing_twice(environment: Any, tmp_path: Path) -> None:
    environment.main("core")
    second = tmp_path / "second" / "requirements"
    second.mkdir(parents=True)
    (second / "core.txt").write_text("a==1\n")
    first_link = (environment.HERE.parent / ".venv").readlink()
    environment.HERE = second
    environment.main("core")
    assert environment.installed == ["core"]
    assert (second.parent / ".venv").readlink() == first_link


def test_changed_pins_make_another_environment(environment: Any) -> None:
    environment.main("core")
    before = (environment.HERE.parent / ".venv").readlink()
    (environment.HERE / "core.txt").write_text("a==2\n")
    environment.main("core")
    assert environment.installed == ["core", "core"]
    assert (environment.HERE.parent / ".venv").readlink() != before


@pytest.mark.parametrize("broken", [".complete", "bin/python"])
def test_a_half_made_environment_is_made_again(environment: Any, broken: str) -> None:
    environment.main("core")
    (environment.HERE.parent / ".venv" / broken).unlink()
    environment.main("core")
    assert environment.installed == ["core", "core"]


def test_a_folder_in_the_place_of_the_link_is_not_overwritten(environment: Any) -> None:
    (environment.HERE.parent / ".venv").mkdir()
    with pytest.raises(SystemExit, match="move it away"):
        environment.main("core")


def test_what_the_package_needs_is_pinned() -> None:
    pinned = pins("core")
    for requirement in map(Requirement, install_requires()):
        name = canonicalize_name(requirement.name)
        assert name in pinned, name
        assert requirement.specifier.contains(pinned[name]), requirement


def test_the_core_has_no_torchvision() -> None:
    assert "torchvision" not in pins("core")


def test_the_links_at_the_root_lead_into_the_package() -> None:
    for part in ("workers", "algorithms", "trainer", "recipes"):
        assert (ROOT / part).readlink() == Path("hybridflow") / part


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {module.parent for module in (ROOT / "hybridflow").rglob("*.py")}
    assert [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_importing_the_package_needs_neither_torch_nor_an_engine() -> None:
    code = "import sys, hybridflow; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "ray", "vllm", "sglang", "megatron"} & set(done.stdout.split())


@pytest.mark.parametrize(("where", "command"), [pytest.param(w, c, id=w) for w, c in documented_commands()])
def test_case_31_documented_commands_are_understood(where: str, command: str) -> None:
    from hybridflow.algorithms.registry import resolve
    from hybridflow.trainer.recipe import configure

    name, *words = shlex.split(command.replace("...", "somewhere"))
    if name not in ("doctor", "replay") and "./" not in command:
        configure(*words, recipe=resolve(name, "recipe"))


def test_case_31_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        target for page in PAGES for target in re.findall(r"(?:^|`)make ([a-z0-9-]+)", page.read_text(), re.MULTILINE)
    }
    assert named
    assert named <= targets


def pins(name: str) -> dict[str, str]:
    """Pinned versions of an environment by canonical name."""
    lines = load_environment_script().pins(ROOT / "requirements" / f"{name}.txt")
    return {canonicalize_name(package): version for package, _, version in (line.partition("==") for line in lines)}


def install_requires() -> list[str]:
    """The argument of setup()."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.keyword) and node.arg == "install_requires":
            found: list[str] = ast.literal_eval(node.value)
            return found
    raise AssertionError("setup.py has no install_requires")
