"""`@config_section` and its checks: dataclasses whose fields hold what their types say.

    @config_section
    class NormConfig:
        mean_level: Literal["batch", "group"] | None = "batch"
        eps: float = 1e-5

    NormConfig(mean_level="invalid")    # ValueError: mean_level must be one of batch, group, ...

Whether a section comes from a file or is built in Python, types, choices and finite numbers are
checked here, before and after its own `__post_init__`. Conversions are lossless: `1e3` is the
integer 1000 and `"5"` (from `${oc.env:N}`) is 5, but 0.5 is no integer, true is no number and no
name.

`ConfigError` is the one error a user's configuration can end in. `explain_unknown` says what to
write instead of an unknown key. The `require*` checks are shared by all sections: a section names
its own field (`lr must be above 0, got -1`), and the loader prefixes `actor.optimizer.` and the
line of the file, so every message starts with the name of a field.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from areal.api.config.areal_keys import AT_ROOT, why_absent


class ConfigError(ValueError):
    """One line: position, what was found, what was expected, what to change."""

    def __init__(self, message: str, key: tuple[str, ...] = ()) -> None:
        # User text may contain line breaks; the message quotes it and stays one line.
        super().__init__(" ".join(message.splitlines()))
        self.key = key  # at fault, if it is known


# Names in other frameworks -> the key here.
_OTHER_NAMES = {
    "learning_rate": "actor.optimizer.lr",
    "model": "actor.path",
    "model_path": "actor.path",
    "kl_coef": "actor.kl_ctl",
    "staleness": "rollout.max_head_offpolicyness",
    "max_staleness": "rollout.max_head_offpolicyness",
}


@functools.cache
def field_types(cls: type) -> dict[str, Any]:
    """Field name -> type of a config class."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def section_class(hint: Any) -> type | None:
    """The dataclass behind a field type, `Section` or `Section | None`; None for a plain value."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


@functools.cache
def item_class(hint: Any) -> type | None:
    """The dataclass of the items of a field type `list[Section]`; None for any other."""
    if typing.get_origin(hint) is not list:
        return None
    return section_class(typing.get_args(hint)[0])


def all_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key below `cls`, sections included."""
    for name, hint in field_types(cls).items():
        yield prefix + name
        section = section_class(hint)
        if section is not None:
            yield from all_keys(section, f"{prefix}{name}.")


def explain_unknown(root: type, section: type, key: tuple[str, ...]) -> str:
    """`actor.eps_clp: unknown key; did you mean actor.eps_clip?`"""
    prefix, leaf = "".join(f"{part}." for part in key[:-1]), key[-1]
    return f"{prefix}{leaf}: unknown key; {_advice(root, section, prefix, leaf)}"


def _advice(root: type, section: type, prefix: str, leaf: str) -> str:
    siblings = list(field_types(section))
    if leaf in AT_ROOT and section is not root:
        return f"it is written once, as {AT_ROOT[leaf]} at the root of the file: remove it here"
    why = why_absent(f"{prefix}{leaf}")
    if why is not None:
        return why if why.startswith("use ") else f"{why}; remove it"
    if near := difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.8):
        return f"did you mean {prefix}{near[0]}?"
    keys = list(all_keys(root))
    if _OTHER_NAMES.get(leaf) in keys:
        return f"did you mean {_OTHER_NAMES[leaf]}?"
    if homes := [key for key in keys if key.rpartition(".")[2] == leaf]:
        return f"it belongs at {_nearest_first(homes, prefix)}"
    if near := difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.6):
        return f"did you mean {prefix}{near[0]}?"
    leaves = sorted({key.rpartition(".")[2] for key in keys})
    if near := difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75):
        homes = [key for key in keys if key.rpartition(".")[2] == near[0]]
        return f"did you mean {_nearest_first(homes, prefix)}?"
    if homes := [key for key in keys if len(leaf) >= 4 and leaf in key.rpartition(".")[2]]:
        return f"did you mean {_nearest_first(homes, prefix)}?"
    if section is root:
        sections = [name for name, hint in field_types(root).items() if section_class(hint)]
        return f"sections of the file are {', '.join(sections)}"
    return f"keys of {prefix.rstrip('.')} are {', '.join(siblings)}"


