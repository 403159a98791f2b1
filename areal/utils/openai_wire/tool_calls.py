"""Calls of tools that a model wrote into its text.

| parser         | what the model writes                                                  |
|----------------|------------------------------------------------------------------------|
| hermes, qwen   | <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number    |
| llama          | {"name": "f", "parameters": {...}}, several divided by ; or line breaks |

What is not a valid call stays text: nothing the model wrote is lost.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ToolCalls = list[dict[str, Any]]

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(rf"{_OPENING}(.*?)(?:{_CLOSING}|\Z)", re.DOTALL)
_LLAMA_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class ToolParser:
    parse: Callable[[str], tuple[str, ToolCalls]]
    may_begin: Callable[[str], int]  # see tool_calls_may_begin


def parse_tool_calls(text: str, parser: str = "hermes") -> tuple[str | None, ToolCalls]:
    """(content, calls) of a complete text. Without a call the content is the text as it is."""
    content, calls = TOOL_PARSERS[parser].parse(text)
    if not calls:
        return text, []
    return content if content.strip() else None, calls


def tool_calls_may_begin(text: str, parser: str = "hermes") -> int:
    """The text before this index is content, whatever follows: a stream may show it."""
    return TOOL_PARSERS[parser].may_begin(text)


def parser_of_template(chat_template: str | None) -> str:
    """The parser for models that are shown their tools by this template."""
    template = chat_template or ""
    return "llama" if _OPENING not in template and '"parameters"' in template else "hermes"


def _parse_hermes(text: str) -> tuple[str, ToolCalls]:
    calls: ToolCalls = []
    content = ""
    position = 0
    for block in _BLOCK.finditer(text):
        call = _call_of(_json_of(block[1]))
        if call is not None:
            calls.append(call)
            content = _join(content, text[position : block.start()])
            position = block.end()
    return _join(content, text[position:]), calls


def _join(content: str, piece: str) -> str:
    """The white space around a call belongs to the call; texts it divides become lines."""
    if not content:
        return piece.rstrip()
    return f"{content}\n{piece.strip()}" if piece.strip() else content


def _hermes_may_begin(text: str) -> int:
    begin = text.find(_OPENING)
    if begin < 0:
        lengths = range(min(len(text), len(_OPENING) - 1), 0, -1)
        overlap = next((n for n in lengths if _OPENING.startswith(text[-n:])), 0)
        begin = len(text) - overlap
    return len(text[:begin].rstrip())


def _parse_llama(text: str) -> tuple[str, ToolCalls]:
    rest = text.strip().removeprefix(_LLAMA_TAG).lstrip()
    calls: ToolCalls = []
    decoder = json.JSONDecoder()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return text, []
        call = _call_of(value)
        if call is None:
            return text, []
        calls.append(call)
        rest = rest[end:].lstrip("; \n\t")
    return "", calls


def _llama_may_begin(text: str) -> int:
    begin = text.lstrip()
    may_be_call = begin.startswith(("{", _LLAMA_TAG)) or _LLAMA_TAG.startswith(begin)
    return 0 if may_be_call else len(text)


def _json_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call_of(value: Any) -> dict[str, Any] | None:
    """A call in OpenAI's shape, or None when `value` is not one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, str | dict):
        return None
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": value["name"], "arguments": arguments},
    }


_HERMES = ToolParser(_parse_hermes, _hermes_may_begin)
TOOL_PARSERS: dict[str, ToolParser] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "llama": ToolParser(_parse_llama, _llama_may_begin),
}
