"""The messages and tools of a chat request, checked and in one shape.

Contents become plain text: a list of text parts is joined, null is the empty text.
"""

from __future__ import annotations

from typing import Any

from areal.openai.errors import WireError
from areal.openai.fields import Fields, is_text, show

_ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_messages(fields: Fields) -> list[dict[str, Any]]:
    messages = fields.items("messages")
    if not messages:
        raise fields.wrong("messages", "a list with at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def parse_tools(fields: Fields) -> list[dict[str, Any]]:
    """The tools the model may use: none when `tool_choice` is "none"."""
    tools = fields.items("tools")
    for i, tool in enumerate(tools):
        own = Fields(tool, f"tools[{i}]")
        if own.any("type") != "function":
            raise own.wrong("type", "'function'")
        function = Fields(own.any("function"), f"tools[{i}].function")
        if not function.text("name"):
            raise function.wrong("name", "a name")
        function.text("description", None)
        function.object("parameters")
    choice = fields.any("tool_choice")
    if choice not in (None, "auto", "none"):
        raise fields.wrong("tool_choice", "'auto' or 'none': a call cannot be forced")
    return [] if choice == "none" else tools


def _message(message: Any, where: str) -> dict[str, Any]:
    fields = Fields(message, where)
    role = fields.any("role")
    if role not in _ROLES:
        raise fields.wrong("role", f"one of {', '.join(_ROLES)}")
    checked = {**message, "content": _content(fields, where, may_be_absent=role == "assistant")}
    if fields.has("tool_calls"):
        calls = fields.items("tool_calls")
        checked["tool_calls"] = [_call(c, f"{where}.tool_calls[{i}]") for i, c in enumerate(calls)]
    return {key: value for key, value in checked.items() if value is not None}


def _content(fields: Fields, where: str, *, may_be_absent: bool) -> str:
    content = fields.any("content")
    if content is None and may_be_absent:
        return ""
    if is_text(content):
        return content
    if not isinstance(content, list):
        raise fields.wrong("content", "a text or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        own = Fields(part, f"{where}.content[{i}]")
        if own.any("type") != "text":
            raise own.wrong("type", "'text': only text is understood here")
        texts.append(own.text("text"))
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    """A call the model made earlier."""
    fields = Fields(call, where)
    function = Fields(fields.any("function"), f"{where}.function")
    if not isinstance(function.any("arguments"), str | dict):
        raise function.wrong("arguments", "JSON in a text")
    function.text("name")
    kind = fields.any("type")
    if kind not in (None, "function"):
        raise WireError(
            400, f"{where}.type: expected 'function', got {show(kind)}", f"{where}.type"
        )
    return call
