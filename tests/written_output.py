"""Tools, and how a call of each format is written: shared by the tests of openai/parsing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from areal.openai.parsing.parser import OutputParser, ParsedOutput, fold, parse_output

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "text": {"type": "string"},
                    "items": {"type": "array"},
                },
            },
        },
    }
    for name in ("add", "sub")
]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def hermes(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def qwen_xml(name: str, arguments: dict[str, Any]) -> str:
    pairs = [f"<parameter={k}>\n{_text(v)}\n</parameter>\n" for k, v in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>"


def glm(name: str, arguments: dict[str, Any]) -> str:
    pairs = [
        f"<arg_key>{k}</arg_key>\n<arg_value>{_text(v)}</arg_value>\n" for k, v in arguments.items()
    ]
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def mistral(name: str, arguments: dict[str, Any]) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


def mistral_list(name: str, arguments: dict[str, Any]) -> str:
    return f"[TOOL_CALLS] [{json.dumps({'name': name, 'arguments': arguments})}]"


def deepseek_v3(name: str, arguments: dict[str, Any]) -> str:
    written = f"function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```"
    call = f"<｜tool▁call▁begin｜>{written}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def deepseek_v31(name: str, arguments: dict[str, Any]) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"


def kimi(name: str, arguments: dict[str, Any]) -> str:
    head = f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0"
    tail = "<|tool_call_end|><|tool_calls_section_end|>"
    return f"{head}<|tool_call_argument_begin|>{json.dumps(arguments)}{tail}"


# Formats in which a call may stand anywhere in the content.
MARKED: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "hermes": hermes,
    "qwen": hermes,
    "qwen3_coder": qwen_xml,
    "glm45": glm,
    "mistral": mistral,
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
    "kimi_k2": kimi,
}


def llama(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "parameters": arguments})


def pythonic(name: str, arguments: dict[str, Any]) -> str:
    pairs = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"[{name}({pairs})]"


def harmony(name: str, arguments: dict[str, Any]) -> str:
    header = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
    return f"{header}<|message|>{json.dumps(arguments)}<|call|>"


WRITERS = {**MARKED, "llama": llama, "pythonic": pythonic, "gpt-oss": harmony}


def result(parsed: ParsedOutput) -> tuple[str, str, list[tuple[str, Any]]]:
    """(content, reasoning, [(name, arguments)]), and what holds of all calls."""
    calls = parsed.calls
    assert [call.index for call in calls] == list(range(len(calls)))
    assert all(call.id for call in calls) and len({call.id for call in calls}) == len(calls)
    named = [(call.name, json.loads(call.arguments)) for call in calls]
    return parsed.content, parsed.reasoning, named


def parse(text: str, tool_format: str = "hermes", **options: Any):
    """The result of the whole text, which is also that of its characters one by one."""
    options = {"tools": TOOLS, **options}
    whole = result(parse_output(text, tool_format, **options))
    assert result(pushed(text, tool_format, 1, **options)) == whole
    return whole


def pushed(text: str, tool_format: str, size: int, **options: Any) -> ParsedOutput:
    parser = OutputParser(tool_format, **options)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    return fold([event for piece in pieces for event in parser.push(piece)] + parser.finish())
