"""From argv to a nested dict that knows where each key was written, and on to the typed config.

`read_source`: the file first, then the `key=value` overrides in order. Values are YAML read by
OmegaConf, neither interpolated nor checked.

`check_keys` and `build`: unknown keys (all in one message), missing required keys (likewise), then
section by section from the inside out: its values (`section.py`), then its own checks.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from areal.api.config.section import (
    ConfigError,
    converted,
    explain_unknown,
    field_types,
    item_class,
    section_class,
)

KeyPath = tuple[str, ...]
# Value of a key in the tree.
Node: TypeAlias = "Mapping[Any, Node] | list[Node] | str | float | bool | None"
COMMAND_LINE = "command line"


@dataclass(slots=True)
class Source:
    """The user's config as written."""

    path: str  # the config file
    tree: dict[str, Any] = dataclasses.field(default_factory=dict)
    positions: dict[KeyPath, str] = dataclasses.field(default_factory=dict)  # key -> "grpo.yaml:12"

    def position(self, key: KeyPath) -> str:
        """Position of `key`, or of the innermost section around it."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.positions:
                return self.positions[key[:length]]
        return self.path

    def error(self, key: KeyPath, message: str) -> ConfigError:
        """`message` (which starts with the key), prefixed with its position, on one line."""
        return ConfigError(f"{self.position(key)}: {message}", key)


def read_source(argv: list[str]) -> Source:
    """Read the file in `argv` and apply its overrides."""
    path, overrides = _split_argv(argv)
    source = Source(path)
    _read_file(source)
    for override in overrides:
        _apply_override(source, override)
    return source


def _split_argv(argv: list[str]) -> tuple[str, list[str]]:
    paths: list[str] = []
    overrides: list[str] = []
    rest = list(argv[1:] if argv and argv[0].endswith(".py") else argv)
    while rest:
        arg = rest.pop(0)
        if arg == "--config":
            if not rest:
                raise ConfigError("--config needs a file: --config FILE.yaml")
            paths.append(rest.pop(0))
        elif arg.startswith("--config="):
            paths.append(arg.removeprefix("--config="))
        elif arg.startswith("-"):
            hint = ": arguments are --config FILE.yaml KEY=VALUE ..."
            if "=" in arg:
                hint = f"; overrides have no dashes: {arg.lstrip('-')}"
            raise ConfigError(f"unknown option {arg!r}{hint}")
        elif "=" in arg or arg.startswith("~"):
            overrides.append(arg)
        elif paths:
            raise ConfigError(f"cannot read argument {arg!r}: an override is written key=value")
        else:
            paths.append(arg)
    if len(paths) != 1:
        found = f"got {len(paths)}: {', '.join(paths)}" if paths else "got none"
        raise ConfigError(f"expected one config file (--config FILE.yaml), {found}")
    return paths[0], overrides


def _read_file(source: Source) -> None:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    text = _read_text(source.path)
    try:
        root = yaml.SafeLoader(text).get_single_node()
        if root is None:
            return
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{source.path}: expected `key: value` lines, found {text[:40]!r}")
        _note_lines(root, (), source)
        tree = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
        source.tree = cast("dict[str, Any]", tree)  # its root is a mapping
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise _yaml_error(source.path, error) from None
    except RecursionError:
        raise ConfigError(f"{source.path}: sections are nested too deeply to read") from None


def _read_text(path: str) -> str:
    file = Path(path).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        names = [p.name for p in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
        near = difflib.get_close_matches(file.name, names, n=1)
        hint = f"; did you mean {file.parent / near[0]}?" if near else ""
        raise ConfigError(f"config file {path!r} does not exist{hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"config file {path!r} is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read config file {path!r}: {error}") from None


def _yaml_error(position: str, error: Any) -> ConfigError:
    """One line for the several that PyYAML and OmegaConf write."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).strip().partition("\n")[0]
    line = f":{mark.line + 1}" if mark is not None and not position.startswith(COMMAND_LINE) else ""
    return ConfigError(f"{position}{line}: not valid YAML: {problem}")


def _note_lines(node: Any, key: KeyPath, source: Source) -> None:
    """Record the line of every key of a composed YAML mapping."""
    import yaml

    for key_node, value_node in node.value:
        child = (*key, str(key_node.value))
        source.positions[child] = f"{source.path}:{key_node.start_mark.line + 1}"
        if isinstance(value_node, yaml.MappingNode):
            _note_lines(value_node, child, source)


def _apply_override(source: Source, override: str) -> None:
    """`a.b=value`, `+a.b=value` (the same), or `~a.b` (reset to the default)."""
    name, equals, text = override.lstrip("+").partition("=")
    drop = name.startswith("~")
    key = tuple(name.removeprefix("~").strip().split("."))
    if not all(key) or (drop and equals):
        raise ConfigError(f"cannot read override {override!r}: expected key=value or ~key")
    parent = source.tree
    for depth, part in enumerate(key[:-1], start=1):
        if parent.get(part) is None:
            parent[part] = {}
            source.positions[key[:depth]] = COMMAND_LINE
        child = parent[part]
        if not isinstance(child, dict):
            section = ".".join(key[:depth])
            raise ConfigError(
                f"{COMMAND_LINE}: {override}: {section} is {child!r:.200}, not a section with keys"
            )
        parent = cast("dict[str, Any]", child)
    if drop:
        parent.pop(key[-1], None)
    else:
        parent[key[-1]] = _parse_value(override, text)
        source.positions[key] = COMMAND_LINE


def _parse_value(override: str, text: str) -> Any:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not text.strip():
        return ""
    try:
        # The same parser reads values after `key:` in a file and after `key=` here.
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
        return cast("dict[str, Any]", tree)["value"]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise _yaml_error(f"{COMMAND_LINE}: {override}", error) from None


MISSING = "???"  # OmegaConf's marker for a required value


def check_keys(root: type, tree: Mapping[str, Any], source: Source) -> None:
    """Reject unknown keys, then missing required keys."""
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
    """`tree` with every default filled in, so that `${...}` may refer to any key."""
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
    """Build `cls` from `tree` (defaults filled in, interpolations resolved)."""
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
    """`value` with every dict for a section, or for one in a list, built."""
    inner, item = section_class(hint), item_class(hint)
    if inner is not None and isinstance(value, Mapping):
        return build(inner, value, source, key)
    if item is not None and isinstance(value, list):
        return [build(item, v, source, key) if isinstance(v, Mapping) else v for v in value]
    return value


def _section_keys(field: dataclasses.Field[Any], given: Node) -> Mapping[str, Any] | None:
    """None if it is not a section. One left out or left empty (`saver:` with every key commented
    out) keeps its defaults."""
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
