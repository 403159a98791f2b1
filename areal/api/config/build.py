"""From a nested dict to the typed config, with an error a user can act on.

Order: unknown keys (all of them in one message), missing required keys (likewise), then values
one by one, then each section's own checks. Conversions lose nothing: `1e3` is the integer 1000
and `"5"` (what `${oc.env:N}` gives) is 5, but 0.5 is no integer and true is no name.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from areal.api.config.errors import ConfigError
from areal.api.config.schema import explain_unknown, field_types, item_class, section_class
from areal.api.config.source import KeyPath, Source

MISSING = "???"  # OmegaConf's mark of a value that somebody must still give
_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_BOOLEANS = {"true": True, "false": False}


def check_keys(root: type, tree: Mapping[str, Any], source: Source) -> None:
    """Refuse keys that are not in the tree, then required keys that are absent."""
    unknown = list(_unknown(root, tree, ()))
    if unknown:
        section, key = unknown[0]
        others = ", ".join(".".join(other) for _, other in unknown[1:4])
        more = f" (also unknown: {others}{', ...' if len(unknown) > 4 else ''})" if others else ""
        raise source.error(key, explain_unknown(root, section, key) + more)
    missing = [".".join(key) for key in _missing(root, tree, ())]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(f"{source.path}: {', '.join(missing)} {verb} required and not given")


def with_defaults(cls: type, tree: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with every default written out, so that `${...}` may refer to any key."""
    filled = dict(tree)
    for field in dataclasses.fields(cls):
        section = section_class(field_types(cls)[field.name])
        given = filled.get(field.name)
        if section is not None and (
            isinstance(given, Mapping) or _is_default_section(field, given)
        ):
            filled[field.name] = with_defaults(section, given or {})
        elif field.name not in filled:
            if field.default is not dataclasses.MISSING:
                filled[field.name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                filled[field.name] = field.default_factory()
    return filled


def build(cls: type, tree: Any, source: Source, key: KeyPath = ()) -> Any:
    """The `cls` that `tree` (defaults filled in, interpolations resolved) describes."""
    values = {}
    for name, hint in field_types(cls).items():
        if name in tree and not _is_missing(tree[name]):
            values[name] = _convert(tree[name], hint, source, (*key, name))
    try:
        return cls(**values)
    except ValueError as error:
        message = ".".join((*key, str(error)))
        at_fault = tuple(message.split(maxsplit=1)[0].rstrip(":").split("."))
        raise source.error(at_fault, message) from None


def _is_default_section(field: Any, given: Any) -> bool:
    """A section left out or left empty (`saver:` with every key commented) keeps its defaults."""
    return given is None and field.default is dataclasses.MISSING


def _is_missing(value: Any) -> bool:
    return isinstance(value, str) and value == MISSING


def _unknown(cls: type, tree: Mapping[Any, Any], key: KeyPath) -> Iterator[tuple[type, KeyPath]]:
    hints = field_types(cls)
    for name, value in tree.items():
        child = (*key, str(name))
        if name not in hints:
            yield cls, child
        elif isinstance(value, Mapping) and (section := section_class(hints[name])):
            yield from _unknown(section, value, child)
        elif isinstance(value, list) and (section := item_class(hints[name])):
            for item in value:
                if isinstance(item, Mapping):
                    yield from _unknown(section, item, child)


def _missing(cls: type, tree: Mapping[str, Any], key: KeyPath) -> Iterator[KeyPath]:
    for field in dataclasses.fields(cls):
        section = section_class(field_types(cls)[field.name])
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        value = tree.get(field.name)
        absent = value is None or _is_missing(value)
        if section is None:
            if required and (field.name not in tree or _is_missing(value)):
                yield (*key, field.name)
        elif isinstance(value, Mapping):
            yield from _missing(section, value, (*key, field.name))
        elif required and absent:
            yield from _missing(section, {}, (*key, field.name))


def _convert(value: Any, hint: Any, source: Source, key: KeyPath) -> Any:
    """`value` as `hint`, or a ConfigError that names key, value and what was expected."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        kinds = [arg for arg in args if arg is not type(None)]
        if len(kinds) > 1:
            return _convert_one_of(value, kinds, source, key)
        return _convert(value, kinds[0], source, key)
    if origin is Literal:
        return _convert_choice(value, args, source, key)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise _wrong_type(value, "a section of keys", source, key)
        return build(hint, value, source, key)
    if origin is list:
        if not isinstance(value, list):
            raise _wrong_type(value, "a list, like [1, 2]", source, key)
        return [_convert(item, args[0], source, key) for item in value]
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _wrong_type(value, "a section of keys", source, key)
        return dict(value)
    try:
        return _SCALARS[hint](value)
    except (ValueError, TypeError, OverflowError):
        raise _wrong_type(value, _TYPE_NAMES[hint], source, key) from None


def _convert_one_of(value: Any, kinds: list[type], source: Source, key: KeyPath) -> Any:
    """The first of several plain types that can hold `value`: "0.5" is a number before a text."""
    for kind in kinds:
        try:
            return _SCALARS[kind](value)
        except (ValueError, TypeError, OverflowError):
            continue
    raise _wrong_type(value, " or ".join(_TYPE_NAMES[kind] for kind in kinds), source, key)


def _convert_choice(value: Any, choices: tuple[Any, ...], source: Source, key: KeyPath) -> str:
    # YAML reads a bare `on` or `off` as a boolean.
    word = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    if word not in choices:
        known = ", ".join(str(choice) for choice in choices)
        known = f"one of {known}" if len(choices) > 1 else known
        raise source.error(key, f"{'.'.join(key)} must be {known}, got {_show(value)}")
    return word


def _wrong_type(value: Any, expected: str, source: Source, key: KeyPath) -> ConfigError:
    hint = ""
    if expected == _TYPE_NAMES[str] and isinstance(value, (bool, float)):
        hint = "; put it in quotes"
    return source.error(key, f"{'.'.join(key)} must be {expected}, got {_show(value)}{hint}")


def _show(value: Any) -> str:
    """As YAML spells it, and not longer than a line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value!r:.200}"


def _to_bool(value: Any) -> bool:
    if isinstance(value, str):
        value = _BOOLEANS.get(value.lower())
    if not isinstance(value, bool):
        raise TypeError
    return value


def _to_int(value: Any) -> int:
    if isinstance(value, (bool, type(None))) or (isinstance(value, float) and value != int(value)):
        raise TypeError
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _to_str(value: Any) -> str:
    # A whole number reads back as it was written; 1.10 or `yes` would not.
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TypeError
    return str(value)


_SCALARS = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str}
