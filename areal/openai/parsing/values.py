"""Names and arguments of tool calls.

Formats that are not JSON write every argument as text, `true` the word like `true` the flag: the
tool's JSON schema says which is meant (`ToolSchemas.typed`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal.api.json_text import loads_written, well_formed
from areal.openai.parsing.cursor import NotACall

MAX_NAME = 256
_MAX_SCHEMAS = 64  # looked at for one argument: references may be circular
_UNIONS = ("anyOf", "oneOf", "allOf")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_KINDS = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A valid call in the model's text. `arguments` is JSON; `id` is the model's own, if any."""

    name: str
    arguments: str
    id: str | None = None


def written_call(name: Any, arguments: Any, call_id: Any = None) -> WrittenCall:
    """NotACall unless `name` is a name, and the arguments are an object or already a text."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise NotACall
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if not isinstance(arguments, str):
        raise NotACall
    return WrittenCall(name, well_formed(arguments), call_id)


class ToolSchemas:
    """The tools of a request, in OpenAI's format."""

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        functions = [tool.get("function") or {} for tool in tools]
        self._schemas = {f.get("name"): f.get("parameters") or {} for f in functions}

    def __len__(self) -> int:
        return len(self._schemas)

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def typed(self, name: str, key: str, text: str) -> Any:
        """The argument `key`, written as `text`. Text that fits no type stays text."""
        whole = self._schemas.get(name, {})
        properties = whole.get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        types = _types(schema, whole)
        if types == {"string"}:
            return text
        word = text.strip()
        if types and "string" not in types:
            word = _PYTHON_WORDS.get(word, word)
        try:
            value = loads_written(word)
        except ValueError:
            return text
        may_be_text = not types or "string" in types
        if isinstance(value, str):
            return text if may_be_text else value
        kind = _KINDS[type(value)]
        fits = not types or kind in types or (kind == "integer" and "number" in types)
        return text if may_be_text and not fits else value


def _types(schema: Any, root: dict[str, Any]) -> set[str]:
    """Types that the schema allows; empty if it does not say."""
    types: set[str] = set()
    pending = [schema]
    for _ in range(_MAX_SCHEMAS):
        if not pending:
            break
        part = pending.pop()
        if not isinstance(part, dict):
            continue
        declared = part.get("type")
        types.update(one for one in _list(declared) or [declared] if isinstance(one, str))
        types.update(_KINDS[type(one)] for one in _list(part.get("enum")) if type(one) in _KINDS)
        pending += [branch for union in _UNIONS for branch in _list(part.get(union))]
        if isinstance(reference := part.get("$ref"), str):
            pending.append(_referenced(reference, root))
    return types


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referenced(reference: str, root: dict[str, Any]) -> Any:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, dict) else None
    return found
