"""Recipes: a driver with its default overrides, and the ways to start one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from ..algorithms.registry import name_of, register
from .config import Config, compose
from .run import Run

Driver = TypeVar("Driver", bound=Callable[..., None])
MEMORY = "memory"  # data.path of rows given as Python objects


def recipe(*overrides: str, trains: bool = True) -> Callable[[Driver], Driver]:
    """Names a driver (after its function) and gives it default overrides, in Hydra's own words.

    It becomes a command: `hybridflow NAME`, or `hybridflow path/to/file.py:NAME` from a file of your own. trains=False:
    it validates and takes no steps.
    """

    def wrap(driver: Driver) -> Driver:
        driver.overrides, driver.trains = overrides, trains  # type: ignore[attr-defined]
        return register("recipe")(driver)

    return wrap


def options_type(driver: Callable[..., None]) -> type | None:
    """The dataclass of a driver's second parameter, which is the configuration node `options`."""
    if len(signature(driver).parameters) < 2:  # names in the annotations may be unknown here: look only where needed
        return None
    kind: type = list(signature(driver, eval_str=True).parameters.values())[1].annotation
    return kind


def configure(*overrides: str, recipe: Callable[..., None] | None = None) -> Config:
    """The typed configuration from Hydra overrides, without a command line: for notebooks, tests and scripts."""
    if recipe is None:
        return compose(overrides)
    return compose(overrides, recipe=getattr(recipe, "overrides", ()), options=options_type(recipe))


def execute(driver: Callable[..., None], config: Config, **given: Any) -> Run:
    """Run a driver to its end; keyword arguments are Run's. The run is closed, whatever happens."""
    with Run(config, name=driver.__name__, trains=getattr(driver, "trains", True), **given) as run:
        if options_type(driver) is None:
            driver(run)
        else:
            driver(run, config.options)
    return run


def train(
    driver: Callable[..., None],
    *overrides: str,
    model: str | Path | None = None,
    data: str | Path | Sequence[Mapping[str, Any]] | None = None,
    reward: Callable[..., Any] | str | Sequence[Callable[..., Any] | str] = (),
    validation: Sequence[Mapping[str, Any]] | None = None,
) -> Run:
    """A driver, a model, data and a reward, without a command line; anything else as overrides.

    model, data: left out where overrides say them (`model=smollm2`). data: a path or name as for data.path, a
    `datasets` Dataset, or a list of rows. reward: a function, a name, or several.
    """
    rows = None if data is None or isinstance(data, (str, Path)) else data
    rewards = [reward] if callable(reward) or isinstance(reward, str) else list(reward)
    words = [f"model.path={model}"] if model is not None else []
    words += [f"data.path={data if rows is None else MEMORY}"] if data is not None else []
    words += [f"reward.functions=[{','.join(_spec(each) for each in rewards)}]"] if rewards else []
    config = configure(*words, *overrides, recipe=driver)
    return execute(driver, config, rows=rows, validation_rows=validation)


def _spec(reward: Callable[..., Any] | str) -> str:
    """What reward.functions calls a reward: a function is registered under its name, a lambda as `reward`."""
    if isinstance(reward, str):
        return reward
    name = name_of(reward) if name_of(reward).isidentifier() else "reward"
    register("reward", name)(reward)
    return name
