"""Parsers for the tool calls in a model's text.

| parser         | format                                                                 |
|----------------|------------------------------------------------------------------------|
| hermes, qwen   | <tool_call>{"name": "f", "arguments": {...}}</tool_call>, any number    |
| llama          | {"name": "f", "parameters": {...}}, separated by ; or line breaks       |

Reasoning, <think>...</think>, is content: calls inside it are not made. Unclosed reasoning extends
to the end. A template may open it in the prompt, so that the output starts inside (`in_reasoning`,
see begins_in_reasoning).

Invalid calls stay in the content: no text of the model is lost.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from areal.api.json_text import loads_written

ToolCalls = list[dict[str, Any]]

_THINK, _END_THINK = "<think>", "</think>"
_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_TAG = re.compile("<(?:think>|/think>|tool_call>)")
_LLAMA_TAG = "<|python_tag|>"
_MAX_BROKEN = 64  # opening tags without a valid call, per text
_HEADER_TOKENS = 32  # at the end of a prompt: longer than the tag and trailing white space


@dataclass(frozen=True, slots=True)
class ToolParser:
    """Both functions take the text and whether it begins in reasoning."""

    parse: Callable[[str, bool], tuple[str, ToolCalls]]
    may_begin: Callable[[str, bool], int]  # see tool_calls_may_begin


def parse_tool_calls(
    text: str, parser: str = "hermes", *, in_reasoning: bool = False
) -> tuple[str | None, ToolCalls]:
    """(content, calls) of a complete text. Without a call the content is the unchanged text."""
    content, calls = TOOL_PARSERS[parser].parse(text, in_reasoning)
    if not calls:
        return text, []
    return content if content.strip() else None, calls


def tool_calls_may_begin(text: str, parser: str = "hermes", *, in_reasoning: bool = False) -> int:
    """Index before which the text is content whatever follows: a stream may show it."""
    return TOOL_PARSERS[parser].may_begin(text, in_reasoning)


def begins_in_reasoning(tokenizer: Any, prompt_ids: Sequence[int]) -> bool:
    """Whether the prompt ends with an open <think>, which the output then continues."""
    header = tokenizer.decode(
        prompt_ids[-_HEADER_TOKENS:], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return header.rstrip().endswith(_THINK)


def parser_of_template(chat_template: str | None) -> str:
    """The parser for models whose tools are rendered by this template."""
    template = chat_template or ""
    return "llama" if _OPENING not in template and '"parameters"' in template else "hermes"


def _parse_hermes(text: str, in_reasoning: bool) -> tuple[str, ToolCalls]:
    calls: ToolCalls = []
    content = ""
    position = 0  # the text before it is in `content` or in a call
    num_broken = 0
    for tag in _TAG.finditer(text):
        if tag.start() < position:
            continue
        if tag[0] != _OPENING or in_reasoning:
            in_reasoning = _is_open(tag[0], in_reasoning)
            continue
        end = text.find(_CLOSING, tag.end())
        call = _call_of(_json_of(text[tag.end() : None if end < 0 else end]))
        if call is not None:
            calls.append(call)
            content = _join(content, text[position : tag.start()])
            position = len(text) if end < 0 else end + len(_CLOSING)
        elif (num_broken := num_broken + 1) == _MAX_BROKEN:
            break  # bounds the work: each may be scanned to the end of the text
    return _join(content, text[position:]), calls


def _is_open(tag: str, in_reasoning: bool) -> bool:
    """Whether reasoning is open after `tag`."""
    return tag != _END_THINK if in_reasoning else tag == _THINK


def _join(content: str, piece: str) -> str:
    """White space around a call belongs to the call; the texts it separates become lines."""
    if not content:
        return piece.rstrip()
    return f"{content}\n{piece.strip()}" if piece.strip() else content


def _hermes_may_begin(text: str, in_reasoning: bool) -> int:
    begin = len(text)
    for tag in _TAG.finditer(text):
        if tag[0] == _OPENING and not in_reasoning:
            begin = tag.start()
            break
        in_reasoning = _is_open(tag[0], in_reasoning)
    else:
        if in_reasoning:
            return len(text)
        lengths = range(min(len(text), len(_OPENING) - 1), 0, -1)
        begin -= next((n for n in lengths if _OPENING.startswith(text[-n:])), 0)
    return len(text[:begin].rstrip())


def _parse_llama(text: str, in_reasoning: bool) -> tuple[str, ToolCalls]:
    begin = _end_of_reasoning(text, in_reasoning)
    rest = text[begin:].strip().removeprefix(_LLAMA_TAG).lstrip()
    calls: ToolCalls = []
    decoder = json.JSONDecoder()
    while rest:
        try:
            _, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return text, []
        call = _call_of(_json_of(rest[:end]))
        if call is None:
            return text, []
        calls.append(call)
        rest = rest[end:].lstrip("; \n\t")
    return text[:begin].rstrip(), calls


def _llama_may_begin(text: str, in_reasoning: bool) -> int:
    begin = _end_of_reasoning(text, in_reasoning)
    rest = text[begin:].lstrip()
    may_be_call = rest.startswith(("{", _LLAMA_TAG)) or _LLAMA_TAG.startswith(rest)
    is_open = in_reasoning or text.lstrip().startswith(_THINK)
    if is_open and begin == len(text):  # not closed yet, or just now
        return len(text)
    return len(text[:begin].rstrip()) if may_be_call else len(text)


def _end_of_reasoning(text: str, in_reasoning: bool) -> int:
    """Start of the text after the leading reasoning."""
    if not in_reasoning and not text.lstrip().startswith(_THINK):
        return 0
    end = text.find(_END_THINK)
    return len(text) if end < 0 else end + len(_END_THINK)


def _json_of(text: str) -> Any:
    try:
        return loads_written(text)
    except ValueError:
        return None


def _call_of(value: Any) -> dict[str, Any] | None:
    """A call in OpenAI's format, or None if `value` is not one."""
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
