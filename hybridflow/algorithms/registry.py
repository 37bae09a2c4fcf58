"""Plug-ins by name, file or module. Positional parameters are columns, keyword-only parameters are configuration."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import cloudpickle

from ..errors import ConfigError, did_you_mean

Plugin = Callable[..., Any]
AnyPlugin = TypeVar("AnyPlugin", bound=Plugin)

# kind -> modules that register its built-ins (of a package: every module in it), imported when the kind is first used
BUILT_INS: dict[str, tuple[str, ...]] = {
    "advantage": ("hybridflow.algorithms.advantages",),
    "loss": ("hybridflow.algorithms.losses",),
    "reward": ("hybridflow.workers.reward_functions",),
    "tracker": ("hybridflow.trainer.tracking",),
    "recipe": ("hybridflow.recipes",),
}

_registered: dict[str, dict[str, Plugin]] = {kind: {} for kind in BUILT_INS}
_checks: dict[tuple[str, str], Callable[..., None]] = {}


def register(
    kind: str, name: str | None = None, *, check: Callable[..., None] | None = None
) -> Callable[[AnyPlugin], AnyPlugin]:
    """`@register("loss")` makes a function known under its own name, or under `name`.

    check: called with the options a user chose, as keyword arguments; raises ConfigError for values that make no sense.
    Errors: ConfigError if another function has the name. The same function defined again (a notebook cell) replaces it.
    """

    table = _table(kind)

    def remember(fn: AnyPlugin) -> AnyPlugin:
        key = name or name_of(fn)
        if key in table and _place(table[key]) != _place(fn):
            first, second = (".".join(_place(each)) for each in (table[key], fn))
            raise ConfigError(f"{kind} '{key}' is registered by {first} and by {second}: give one another name.")
        table[key] = fn
        if check is not None:
            _checks[_place(fn)] = check
        return fn

    return remember


def known(kind: str) -> list[str]:
    """Registered names of one kind, built-ins included, sorted."""
    table = _table(kind)
    _import_built_ins(kind)
    return sorted(table)


def resolve(spec: str | Plugin, kind: str) -> Plugin:
    """The function or class a spec means: a registered name, `package.module:name`, `path/file.py:name`, or an object.

    A file is run once per content and ships to workers by value.
    Errors: ConfigError naming the spec, what there is instead, and how to write a spec of one's own.
    """
    if not isinstance(spec, str):
        if not callable(spec):
            raise ConfigError(f"{kind} {spec!r}: a {type(spec).__name__} is neither a name nor a function.")
        return spec
    if ":" not in spec:
        return _by_name(spec, kind)
    source, _, name = spec.rpartition(":")
    what = f"{kind} '{spec}'"
    module = file_module(source, what) if source.endswith(".py") else _installed_module(source, what)
    if not hasattr(module, name):
        raise ConfigError(f"{what}: {source} defines {', '.join(_defined(module)) or 'nothing'}, not {name}.")
    found = getattr(module, name)
    if not callable(found):
        raise ConfigError(f"{what}: {name} in {source} is a {type(found).__name__}, not a function.")
    return found  # type: ignore[no-any-return]


def name_of(fn: Plugin) -> str:
    """The function's own name; for a callable object, its class's."""
    return getattr(fn, "__name__", type(fn).__name__)


def columns_of(fn: Plugin) -> tuple[str, ...]:
    """Columns a function may be given: its positional parameters."""
    return tuple(p.name for p in _parameters(fn) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def required_columns_of(fn: Plugin) -> tuple[str, ...]:
    """Columns a function cannot do without: its positional parameters that have no default."""
    optional = {p.name for p in _parameters(fn) if p.default is not p.empty}
    return tuple(name for name in columns_of(fn) if name not in optional)


def options_of(fn: Plugin) -> dict[str, Any]:
    """Configuration keys of a function, with their defaults: its keyword-only parameters.

    Errors: ConfigError if one has no default.
    """
    options = {p.name: p.default for p in _parameters(fn) if p.kind is p.KEYWORD_ONLY}
    for key, default in options.items():
        if default is inspect.Parameter.empty:
            raise ConfigError(f"{name_of(fn)}: the option '{key}' needs a default; write {key}=... in its definition.")
    return options


def checked_options(fn: Plugin, kind: str, options: Mapping[str, Any], name: str | None = None) -> dict[str, Any]:
    """All options of a function: these values, and the defaults of the others.

    Errors: ConfigError for a key the function does not have, a value of another type, or one its own check refuses.
    """
    defaults, name = options_of(fn), name or name_of(fn)
    for key, value in options.items():
        if key not in defaults:
            raise ConfigError(f"{kind}.{key}: {kind}={name} has no such key{_owner(kind, key, defaults)}")
        if not _fits(value, inspect.signature(fn).parameters[key]):
            raise ConfigError(f"{kind}.{key}={value}: wrong type. {kind}={name} has the default {defaults[key]!r}.")
    chosen = {**defaults, **options}
    if check := _checks.get(_place(fn)):
        check(**chosen)
    return chosen


class Loss:
    """A loss function with its options, checked against its signature.

    .fn the function, .name, .options all its keyword-only parameters. Immutable: `replace` makes another.
    Errors: ConfigError as in `resolve` and `checked_options`.
    """

    def __init__(self, fn: str | Plugin, /, **options: Any) -> None:
        self.fn = resolve(fn, "loss")
        self.name = fn if isinstance(fn, str) and ":" not in fn else name_of(self.fn)
        self.options = checked_options(self.fn, "loss", options, self.name)

    def replace(self, **options: Any) -> Loss:
        """The same loss with some options changed: a schedule is `run.loss.replace(clip_high=...)` at the call."""
        changed = copy(self)
        changed.options = checked_options(self.fn, "loss", {**self.options, **options}, self.name)
        return changed

    def __repr__(self) -> str:
        return f"Loss({', '.join([repr(self.name), *(f'{key}={value!r}' for key, value in self.options.items())])})"


def _table(kind: str) -> dict[str, Plugin]:
    if kind not in _registered:
        raise ConfigError(
            f"no kind of plug-in '{kind}'. Known: {', '.join(_registered)}.{did_you_mean(kind, _registered)}"
        )
    return _registered[kind]


@functools.cache
def _import_built_ins(kind: str) -> None:
    for name in BUILT_INS[kind]:
        module = importlib.import_module(name)
        for part in pkgutil.iter_modules(getattr(module, "__path__", ())):
            importlib.import_module(f"{name}.{part.name}")


def _by_name(name: str, kind: str) -> Plugin:
    names = known(kind)
    if name not in names:
        raise ConfigError(
            f"{kind} '{name}' is not registered. Known: {', '.join(names) or 'none'}.{did_you_mean(name, names)} "
            "For your own, write path/to/file.py:name."
        )
    return _registered[kind][name]


def file_module(source: str, what: str) -> ModuleType:
    """The module a file makes. Its name carries a hash of the content, so that an edited file is another module.

    Errors: ConfigError, which `what` begins.
    """
    path = Path(source).expanduser()
    if not path.is_file():
        raise ConfigError(f"{what}: no file {source}.")
    content = path.read_bytes()
    name = f"{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}_{hashlib.sha256(content).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path.resolve())
    sys.modules[name] = module  # dataclasses and pickle look the module up while its body runs
    try:
        exec(compile(content, module.__file__, "exec", dont_inherit=True), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{what}: {_raised(error, module.__file__, source)}") from error
    cloudpickle.register_pickle_by_value(module)
    return module


def _installed_module(source: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{source}.".startswith(f"{error.name}."):
            reason = f"there is no module {error.name} on Python's path. For a file, write path/to/file.py:name."
        else:
            reason = f"importing {source} failed. {_raised(error)}"
        raise ConfigError(f"{what}: {reason}") from error


def _raised(error: Exception, file: str | None = None, shown: str = "") -> str:
    """`./my.py, line 3, raised ZeroDivisionError: ...`: the innermost line in `file` (called `shown`), or anywhere."""
    if isinstance(error, SyntaxError) and error.filename:
        where, line = error.filename, error.lineno
        said = error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        innermost = ([frame for frame in frames if file in (None, frame.filename)] or frames)[-1]
        where, line = innermost.filename, innermost.lineno
        said = str(error)
    return f"{shown if where == file else where}, line {line}, raised {type(error).__name__}: {said}."


def _defined(module: ModuleType) -> list[str]:
    """Public functions and classes that the module itself defines, in its order."""
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return [name for name in own if not name.startswith("_") and callable(getattr(module, name))]


def _place(fn: Plugin) -> tuple[str, str]:
    """Where a function is defined: file (or module, in a notebook) and qualified name."""
    module = getattr(fn, "__module__", None) or ""
    file = getattr(sys.modules.get(module), "__file__", None)
    return file or module, getattr(fn, "__qualname__", name_of(fn))


def _parameters(fn: Plugin) -> list[inspect.Parameter]:
    return list(inspect.signature(fn).parameters.values())


def _owner(kind: str, key: str, own: Mapping[str, Any]) -> str:
    owners = [f"{kind}={name}" for name in known(kind) if key in options_of(_registered[kind][name])]
    if owners:
        return f"; it belongs to {', '.join(owners)}."
    return f".{did_you_mean(key, own)} Its keys: {', '.join(own) or 'none'}."


def _fits(value: Any, option: inspect.Parameter) -> bool:
    """Whether a value is of the option's kind, read off its default: any number for a number, else the same type."""
    default = option.default
    if value is None or default is None:
        return default is None or "None" in str(option.annotation)
    if isinstance(default, (int, float)) and not isinstance(default, bool):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, (list, tuple)):
        return isinstance(value, (list, tuple))
    return isinstance(value, type(default))
