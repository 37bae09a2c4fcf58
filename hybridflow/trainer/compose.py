"""From overrides to a checked configuration.

Hydra picks and layers the nodes: defaults, group options, the algorithm preset. Values are then set here one by one, so
that a message names the very key, what was written and what would have been right.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..algorithms.registry import checked_options, known, options_of, resolve
from ..errors import ConfigError, did_you_mean
from .checks import check
from .overrides import Overrides, split, value_of
from .presets import CHOSEN_BY_NAME, DEFAULTS, FREE_NODES, GROUPS, PLUGINS, PRESETS, Tree
from .tree import Config, Plugin, leaves
from .unread import unread

SELECTABLE = (*DEFAULTS, *PLUGINS)
ALL_KEYS = "(all keys: hybridflow RECIPE --cfg job)"
PATHS = ("model", "data")  # groups whose options stand for a path that may as well be given


def compose(overrides: Sequence[str], *, recipe: Sequence[str] = (), options: type | None = None) -> Config:
    """The typed configuration that `overrides` make over the defaults, complete and checked.

    recipe: the recipe's own overrides, under the user's; they don't count as said by the user. options: the dataclass
    of the recipe's node `options`. Of two overrides of one key the later holds; their order means nothing else.
    Errors: ConfigError naming key and remedy.
    """
    ours, theirs = split(recipe, SELECTABLE), split(overrides, SELECTABLE)
    cfg, plugins = _layered(ours, theirs, options)
    for key, value in leaves(_plain(cfg)):
        if value == MISSING:
            raise ConfigError(_not_set(key))
    nodes = {str(name): _typed(cfg, str(name)) for name in cfg if name not in PLUGINS}
    config = Config(**nodes, **plugins, said=theirs.keys)
    unread(config)
    check(config)
    return config


def printable(overrides: Sequence[str], *, recipe: Sequence[str] = (), options: type | None = None) -> str:
    """The composed configuration as YAML, whether complete or not: `???` stands for what must be given."""
    cfg, plugins = _layered(split(recipe, SELECTABLE), split(overrides, SELECTABLE), options)
    OmegaConf.set_struct(cfg, False)
    for kind, plugin in plugins.items():
        cfg[kind] = {"name": plugin.name, **plugin.options}
    if options is None:
        del cfg["options"]
    return OmegaConf.to_yaml(cfg, resolve=True)


def all_keys() -> list[str]:
    """Every key there is, over the options of all groups and all registered advantages and losses."""
    found = _keys(OmegaConf.structured(Tree))
    for group, choices in GROUPS.items():
        for node in choices.values():
            found += _keys(OmegaConf.structured(node), f"{group}.")
    for kind in PLUGINS:
        found += [f"{kind}.{key}" for name in known(kind) for key in options_of(resolve(name, kind))]
    hidden = {"defaults", *CHOSEN_BY_NAME, *GROUPS, "options", *(f"{kind}.name" for kind in PLUGINS)}
    return [key for key in dict.fromkeys(found) if key not in hidden]


# ---- layers
def _layered(ours: Overrides, theirs: Overrides, options: type | None) -> tuple[DictConfig, dict[str, Any]]:
    """The tree with all overrides in it, and the advantage and the loss."""
    cfg = _composed({**ours.choices, **theirs.choices})
    plugins = {kind: _plugin(kind, OmegaConf.to_container(cfg[kind]), (ours, theirs)) for kind in PLUGINS}
    cfg.options = None if options is None else OmegaConf.structured(options)
    for key, text in {**ours.values, **theirs.values}.items():
        if key.partition(".")[0] not in PLUGINS:
            _set(cfg, key, text)
    return cfg, plugins


def _composed(choices: Mapping[str, str]) -> DictConfig:
    """The tree with these options of its groups."""
    groups = {**GROUPS, "algorithm": PRESETS}
    selected = {group: choice for group, choice in choices.items() if group in groups}
    for group, choice in selected.items():
        if choice not in groups[group]:
            raise ConfigError(_no_such_option(group, choice, list(groups[group])))
    return deepcopy(_selected(tuple(f"{group}={choice}" for group, choice in sorted(selected.items()))))


@cache
def _selected(choices: tuple[str, ...]) -> DictConfig:
    with _hydra():
        return hydra.compose("hybridflow", list(choices))


@contextmanager
def _hydra() -> Iterator[None]:
    """Hydra over the options above; an application around us that uses Hydra keeps its own."""
    store = ConfigStore.instance()
    store.store("hybridflow", Tree)
    for group, choices in GROUPS.items():
        for name, node in choices.items():
            store.store(name, node, group=group)
    for name, preset in PRESETS.items():
        named = {**preset, "algorithm": {"name": name, **preset.get("algorithm", {})}}
        store.store(name, named, group="algorithm", package="_global_")
    outer = GlobalHydra.instance()
    theirs, outer.hydra = outer.hydra, None
    try:
        with hydra.initialize(version_base="1.3", config_path=None):
            yield
    finally:
        outer.hydra = theirs


def _plugin(kind: str, preset: Any, layers: Sequence[Overrides]) -> Plugin:
    """The advantage or loss after all layers. Options hold only for the function they were written for: those of a
    lower layer go when a higher one chooses another."""
    name, options = preset.pop("name"), preset
    for layer in layers:
        chosen = layer.choices.get(kind, name)
        if chosen != name:
            name, options = chosen, {}
        for key, text in layer.values.items():
            node, _, option = key.partition(".")
            if node == kind and option == "name":
                raise ConfigError(f"{key}={text}: say {kind}={text}.")
            if node == kind:
                options[option] = value_of(key, text, _kind_of(options_of(resolve(name, kind)).get(option)))
    return Plugin(name, checked_options(resolve(name, kind), kind, options, name))


def _kind_of(default: Any) -> Any:
    return list[Any] if isinstance(default, (list, tuple)) else type(default)


# ---- values
def _set(cfg: DictConfig, key: str, text: str) -> None:
    """Set one key of the tree. Errors: ConfigError for a key that is none, or a value of another type."""
    node, _, _ = key.rpartition(".")
    if node in FREE_NODES and _parent_of(cfg, node)[0] is not None and OmegaConf.select(cfg, node) is not None:
        OmegaConf.update(cfg, key, value_of(key, text, Any), force_add=True)
        return
    if key in CHOSEN_BY_NAME:
        raise ConfigError(f"{key}={text}: say {CHOSEN_BY_NAME[key]}={text}.")
    parent, leaf = _parent_of(cfg, key)
    if parent is None or leaf not in list(parent):  # `in parent` alone would miss keys that have no value yet
        raise ConfigError(_no_such_key(cfg, key))
    if key not in FREE_NODES and OmegaConf.is_dict(parent._get_node(leaf)):
        own = ", ".join(_keys(parent[leaf], f"{key}."))
        raise ConfigError(f"{key}={text}: {key} has keys of its own; set those: {own}.")
    hint = typing.get_type_hints(OmegaConf.get_type(parent)).get(leaf, Any)
    value = value_of(key, text, hint)
    try:
        parent[leaf] = value
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}={text}: wrong type. {str(error).splitlines()[0]}") from error


def _parent_of(cfg: DictConfig, key: str) -> tuple[DictConfig | None, str]:
    *path, leaf = key.split(".")
    node: Any = cfg
    for part in path:
        node = node[part] if OmegaConf.is_dict(node) and part in node else None
    return (node if OmegaConf.is_dict(node) else None), leaf


def _typed(cfg: DictConfig, name: str) -> Any:
    """A node as its dataclass, references like ${sampling.n} resolved."""
    try:
        return OmegaConf.to_object(cfg[name]) if OmegaConf.is_config(cfg[name]) else cfg[name]
    except OmegaConfBaseException as error:
        raise ConfigError(f"{name}: {str(error).splitlines()[0]}") from error


def _keys(node: Any, prefix: str = "") -> list[str]:
    """Dotted keys under a node of the tree."""
    return [key for key, _ in leaves(_plain(node), prefix)]


def _plain(node: Any) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(node, resolve=False)
    return plain  # type: ignore[no-any-return]


# ---- messages
def _no_such_option(group: str, choice: str, options: Sequence[str]) -> str:
    remedy = f" For a path write {group}.path={choice}." if group in PATHS else did_you_mean(choice, options)
    return f"{group}={choice}: no such configuration. Known: {', '.join(sorted(options))}.{remedy}"


def _no_such_key(cfg: DictConfig, key: str) -> str:
    keys = all_keys()
    if OmegaConf.is_config(cfg.options):
        keys += [f"options.{name}" for name in cfg.options]
    elif key.startswith("options."):
        return f"{key}: no such key: this recipe has no options of its own."
    same_leaf = [each for each in keys if each.rpartition(".")[2] == key.rpartition(".")[2]]
    followed = [each for each in same_leaf if not any(each.endswith(f".{other}") for other in same_leaf)]
    nearest = get_close_matches(
        key, followed, 1, cutoff=0.0
    )  # lr -> training.lr, however unlike the two are as a whole
    hint = f" Did you mean {nearest[0]}?" if nearest else did_you_mean(key, keys)
    return f"{key}: no such key.{hint} {ALL_KEYS}"


def _not_set(key: str) -> str:
    if key in ("model.path", "data.path"):
        group = key.partition(".")[0]
        options = "|".join(name for name in GROUPS[group] if name != "default")
        return f"{key} is not set: say {key}=... or pick {group}={options}."
    return f"{key} is not set: say {key}=..."
