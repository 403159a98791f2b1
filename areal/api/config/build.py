"""From a nested dict to the typed config, with an error a user can act on.

Order: unknown keys (all of them in one message), missing required keys (likewise), then section by
section from the inside out: its values (`section.py`), then its own checks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from areal.api.config.errors import ConfigError
from areal.api.config.schema import explain_unknown, field_types, item_class, section_class
from areal.api.config.section import converted
from areal.api.config.source import KeyPath, Node, Source

MISSING = "???"  # OmegaConf's mark of a value that somebody must still give


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
        given = _section_keys(field, filled.get(field.name))
        if section is not None and given is not None:
            filled[field.name] = with_defaults(section, given)
        elif field.name not in filled:
            if field.default is not dataclasses.MISSING:
                filled[field.name] = field.default
            elif field.default_factory is not dataclasses.MISSING:
                filled[field.name] = field.default_factory()
    return filled


def build(cls: type, tree: Any, source: Source, key: KeyPath = ()) -> Any:
    """The `cls` that `tree` (defaults filled in, interpolations resolved) describes."""
    values = {
        name: _sections_built(tree[name], hint, source, (*key, name))
        for name, hint in field_types(cls).items()
        if name in tree and not _is_missing(tree[name])
    }
    try:
        return cls(**converted(cls, values))
    except ValueError as error:
        message = ".".join((*key, str(error)))
        at_fault = tuple(message.split(maxsplit=1)[0].rstrip(":").split("."))
        raise source.error(at_fault, message) from None


def _sections_built(value: Node, hint: Any, source: Source, key: KeyPath) -> Any:
    """`value` with every dict that stands for a section, or for one of a list, made into it."""
    inner, item = section_class(hint), item_class(hint)
    if inner is not None and isinstance(value, Mapping):
        return build(inner, value, source, key)
    if item is not None and isinstance(value, list):
        return [build(item, v, source, key) if isinstance(v, Mapping) else v for v in value]
    return value


def _section_keys(field: dataclasses.Field[Any], given: Node) -> Mapping[str, Any] | None:
    """None for what is no section. One left out or left empty (`saver:` with every key commented)
    keeps its defaults."""
    if isinstance(given, Mapping):
        return given
    return {} if given is None and field.default is dataclasses.MISSING else None


def _is_missing(value: Any) -> bool:
    return isinstance(value, str) and value == MISSING


def _unknown(cls: type, tree: Mapping[Any, Node], key: KeyPath) -> Iterator[tuple[type, KeyPath]]:
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


def _missing(cls: type, tree: Mapping[str, Node], key: KeyPath) -> Iterator[KeyPath]:
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
