"""Formats in which models write tool calls, one grammar each.

| format      | a call                                                                           |
|-------------|----------------------------------------------------------------------------------|
| hermes      | <tool_call>{"name": "f", "arguments": {...}}</tool_call>                         |
| qwen3_coder | <tool_call><function=f><parameter=a>value</parameter></function></tool_call>     |
| qwen        | either of these                                                                  |
| glm45       | <tool_call>f<arg_key>a</arg_key><arg_value>value</arg_value></tool_call>         |
| llama3_json | {"name": "f", "parameters": {...}}, separated by ; or lines; nothing else        |
| pythonic    | [f(a=1), g(b="x")], nothing else                                                 |
| mistral     | [TOOL_CALLS][{"name": "f", "arguments": {...}}] or [TOOL_CALLS]f[ARGS]{...}      |
| deepseek_v3 | <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜> (V3.1), or the word  |
|             | function in place of f, then f and the arguments in a ```json block (V3, R1)     |
| kimi_k2     | <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>|
| gpt-oss     | a harmony message to=functions.f, see parser.py                                  |

A grammar reads what follows its opening mark and returns at least one call, or raises NotACall. A
closing mark may be missing at the end of the text if the call is complete without it: servers stop
there.
"""

from __future__ import annotations

import re
import secrets
import string
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from areal.api.json_text import loads_written
from areal.openai.parsing.cursor import Cursor, NotACall, Reading
from areal.openai.parsing.values import MAX_NAME, ToolSchemas, WrittenCall, written_call

Grammar: TypeAlias = Callable[[Cursor, ToolSchemas], Reading[list[WrittenCall]]]

