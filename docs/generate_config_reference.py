"""Writes docs/reference/config.md and docs/reference/cli.md from the code they describe.

    .venv/bin/python docs/generate_config_reference.py

A key's text is the string under its field in areal/api/config/, a command's that of its argparse
parser: to change a page, change the source and run this. A test compares the committed pages.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import mdformat

from areal.api.config.experiment import BaseExperimentConfig
from areal.api.config.section import field_types, item_class, section_class
from areal.api.config.trainers import EXPERIMENTS
from areal.cli.main import COMMANDS, add_command

FOLDER = Path(__file__).parent / "reference"
TYPE_NAMES = {bool: "true or false", int: "whole number", float: "number", str: "text"}

CONFIG_INTRO = """\
# Config reference

A config file is YAML; its key `trainer` says which of the roots below it is. Any key can be set on
the command line too: `areal train grpo.yaml actor.optimizer.lr=1e-5`, and `~key` goes back to the
default. `${other.key}` and `${oc.env:NAME}` stand for other values. `areal check` answers a wrong
key, value or combination with one line that says what to change.

This page is made from the code by `docs/generate_config_reference.py`.
"""

CLI_INTRO = """\
# Command line reference

Errors are one line. Exit codes: 0 done, 2 the user's mistake (the line says what to change), 1 a
fault of the world such as a full disk, 130 Ctrl-C. With `AREAL_DEBUG=1` in the environment an error
keeps its traceback.

This page is made from the code by `docs/generate_config_reference.py`.
"""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
        print(f"wrote {file}")


def pages() -> dict[Path, str]:
    """File -> its text, as mdformat leaves it."""
    texts = {"config.md": config_page(), "cli.md": cli_page()}
    return {FOLDER / name: mdformat.text(text, extensions={"gfm"}) for name, text in texts.items()}


def config_page() -> str:
    parts = [CONFIG_INTRO, "## Every trainer", *_class_text(BaseExperimentConfig)]
    for trainer, root in EXPERIMENTS.items():
        parts += [f"## trainer: {trainer}", *_class_text(root, parent=BaseExperimentConfig)]
    places = _places()
    for section in places:
        parent = section.__base__ if section.__base__ in places else None
        parts += [f"## {section.__name__}", _place_text(section, places)]
        parts += _class_text(section, parent=parent)
    return "\n\n".join(parts)


def _class_text(cls: type, parent: type | None = None) -> Iterator[str]:
    yield inspect.getdoc(cls)
    helps = {name: text for base in reversed(cls.__mro__) for name, text in field_helps(base)}
    inherited = field_types(parent) if parent is not None else {}
    own = [f for f in dataclasses.fields(cls) if f.name not in inherited or _redefined(cls, f.name)]
    rows = [
        (f"`{f.name}`", _type_text(field_types(cls)[f.name]), _default_text(f), helps[f.name])
        for f in own
    ]
    if rows:
        yield _table(("key", "type", "default", "meaning"), rows)
    if parent is BaseExperimentConfig:
        yield "And the keys of [every trainer](#every-trainer)."
    elif parent is not None:
        yield f"And the keys of {_link(parent)}."


def field_helps(cls: type) -> Iterator[tuple[str, str]]:
    """(field, the string under it) of the fields `cls` itself defines."""
    if not dataclasses.is_dataclass(cls):
        return
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    for field, below in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
            yield field.target.id, " ".join(below.value.value.split())


def _redefined(cls: type, name: str) -> bool:
    return name in cls.__annotations__


def _places() -> dict[type, dict[str, list[str]]]:
    """Section class -> where it occurs: {dotted key: trainers}, in the order of the files."""
    places: dict[type, dict[str, list[str]]] = {}

    def visit(cls: type, prefix: str, trainer: str) -> None:
        for name, hint in field_types(cls).items():
            section = section_class(hint) or item_class(hint)
            if section is not None:
                key = f"{prefix}{name}"
                places.setdefault(section, {}).setdefault(key, []).append(trainer)
                visit(section, f"{key}.", trainer)

    for trainer, root in EXPERIMENTS.items():
        visit(root, "", trainer)
    for section in list(places):
        if dataclasses.is_dataclass(section.__base__):
            places.setdefault(section.__base__, {})  # a base that no key has by itself
    return places


def _place_text(section: type, places: dict[type, dict[str, list[str]]]) -> str:
    if not places[section]:
        heirs = [_link(cls) for cls in places if cls.__base__ is section]
        return f"What {' and '.join([', '.join(heirs[:-1]), heirs[-1]])} have in common."
    found = []
    for key, trainers in places[section].items():
        everywhere = len(trainers) == len(EXPERIMENTS)
        where = f" ({', '.join(f'`{trainer}`' for trainer in trainers)})"
        found.append(f"`{key}`{'' if everywhere else where}")
    return f"Section {', '.join(found)}."


def _type_text(hint: Any) -> str:
    """As a user of YAML thinks of it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type_text(arg) for arg in args if arg is not type(None))
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in args)
    if origin is list:
        if dataclasses.is_dataclass(args[0]):
            return f"list of {_link(args[0])}"
        return f"list of {TYPE_NAMES[args[0]]}s"
    if origin is dict:
        return "keys"
    return _link(hint) if dataclasses.is_dataclass(hint) else TYPE_NAMES[hint]


def _default_text(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{json.dumps(field.default)}`"
    if field.default_factory is dataclasses.MISSING:
        return "required"
    value = field.default_factory()
    return "its defaults" if dataclasses.is_dataclass(value) else f"`{json.dumps(value)}`"


def _link(cls: type) -> str:
    return f"[{cls.__name__}](#{cls.__name__.lower()})"


def cli_page() -> str:
    parser = argparse.ArgumentParser(prog="areal")
    commands = parser.add_subparsers()
    parts = [CLI_INTRO]
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name)
        add_command(name, command)
        parts += _command_text(name, command, summary)
    return "\n\n".join(parts)


def _command_text(name: str, command: argparse.ArgumentParser, summary: str) -> Iterator[str]:
    """A command, and the commands under it."""
    yield f"## areal {name}"
    yield command.description or _sentence(summary)
    if rows := list(_arguments(command)):
        yield _table(("argument", "default", "meaning"), rows)
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, child in action.choices.items():
                yield from _command_text(f"{name} {word}", child, summary)


def _arguments(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, str]]:
    """(spelling, default, meaning) of every argument but --help."""
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        is_told = not (action.default is None or action.default is False or action.default == [])
        default = f"`{action.default}`" if is_told else ""
        if action.option_strings and action.required:
            default = "required"
        texts = [action.help] if action.help else []
        if action.choices:
            texts.append("one of " + ", ".join(f"`{choice}`" for choice in action.choices))
        yield f"`{_spelling(action)}`", default, "; ".join(texts)


def _spelling(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"{action.metavar or action.dest}{' ...' if action.nargs == '*' else ''}"
    if action.nargs == 0:
        return action.option_strings[-1]
    named = action.metavar or action.dest.upper()
    values = named if isinstance(named, tuple) else (named,)
    return " ".join([action.option_strings[-1], *values])


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines
    )


if __name__ == "__main__":
    main()