def _nearest_first(homes: list[str], prefix: str) -> str:
    """At most three positions, those inside the section the user wrote in first."""
    homes = sorted(homes, key=lambda key: (not key.startswith(prefix), key.count(".")))
    return " or ".join(homes[:3])


_MARK = "__areal_section__"
_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_BOOLEANS = {"true": True, "false": False}


@typing.dataclass_transform(kw_only_default=True, field_specifiers=(dataclasses.field,))
def config_section(cls: type | None = None, **options: Any) -> Any:
    """As a bare decorator, or with options of `dataclasses.dataclass` (`frozen=True`)."""
    if cls is None:
        return functools.partial(config_section, **options)
    own = getattr(cls, "__post_init__", None)

    def __post_init__(self: object) -> None:
        # Once: in the most derived section, also if a user's plain dataclass extends it.
        is_whole = _most_derived(type(self)) is made
        if is_whole:
            _convert_fields(self)
        if own is not None:
            own(self)
        if is_whole:
            _check_finite(self)

    setattr(cls, _MARK, True)
    cls.__post_init__ = __post_init__
    made = typing.cast(type, dataclasses.dataclass(**{"kw_only": True, **options})(cls))
    return made


def is_section(cls: type) -> bool:
    return _MARK in vars(cls)


def converted(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` converted to the field types of `cls`, or a ValueError that starts with the field
    and says what was expected and found."""
    converters = _converters(cls)
    return {name: _converted(name, value, converters[name]) for name, value in values.items()}


def _show(value: Any) -> str:
    """As YAML writes it, at most a line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value!r:.200}"


def _convert_fields(config: object) -> None:
    for name, kinds, converter in _plan(type(config)):
        value = getattr(config, name)
        if type(value) in kinds:
            continue
        found = _converted(name, value, converter)
        if found is not value:
            object.__setattr__(config, name, found)


@functools.cache
def _plan(cls: type) -> list[tuple[str, frozenset[type], Callable[[Any], Any]]]:
    """Each field with the types that need no conversion: sections are built per request."""
    plan: list[tuple[str, frozenset[type], Callable[[Any], Any]]] = []
    for name, hint in field_types(cls).items():
        kinds = typing.get_args(hint) if _is_union(hint) else (hint,)
        # A field that takes a number or text first tries the number: "0.5" is one.
        first = next(kind for kind in kinds if kind is not type(None))
        plain = {
            kind for kind in kinds if kind is type(None) or (kind is first and kind in _SCALARS)
        }
        plan.append((name, frozenset(plain), _converters(cls)[name]))
    return plan


def _check_finite(config: object) -> None:
    """After a section's own checks, which may be more specific."""
    for name in _converters(type(config)):
        value = getattr(config, name)
        items: list[Any] = (
            [value] if type(value) is float else [*value] if type(value) is list else []
        )
        for item in items:
            if isinstance(item, float) and not math.isfinite(item):
                raise ValueError(f"{name} must be a finite number, got {item}")


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _converted(name: str, value: Any, converter: Callable[[Any], Any]) -> Any:
    try:
        return converter(value)
    except _WrongValue as wrong:
        is_unquoted = wrong.expected == _TYPE_NAMES[str] and isinstance(value, (bool, float))
        hint = "; put it in quotes" if is_unquoted else ""
        raise ValueError(f"{name} must be {wrong.expected}, got {_show(value)}{hint}") from None


@functools.cache
def _converters(cls: type) -> dict[str, Callable[[Any], Any]]:
    return {name: _converter(hint) for name, hint in field_types(cls).items()}


@functools.cache
def _most_derived(cls: type) -> type:
    return next(c for c in cls.__mro__ if is_section(c))


class _WrongValue(Exception):
    def __init__(self, expected: str) -> None:
        self.expected = expected


def _converter(hint: Any) -> Callable[[Any], Any]:
    """A function that converts a value to `hint` or raises _WrongValue."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if _is_union(hint):
        return _one_of(args)
    if origin is Literal:
        return functools.partial(_choice, args)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return functools.partial(_instance, hint)
    if origin is list:
        return functools.partial(_list, _converter(args[0]))
    if origin is dict:
        return _dict
    return functools.partial(_scalar, hint)


def _one_of(kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
    """The first type that can hold the value: "0.5" is a number before it is text."""
    choices = [_converter(kind) for kind in kinds if kind is not type(None)]
    is_optional = type(None) in kinds

    def convert(value: Any) -> Any:
        if value is None and is_optional:
            return None
        expected: list[str] = []
        for choice in choices:
            try:
                return choice(value)
            except _WrongValue as wrong:
                expected.append(wrong.expected)
        raise _WrongValue(" or ".join(expected))

    return convert


def _choice(choices: tuple[Any, ...], value: Any) -> Any:
    # YAML reads a bare `on` or `off` as a boolean.
    word = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    if not isinstance(word, str) or word not in choices:
        known = ", ".join(str(choice) for choice in choices)
        raise _WrongValue(f"one of {known}" if len(choices) > 1 else known)
    return word


def _instance(cls: type, value: Any) -> Any:
    if not isinstance(value, cls):
        is_built = isinstance(value, Mapping) or dataclasses.is_dataclass(value)
        raise _WrongValue(f"of class {cls.__name__}" if is_built else "a section of keys")
    return value


def _list(convert: Callable[[Any], Any], value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _WrongValue("a list, like [1, 2]")
    items: list[Any] = [*value]
    return [convert(item) for item in items]


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _WrongValue("a section of keys")
    return {**value}


def _scalar(kind: type, value: Any) -> Any:
    if type(value) is kind:
        return value
    try:
        return _SCALARS[kind](value)
    except (ValueError, TypeError, OverflowError):
        raise _WrongValue(_TYPE_NAMES[kind]) from None


def _to_bool(value: Any) -> bool:
    if isinstance(value, str):
        value = _BOOLEANS.get(value.lower())
    if not isinstance(value, bool):
        raise TypeError
    return value


def _to_int(value: Any) -> int:
    if not _may_be_number(value) or (not isinstance(value, str) and value != int(value)):
        raise TypeError
    return int(value)


def _to_float(value: Any) -> float:
    if not _may_be_number(value):
        raise TypeError
    return float(value)


def _may_be_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (numbers.Real, str))


def _to_str(value: Any) -> str:
    # An integer reads back as it was written; 1.10 or `yes` would not.
    if isinstance(value, os.PathLike):
        return os.fspath(typing.cast("os.PathLike[str]", value))
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TypeError
    return str(value)


_SCALARS = {bool: _to_bool, int: _to_int, float: _to_float, str: _to_str}


_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})")


def require(ok: bool, message: str, found: Any) -> None:
    """Raise ValueError `message, got found` unless `ok`. `message` starts with a field name.

    With `found` None the message stands alone: the field was not given.
    """
    if not ok:
        raise ValueError(message if found is None else f"{message}, got {found!r}")


def require_at_least(low: float, **fields: float | None) -> None:
    """Every field that is set is a number of at least `low`."""
    for name, value in fields.items():
        ok = value is None or (math.isfinite(value) and value >= low)
        require(ok, f"{name} must be at least {low}", value)


def require_above(low: float, **fields: float | None) -> None:
    """Every field that is set is a finite number above `low`."""
    for name, value in fields.items():
        ok = value is None or (math.isfinite(value) and value > low)
        require(ok, f"{name} must be above {low}", value)


def require_finite(**fields: float) -> None:
    for name, value in fields.items():
        require(math.isfinite(value), f"{name} must be a finite number", value)


def require_fraction(**fields: float) -> None:
    """Every field lies in [0, 1]."""
    for name, value in fields.items():
        require(0 <= value <= 1, f"{name} must lie between 0 and 1", value)


def expand_path(name: str, path: str) -> str:
    """`~` and `$VARIABLES` replaced; a variable that is not set is an error, not a folder name."""
    expanded = os.path.expandvars(os.path.expanduser(path))
    unset = _VARIABLE.search(expanded)
    if unset:
        raise ValueError(
            f"{name} uses {unset.group()}, which is not set in the environment: {path!r}"
        )
    return expanded
