"""The command `hybridflow RECIPE [overrides]`.

Exit codes: 0 done, 1 a run that failed with an error of ours, 2 a command or configuration that is wrong, 130
interrupted. Any other exception keeps its traceback.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from . import __version__
from .errors import ConfigError, HybridFlowError

USAGE = "hybridflow RECIPE [KEY=VALUE ...] [--cfg job] [-m]"
HELP = f"""usage: {USAGE}
       hybridflow doctor
       hybridflow replay runs/NAME/failure

Recipes (or path/to/file.py:NAME for your own):
{{recipes}}
  doctor      what this machine has, which engines work, and what to type where one does not
  replay      a failed call once more, in this process and with your files as they are now: breakpoints work

Keys most often set:
  model.path=PATH             Hugging Face folder or hub name; or model=smollm2
  data.path=PATH              jsonl, parquet, hub name, reasoning_gym:TASK, file.py:function; or data=gsm8k
  reward.functions=[math]     exact, last_integer, math, ./my.py:function
  sampling.n=8                samples per prompt
  data.rows_per_step=64       prompts (examples) of one step
  training.lr=1e-6            learning rate
  run.dir=runs/NAME           where everything goes; the same command again goes on from there
  run.steps=100               length of the run

Options:
  --cfg job                   print the composed configuration with every key, and stop
  -m, --multirun              one run for each combination of values: -m training.lr=1e-6,3e-6
  -h, --help                  this, or with RECIPE what the recipe does
  --version                   {__version__}"""
RECIPE_HELP = """{doc}

Sets by itself: {overrides}
{options}
All keys with their values: hybridflow {name} --cfg job"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. Usage: {USAGE}; keys are written without dashes.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        return _command(_arguments(argv))
    except HybridFlowError as error:
        print(f"error: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="hybridflow", add_help=False, allow_abbrev=False)
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="store_true")
    return parser.parse_intermixed_args(argv)


def _command(arguments: argparse.Namespace) -> int:
    if arguments.version:
        print(f"hybridflow {__version__}")
        return 0
    if arguments.recipe is None:
        print(HELP.format(recipes=_recipes()))
        return 0 if arguments.help else 2
    if arguments.recipe == "doctor":
        from .trainer.doctor import examine

        return examine()
    if arguments.recipe == "replay":
        return _replay(arguments.overrides)
    return _recipe(arguments)


def _replay(folders: Sequence[str]) -> int:
    if len(folders) != 1:
        raise ConfigError("hybridflow replay needs the folder of one failed call: runs/NAME/failure.")
    from .trainer.replay import replay

    replay(Path(folders[0]))
    return 0


def _recipe(arguments: argparse.Namespace) -> int:
    """Everything that needs the recipe: its help, its configuration, its runs."""
    from .algorithms.registry import resolve
    from .trainer.config import printable
    from .trainer.multirun import multirun
    from .trainer.recipe import configure, execute, options_type

    _reject_override_as_recipe(arguments.recipe)
    driver, words = resolve(arguments.recipe, "recipe"), arguments.overrides
    if arguments.help:
        print(_recipe_help(arguments.recipe, driver))
    elif arguments.cfg:
        print(printable(words, recipe=_overrides_of(driver), options=options_type(driver)), end="")
    elif arguments.multirun:
        return multirun(arguments.recipe, words, lambda job: configure(*job, recipe=driver))
    else:
        execute(driver, configure(*words, recipe=driver))
    return 0


def _reject_override_as_recipe(word: str) -> None:
    if "=" in word:
        raise ConfigError(f"{word}: the recipe comes first. Usage: {USAGE}.")


def _recipes() -> str:
    from .algorithms.registry import known, resolve

    return "\n".join(f"  {name:<11} {_doc(resolve(name, 'recipe')).splitlines()[0]}" for name in known("recipe"))


def _recipe_help(name: str, driver: Callable[..., None]) -> str:
    from .trainer.recipe import options_type

    kind = options_type(driver)
    keys = [] if kind is None else [f"  options.{f.name} ({_type_name(f.type)})" for f in dataclasses.fields(kind)]
    options = "\n".join(["\nIts own keys:", *keys, ""]) if keys else ""
    overrides = " ".join(_overrides_of(driver)) or "nothing"
    return RECIPE_HELP.format(doc=_doc(driver), overrides=overrides, options=options, name=name)


def _type_name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _overrides_of(driver: Callable[..., None]) -> tuple[str, ...]:
    overrides: tuple[str, ...] = getattr(driver, "overrides", ())
    return overrides


def _doc(driver: Callable[..., None]) -> str:
    """The driver's docstring, then its module's, which has examples."""
    module = inspect.getmodule(driver)
    parts = inspect.getdoc(driver), inspect.getdoc(module) if module else None
    return "\n\n".join(part for part in parts if part) or "(no description)"