THINK = {"<think>": "</think>"}
_MISTRAL_THINK = {"[THINK]": "[/THINK]", **THINK}


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _mistral_id() -> str:
    """Mistral's templates accept no other ids."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    opens: Mapping[str, Grammar] = field(default_factory=dict)  # by the mark before a call
    # A call without a mark: its first character, tried where the content begins.
    start: tuple[str, Grammar] | None = None
    sections: tuple[str, ...] = ()  # marks around all calls, not part of the content
    inner: tuple[str, ...] = ()  # marks inside a call that can be special tokens
    reasoning: Mapping[str, str] = field(default_factory=lambda: THINK)  # opening mark -> closing
    is_harmony: bool = False
    new_id: Callable[[], str] = _new_id

    def marks(self, *, has_tools: bool) -> frozenset[str]:
        """Marks that the text must show to be read, even where special tokens are hidden."""
        marks = [*self.reasoning, *self.reasoning.values()]
        if has_tools or self.is_harmony:
            marks += [*self.opens, *self.sections, *self.inner]
        return frozenset(marks)


def _hermes(cursor: Cursor, tools: ToolSchemas) -> Reading[list[WrittenCall]]:
    call = _json_call((yield from cursor.json()))
    yield from _close(cursor, "</tool_call>")
    return [call]


def _qwen_xml(cursor: Cursor, tools: ToolSchemas) -> Reading[list[WrittenCall]]:
    yield from cursor.skip()
    yield from cursor.expect("<function=")
    call = yield from _function(cursor, tools)
    yield from _close(cursor, "</tool_call>")
    return [call]


def _bare_function(cursor: Cursor, tools: ToolSchemas) -> Reading[list[WrittenCall]]:
    """After <function=: the models at times leave out <tool_call>, but not its end."""
    call = yield from _function(cursor, tools)
    end = cursor.pos
    yield from cursor.skip()
    if not (yield from cursor.literal("</tool_call>")):
        cursor.pos = end
    return [call]


def _qwen(cursor: Cursor, tools: ToolSchemas) -> Reading[list[WrittenCall]]:
    yield from cursor.skip()
    is_json = (yield from cursor.peek()) == "{"
    return (yield from (_hermes if is_json else _qwen_xml)(cursor, tools))


def _function(cursor: Cursor, tools: ToolSchemas) -> Reading[WrittenCall]:
    name = yield from cursor.until(">", MAX_NAME)
    arguments: dict[str, Any] = {}
    while True:
        yield from cursor.skip()
        if (yield from cursor.literal("</function>")):
            return written_call(name, arguments)
        yield from cursor.expect("<parameter=")
        key = yield from cursor.until(">", MAX_NAME)
        text = yield from _value(cursor, "</parameter>", ("<parameter=", "</function>"))
        text = text.removeprefix("\n").removesuffix("\n")
        arguments[key] = tools.typed(name, key, text)


def _glm(cursor: Cursor, tools: ToolSchemas) -> Reading[list[WrittenCall]]:
    yield from cursor.skip()
    name = yield from cursor.match(_GLM_NAME)
    arguments: dict[str, Any] = {}
    while True:
        yield from cursor.skip()
        if (yield from cursor.literal("</tool_call>")):
            return [written_call(name, arguments)]
        yield from cursor.expect("<arg_key>")
        key = (yield from cursor.until("</arg_key>", MAX_NAME)).strip()
        yield from cursor.skip()
        yield from cursor.expect("<arg_value>")
        text = yield from _value(cursor, "</arg_value>", ("<arg_key>", "</tool_call>"))
        arguments[key] = tools.typed(name, key, text)


_GLM_NAME = re.compile(rf"[\w.:/-]{{1,{MAX_NAME}}}")


def _value(cursor: Cursor, close: str, followers: tuple[str, ...]) -> Reading[str]:
    """Up to a closing tag that a further tag of the call follows: values may contain tags."""
    begin = cursor.pos
    while True:
        yield from cursor.until(close)
        after = cursor.pos
        yield from cursor.skip()
        for follower in followers:
            if (yield from cursor.literal(follower)):
                cursor.pos -= len(follower)
                return cursor.text[begin : after - len(close)]


def _llama(cursor: Cursor, tools: ToolSchemas) -> Reading[list[WrittenCall]]:
    calls = []
    while True:
        yield from cursor.skip(_SEPARATORS)
        if not (yield from cursor.peek()):
            return _some(calls)
        begin = cursor.pos
        yield from cursor.expect("{")
        yield from cursor.skip()
        yield from cursor.expect('"')
        # Without a mark any JSON looks like a call: its first key decides early that it is none.
        if (yield from cursor.until('"', MAX_NAME)) not in _LLAMA_KEYS:
            raise NotACall
        cursor.pos = begin
        calls.append(_json_call((yield from cursor.json())))


_SEPARATORS = re.compile(r"[\s;]*")
_LLAMA_KEYS = ("name", "parameters", "arguments", "type", "function", "id")


def _mistral(cursor: Cursor, tools: ToolSchemas) -> Reading[list[WrittenCall]]:
    yield from cursor.skip()
    if (yield from cursor.peek()) == "[":
        return _some([_listed_call(value) for value in (yield from cursor.json())])
    name = yield from cursor.match(_MISTRAL_NAME)
    call_id = None
    if (yield from cursor.literal("[CALL_ID]")):
        call_id = yield from cursor.match(_MISTRAL_ID)
    yield from cursor.literal("[ARGS]")
    return [written_call(name, (yield from cursor.json()), call_id)]


def _listed_call(value: Any) -> WrittenCall:
    call = _json_call(value)
    call_id = value.get("id")
    has_id = isinstance(call_id, str) and _MISTRAL_ID.fullmatch(call_id)
    return replace(call, id=call_id) if has_id else call


_MISTRAL_NAME = re.compile(rf"[^\[{{\s]{{1,{MAX_NAME}}}")
_MISTRAL_ID = re.compile(r"[0-9A-Za-z]{1,64}")


def _deepseek(cursor: Cursor, tools: ToolSchemas) -> Reading[list[WrittenCall]]:
    head = (yield from cursor.until("<｜tool▁sep｜>", MAX_NAME)).strip()
    yield from cursor.skip()
    if (yield from cursor.peek()) == "{":  # V3.1
        call = written_call(head, (yield from cursor.json()))
    elif head != "function":
        raise NotACall
    else:
        name = (yield from cursor.until("\n", MAX_NAME)).strip()
        yield from cursor.skip()
        has_fence = yield from cursor.literal("```json")
        call = written_call(name, (yield from cursor.json()))
        yield from cursor.skip()
        if has_fence:
            yield from cursor.expect("```")
    yield from _close(cursor, "<｜tool▁call▁end｜>")
    return [call]


def _kimi(cursor: Cursor, tools: ToolSchemas) -> Reading[list[WrittenCall]]:
    call_id = (yield from cursor.until("<|tool_call_argument_begin|>", MAX_NAME)).strip()
    name = re.sub(r":[0-9]+$", "", call_id.removeprefix("functions."))
    # The model's own id is kept: later turns of the template show it again.
    call = written_call(name, (yield from cursor.json()), call_id)
    yield from _close(cursor, "<|tool_call_end|>")
    return [call]


def _pythonic(cursor: Cursor, tools: ToolSchemas) -> Reading[list[WrittenCall]]:
    yield from cursor.skip()
    yield from cursor.expect("[")
    calls = []
    while True:
        yield from cursor.skip()
        name = yield from cursor.match(_PYTHON_NAME)
        yield from cursor.expect("(")
        calls.append(written_call(name, (yield from _items(cursor, ")", "=", _argument_name, 0))))
        yield from cursor.skip()
        if not (yield from cursor.literal(",")):
            break
    yield from cursor.expect("]")
    yield from cursor.skip()
    yield from cursor.literal("<|python_end|>")
    yield from cursor.skip()
    if (yield from cursor.peek()):
        raise NotACall
    return calls


def _items(
    cursor: Cursor, close: str, between: str, key: Callable[[Cursor, int], Reading[str]], depth: int
) -> Reading[dict[str, Any]]:
    """Pairs up to `close`: arguments of a call, or items of a dict."""
    items: dict[str, Any] = {}
    while True:
        yield from cursor.skip()
        if (yield from cursor.literal(close)):
            return items
        name = yield from key(cursor, depth)
        yield from cursor.skip()
        yield from cursor.expect(between)
        items[name] = yield from _python_value(cursor, depth + 1)
        yield from cursor.skip()
        if not (yield from cursor.literal(",")):
            yield from cursor.expect(close)
            return items


def _argument_name(cursor: Cursor, depth: int) -> Reading[str]:
    return (yield from cursor.match(_PYTHON_NAME))


def _dict_key(cursor: Cursor, depth: int) -> Reading[str]:
    key = yield from _python_value(cursor, depth + 1)
    if not isinstance(key, str):
        raise NotACall
    return key


def _python_value(cursor: Cursor, depth: int) -> Reading[Any]:
    """A literal. Nothing is evaluated."""
    if depth > _MAX_PYTHON_DEPTH:
        raise NotACall
    yield from cursor.skip()
    match (yield from cursor.peek()):
        case ("'" | '"') as quote:
            return _unescaped((yield from cursor.string(quote)))
        case "{":
            cursor.pos += 1
            return (yield from _items(cursor, "}", ":", _dict_key, depth))
        case ("[" | "(") as bracket:
            cursor.pos += 1
            return (yield from _python_list(cursor, "]" if bracket == "[" else ")", depth))
    word = yield from cursor.match(_PYTHON_WORD)
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    try:
        return loads_written(word)  # a number: JSON's other words are constants
    except ValueError:
        raise NotACall from None


def _python_list(cursor: Cursor, close: str, depth: int) -> Reading[list[Any]]:
    values = []
    while True:
        yield from cursor.skip()
        if (yield from cursor.literal(close)):
            return values
        values.append((yield from _python_value(cursor, depth + 1)))
        yield from cursor.skip()
        if not (yield from cursor.literal(",")):
            yield from cursor.expect(close)
            return values


def _unescaped(text: str) -> str:
    try:
        return _ESCAPE.sub(_escaped_character, text)
    except (ValueError, OverflowError):  # beyond Unicode
        raise NotACall from None


def _escaped_character(match: re.Match[str]) -> str:
    code = match[1]
    if code in _ESCAPES:
        return _ESCAPES[code]
    return match[0] if len(code) == 1 else chr(int(code[1:], 16))


_MAX_PYTHON_DEPTH = 32
_PYTHON_NAME = re.compile(rf"[A-Za-z_][\w.-]{{0,{MAX_NAME - 1}}}")
_PYTHON_WORD = re.compile(r"[0-9A-Za-z+\-.]{1,400}")
_CONSTANTS = {
    **{"True": True, "False": False, "None": None},
    **{"true": True, "false": False, "null": None},
}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"'}


def _json_call(value: Any) -> WrittenCall:
    if not isinstance(value, dict):
        raise NotACall
    arguments = value.get("arguments", value.get("parameters", {}))
    return written_call(value.get("name"), arguments)


def _close(cursor: Cursor, mark: str) -> Reading[None]:
    """White space and `mark`, or the end of the text."""
    yield from cursor.skip()
    if not (yield from cursor.literal(mark)) and (yield from cursor.peek()):
        raise NotACall


def _some(calls: list[WrittenCall]) -> list[WrittenCall]:
    if not calls:
        raise NotACall
    return calls


_HERMES = ToolFormat({"<tool_call>": _hermes}, inner=("</tool_call>",))
_QWEN = ToolFormat({"<tool_call>": _qwen}, inner=("</tool_call>",))
_QWEN_XML = ToolFormat(
    {"<tool_call>": _qwen_xml, "<function=": _bare_function}, inner=("</tool_call>",)
)
_GLM = ToolFormat(
    {"<tool_call>": _glm},
    inner=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_LLAMA = ToolFormat({"<|python_tag|>": _llama}, ("{", _llama))
_PYTHONIC = ToolFormat({"<|python_start|>": _pythonic}, ("[", _pythonic), inner=("<|python_end|>",))
_MISTRAL = ToolFormat(
    {"[TOOL_CALLS]": _mistral},
    inner=("[ARGS]", "[CALL_ID]"),
    reasoning=_MISTRAL_THINK,
    new_id=_mistral_id,
)
_DEEPSEEK = ToolFormat(
    {"<｜tool▁call▁begin｜>": _deepseek},
    sections=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    inner=("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
)
_KIMI = ToolFormat(
    {"<|tool_call_begin|>": _kimi},
    sections=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    inner=("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
_HARMONY = ToolFormat(
    inner=(
        *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
        *("<|end|>", "<|call|>", "<|return|>"),
    ),
    reasoning={},
    is_harmony=True,
)

# Names of formats, also as vLLM and SGLang spell them.
TOOL_FORMATS: dict[str, ToolFormat] = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseekv3": _DEEPSEEK,
    "deepseekv31": _DEEPSEEK,
    "glm45": _GLM,
    "glm47": _GLM,
    "gpt-oss": _HARMONY,
    "hermes": _HERMES,
    "kimi_k2": _KIMI,
    "llama": _LLAMA,
    "llama3": _LLAMA,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "llama4_pythonic": _PYTHONIC,
    "mistral": _MISTRAL,
    "openai": _HARMONY,
    "pythonic": _PYTHONIC,
    "qwen": _QWEN,
    "qwen25": _HERMES,
    "qwen3_coder": _QWEN_XML,
    "qwen3_xml": _QWEN_XML,
}

# What only templates of a format contain; the first that is found counts.
_SIGNS = {
    "<|channel|>": "gpt-oss",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<｜tool▁calls▁begin｜>": "deepseek_v3",
    "[TOOL_CALLS]": "mistral",
    "<arg_key>": "glm45",
    "<function=": "qwen3_coder",
    "<tool_call>": "hermes",
    "<|python_start|>": "pythonic",
    "[func_name1(": "pythonic",
    '"parameters"': "llama3_json",
}


def format_of_template(chat_template: str | None) -> str:
    """The format in which models with this chat template write calls."""
    template = chat_template or ""
    return next((name for sign, name in _SIGNS.items() if sign in template), "hermes")
