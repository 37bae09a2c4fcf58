"""What a user writes, `key=value`: split, read as the type of its key, and multiplied out where it is a sweep."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from ..errors import ConfigError


@dataclass(frozen=True)
class Overrides:
    """Overrides by key. choices: options of groups (`model=smollm2`). values: the text of every other key."""

    choices: dict[str, str]
    values: dict[str, str]

    @property
    def keys(self) -> frozenset[str]:
        """Every key that was set."""
        return frozenset(self.choices) | frozenset(self.values)


def split(words: Sequence[str], groups: Sequence[str]) -> Overrides:
    """The overrides in `words`, `key=value` each; of two for one key the later holds.

    Errors: ConfigError for a word of another form.
    """
    choices: dict[str, str] = {}
    values: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if key[:1] in ("+", "~", "-"):
            raise ConfigError(f"{word}: keys can't be added or removed; write {key.lstrip('+~-') or 'key'}=value.")
        if not equals or not key:
            raise ConfigError(f"{word}: overrides are written key=value, such as training.lr=1e-6.")
        (choices if key in groups else values)[key] = text.strip("'\"") if key in groups else text
    return Overrides(choices, values)


def value_of(key: str, text: str, kind: Any) -> Any:
    """`text` as the value of a key of type `kind`: text for a str key is taken as it stands, a single value for a list
    key is a list of one, all else is read by Hydra's grammar.

    Errors: ConfigError if it cannot be read, or is a sweep.
    """
    kind = _without_none(kind)
    if kind is str and not _is_quoted(text):
        return None if text == "null" else text
    if get_origin(kind) is list and not text.startswith("["):
        try:
            return _read(key, f"[{text}]")
        except ConfigError:
            return [text]
    return _read(key, text)


def jobs_of(words: Sequence[str]) -> list[dict[str, str]]:
    """The sweep's jobs in order: for each the swept keys with their values, the last key varying fastest.

    A sweep is written as in Hydra: `a,b`, `choice(a,b)`, `range(1,4)`. Errors: ConfigError if nothing is swept, or a
    range is continuous.
    """
    swept: dict[str, list[str]] = {}
    for word in words:
        override = _parsed(word)
        if override is not None and override.is_sweep_override():
            if not override.is_discrete_sweep():
                raise ConfigError(
                    f"{word}: a sweep needs single values, such as {override.key_or_group}=1,2 or range(1,5)."
                )
            swept[override.key_or_group] = list(override.sweep_string_iterator())
    if not swept:
        raise ConfigError("-m sweeps over keys with several values, such as training.lr=1e-6,3e-6; there is none.")
    return [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]


def _read(key: str, text: str) -> Any:
    override = _parsed(f"{key}={text}")
    if override is None:
        raise ConfigError(
            f"{key}={text}: cannot be read. Text with special characters goes in quotes, and these in quotes for the "
            f"shell: '{key}=\"...\"', or '{key}=[\"...\"]' for a list."
        )
    if override.is_sweep_override():
        raise ConfigError(f"{key}={text}: several values are a sweep: add -m. A list is written {key}=[{text}].")
    return override.value()


def _parsed(word: str) -> Override | None:
    """None where Hydra's grammar has no reading of it."""
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def _is_quoted(text: str) -> bool:
    return len(text) > 1 and text[0] == text[-1] and text[0] in "'\""


def _without_none(kind: Any) -> Any:
    """T of `Optional[T]`, else the type itself."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind
    others = [each for each in get_args(kind) if each is not type(None)]
    return others[0] if len(others) == 1 else kind


def swap(words: Sequence[str], changed: dict[str, str]) -> Iterator[str]:
    """`words` with the keys of `changed` set to its values."""
    for word in words:
        key = word.partition("=")[0]
        yield f"{key}={changed[key]}" if key in changed else word
