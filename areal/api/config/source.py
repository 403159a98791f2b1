"""From argv to one nested dict, with a note of where each key was written.

The file comes first and `key=value` overrides follow in order. Values are YAML read by OmegaConf
and not interpolated yet; keys are not checked yet.
"""

from __future__ import annotations

import dataclasses
import difflib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from areal.api.config.errors import ConfigError

KeyPath = tuple[str, ...]
# What a key of the tree may hold.
Node: TypeAlias = "Mapping[Any, Node] | list[Node] | str | float | bool | None"
COMMAND_LINE = "command line"


@dataclass(slots=True)
class Source:
    """What the user wrote."""

    path: str  # the config file
    tree: dict[str, Any] = dataclasses.field(default_factory=dict)
    places: dict[KeyPath, str] = dataclasses.field(default_factory=dict)  # key -> "grpo.yaml:12"

    def place(self, key: KeyPath) -> str:
        """Where `key`, or the innermost section around it, was written."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.places:
                return self.places[key[:length]]
        return self.path

    def error(self, key: KeyPath, message: str) -> ConfigError:
        """`message` (which starts with the key) with its place in front, on one line."""
        return ConfigError(f"{self.place(key)}: {message}")


def read_source(argv: list[str]) -> Source:
    """Read the file that `argv` names and apply its overrides."""
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
            hint = f"; overrides have no dashes: {arg.lstrip('-')}" if "=" in arg else ""
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


def _yaml_error(place: str, error: Any) -> ConfigError:
    """One line out of the several that PyYAML and OmegaConf write."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).strip().partition("\n")[0]
    line = f":{mark.line + 1}" if mark is not None and not place.startswith(COMMAND_LINE) else ""
    return ConfigError(f"{place}{line}: not valid YAML: {problem}")


def _note_lines(node: Any, key: KeyPath, source: Source) -> None:
    """Remember the line of every key of a composed YAML mapping."""
    import yaml

    for key_node, value_node in node.value:
        child = (*key, str(key_node.value))
        source.places[child] = f"{source.path}:{key_node.start_mark.line + 1}"
        if isinstance(value_node, yaml.MappingNode):
            _note_lines(value_node, child, source)


def _apply_override(source: Source, override: str) -> None:
    """`a.b=value`, `+a.b=value` (the same), or `~a.b` (back to the default)."""
    name, equals, text = override.lstrip("+").partition("=")
    drop = name.startswith("~")
    key = tuple(name.removeprefix("~").strip().split("."))
    if not all(key) or (drop and equals):
        raise ConfigError(f"cannot read override {override!r}: expected key=value or ~key")
    parent = source.tree
    for depth, part in enumerate(key[:-1], start=1):
        if parent.get(part) is None:
            parent[part] = {}
            source.places[key[:depth]] = COMMAND_LINE
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
        source.places[key] = COMMAND_LINE


def _parse_value(override: str, text: str) -> Any:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not text.strip():
        return ""
    try:
        # A value after `key:` in a file and after `key=` here are read by the same parser.
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
        return cast("dict[str, Any]", tree)["value"]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise _yaml_error(f"{COMMAND_LINE}: {override}", error) from None
