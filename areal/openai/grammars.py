"""The grammars of replies that clients ask for: forced tool calls, and JSON by a schema.

    grammar = reply_grammar(call, tool_format="hermes", tokenizer=tokenizer)   # None: anything goes
    request = ModelRequest(prompt_ids, gconfig, grammar=grammar)

Tool calls are in the format of the model. Arguments follow the tool's JSON schema, written as chat
templates write JSON; what the schema says beyond the grammar's means (`uniqueItems`, formats) is
left to the model. Marks that are tokens of their own (`marks_of`) are written as these tokens,
others as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from areal.api.io_struct import Grammar
from areal.openai.parsing.formats import TOOL_FORMATS
from areal.openai.requests import ChatCall
from areal.openai.text_stream import marks_of


@dataclass(frozen=True, slots=True)
class _Layout:
    """NAME, ARGUMENTS, KEY and VALUE stand for what they say."""

    call: str
    before: str = ""
    between: str = "\n"
    after: str = ""
    argument: str = ""  # of one argument; empty: the arguments are one JSON object
    joint: str = ""  # between arguments
    is_single: bool = False  # a message has one call


_LAYOUTS = {
    "hermes": _Layout('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'),
    "qwen": _Layout('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'),
    "qwen3_coder": _Layout(
        "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
        argument="<parameter=KEY>\nVALUE\n</parameter>\n",
    ),
    "glm45": _Layout(
        "<tool_call>NAME\nARGUMENTS</tool_call>",
        argument="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
    ),
    "llama3_json": _Layout('{"name": "NAME", "parameters": ARGUMENTS}', between="; "),
    "pythonic": _Layout(
        "NAME(ARGUMENTS)",
        before="[",
        between=", ",
        after="]",
        argument="KEY=VALUE",
        joint=", ",
    ),
    "mistral": _Layout(
        '{"name": "NAME", "arguments": ARGUMENTS}',
        before="[TOOL_CALLS][",
        between=", ",
        after="]",
    ),
    "deepseek_v3": _Layout(
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
        before="<｜tool▁calls▁begin｜>",
        between="",
        after="<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": _Layout(
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
        is_single=True,  # each has a number of its own
    ),
    "gpt-oss": _Layout(
        "<|channel|>commentary to=functions.NAME<|message|>ARGUMENTS", is_single=True
    ),
}
_JSON_OPTIONS = {
    "lenient": True,
    "coerce_one_of": True,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


def reply_grammar(
    call: ChatCall, *, tool_format: str, tokenizer: Any, in_reasoning: bool = False
) -> Grammar | None:
    """What `tool_choice` and `response_format` of a chat demand of its reply.

    A reply that has a schema and may call tools is either.
    """
    if call.forced_tool is None and call.json_schema is None:
        return None
    functions = [tool["function"] for tool in call.tools]
    if isinstance(call.forced_tool, str):
        functions = [one for one in functions if one["name"] == call.forced_tool]
    if call.json_schema is not None and not functions and not in_reasoning:
        return Grammar(json_schema=call.json_schema)
    writer = _Writer(_layout(tool_format), tokenizer)
    bodies = []
    if functions:
        bodies.append(writer.calls(functions, several=call.parallel_tool_calls))
    if call.forced_tool is None and call.json_schema is not None:
        bodies.append(_json(call.json_schema))
    return writer.grammar(bodies, tool_format, in_reasoning=in_reasoning)


def _layout(tool_format: str) -> _Layout:
    known = TOOL_FORMATS[tool_format]
    return next(one for base, one in _LAYOUTS.items() if TOOL_FORMATS[base] is known)


class _Writer:
    """Collects rules of a Lark grammar."""

    def __init__(self, layout: _Layout, tokenizer: Any) -> None:
        self._layout = layout
        self._special = marks_of(tokenizer)
        self.rules: list[str] = []

    def calls(self, functions: Iterable[Mapping[str, Any]], *, several: bool) -> str:
        layout = self._layout
        call = self._rule(" | ".join(map(self._call, functions)))
        may_repeat = several and not layout.is_single
        more = f"({self.literal(layout.between)} {call})*" if may_repeat else ""
        return f"{self.literal(layout.before)} {call} {more} {self.literal(layout.after)}"

    def grammar(self, bodies: list[str], tool_format: str, *, in_reasoning: bool) -> Grammar:
        """One of `bodies`, after the end of reasoning that has begun."""
        start, reasoning = self._rule(" | ".join(bodies)), TOOL_FORMATS[tool_format].reasoning
        if in_reasoning and reasoning:
            close = next(iter(reasoning.values()))
            start = f"{self.text_until(close)} /[ \\n]{{0,4}}/ {start}"
        return Grammar(lark="\n".join([f"start: {start}", *self.rules]))

    def literal(self, text: str) -> str:
        """Its special tokens by number, the rest as text."""
        marks = "|".join(map(re.escape, self._special)) or "(?!)"
        parts = [part for part in re.split(f"({marks})", text) if part]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else _quoted(part)
            for part in parts
        )

    def text_until(self, close: str) -> str:
        """Any text up to the first `close`, which may be a special token."""
        if any(mark in close for mark in self._special):
            return self._rule(f"/(.|\\n)*/ {self.literal(close)}")
        regex = re.escape(close).replace("/", r"\/").replace("\n", "n")
        return self._rule(f"/(.|\\n)*{regex}/", "[lazy]")

    def _call(self, function: Mapping[str, Any]) -> str:
        layout = self._layout
        schema = function.get("parameters")
        if not isinstance(schema, dict) or not schema:
            schema = {"type": "object"}
        head, _, tail = layout.call.partition("ARGUMENTS")
        name = function["name"] if layout.argument else json.dumps(function["name"])[1:-1]
        arguments = self._arguments(schema) if layout.argument else _json(schema)
        head = head.replace("NAME", name)
        return self._rule(f"{self.literal(head)} {arguments} {self.literal(tail)}")

    def _arguments(self, schema: dict[str, Any]) -> str:
        """Required ones, then any of the others, each in the order of the schema."""
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        required = set(schema.get("required") or ())
        items = {key: self._argument(key, one, schema) for key, one in properties.items()}
        joint = self.literal(self._layout.joint)
        text = f" {joint} ".join(item for key, item in items.items() if key in required)
        others = [item for key, item in items.items() if key not in required]
        if text or not joint:
            return " ".join([text, *(f"({joint} {item})?" for item in others)])
        # The first of them has no joint before it.
        tails = (
            " ".join(f"({joint} {item})?" for item in others[i + 1 :]) for i in range(len(others))
        )
        lists = [f"{item} {tail}" for item, tail in zip(others, tails, strict=True)]
        return f"({' | '.join(lists)})?" if lists else ""

    def _argument(self, key: str, schema: Any, whole: dict[str, Any]) -> str:
        head, _, tail = self._layout.argument.partition("VALUE")
        head = self.literal(head.replace("KEY", key))
        schema = schema if isinstance(schema, dict) else {}
        is_text = schema.get("type") == "string" and tail
        if is_text and not schema.keys() & {"enum", "const"}:
            return self._rule(f"{head} {self.text_until(tail)}")
        if is_text:
            values = schema.get("enum", [schema.get("const")])
            value = f"({' | '.join(_quoted(str(value)) for value in values)})"
        else:
            shared = {name: whole[name] for name in ("$defs", "definitions") if name in whole}
            value = _json({**shared, **schema})
        return self._rule(f"{head} {value} {self.literal(tail)}")

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS}, ensure_ascii=False)}"
