"""Anthropic's messages API, translated to OpenAI's chat API and back.

In: the body of POST /v1/messages. Out: the body of the equivalent chat completion, and its reply as
a message, an event stream or an error in Anthropic's format. Reasoning becomes a thinking block
without a signature. Blocks other than text and tool use are rejected, except thinking blocks of
earlier turns, which are dropped: the session has recorded them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from areal.agents.completions import Completion, named_event
from areal.api.json_text import dumps, loads_written
from areal.openai.requests import (
    Count,
    Temperature,
    ToolChoice,
    TopK,
    TopP,
    WireError,
    parse_body,
)
from areal.utils.http_body import Body, Items, Name, Text

if TYPE_CHECKING:
    from areal.api.interaction import InteractionCache

_SAME = {"model", "max_tokens", "temperature", "top_p", "top_k", "stream"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "api_error"}


class WithText(Body):
    """A block of a place that holds only text."""

    text: Text


class TextBlock(WithText):
    type: Literal["text"]


class ToolUse(Body):
    type: Literal["tool_use"]
    id: Any = None
    name: Text
    input: Any = None


class ToolResult(Body):
    type: Literal["tool_result"]
    tool_use_id: Any = None
    content: Text | Items[WithText] | None = None


class Thinking(Body):
    type: Literal["thinking", "redacted_thinking"]


Block = Annotated[TextBlock | ToolUse | ToolResult | Thinking, Field(discriminator="type")]


class Message(Body):
    role: Literal["user", "assistant"]
    content: Text | Items[Block]


class Tool(Body):
    name: Name
    description: Text | None = None
    input_schema: dict[str, Any] | None = None


class Choice(Body):
    type: ToolChoice


class MessagesBody(Body):
    model: Text | None = None
    max_tokens: Count = None
    temperature: Temperature = None
    top_p: TopP = None
    top_k: TopK = None
    stream: bool | None = None
    system: Text | Items[WithText] | None = None
    messages: Items[Message]
    tools: Items[Tool] | None = None
    tool_choice: Choice | None = None
    stop_sequences: Items[Name] | None = None


def chat_body(content: dict[str, Any], cache: InteractionCache) -> dict[str, Any]:
    body = parse_body(MessagesBody, content)
    chat = body.model_dump(include=_SAME, exclude_none=True)
    system = _text(body.system)
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(body.messages):
        chat["messages"] += _messages(message, f"messages[{i}]")
    if body.tools is not None:
        chat["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        chat["tool_choice"] = body.tool_choice.type
    if body.stop_sequences is not None:
        chat["stop"] = body.stop_sequences
    return chat


def message_of(done: Completion) -> dict[str, Any]:
    usage = done.reply["usage"]
    return {
        **_head(done),
        "content": _blocks_of(done.message),
        "stop_reason": _STOP_REASONS.get(done.finish_reason, done.finish_reason),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
        },
    }


def message_events(done: Completion) -> Iterator[bytes]:
    return map(named_event, _events(done))


def error_of(error: WireError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _messages(message: Message, where: str) -> list[dict[str, Any]]:
    """One Anthropic message may become several: each tool result is a chat message of its own."""
    role, blocks = message.role, message.content
    if isinstance(blocks, str):
        return [{"role": role, "content": blocks}]
    results, texts, calls = [], [], []
    for i, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block)
            case ToolUse() if role == "assistant":
                calls.append(_call(block))
            case ToolResult() if role == "user":
                result = {"role": "tool", "tool_call_id": block.tool_use_id}
                results.append({**result, "content": _text(block.content)})
            case ToolUse() | ToolResult():
                place = f"{where}.content[{i}].type"
                reason = f"{block.type!r} is not understood in a message of role {role!r}"
                raise WireError(400, f"{place}: {reason}", place)
    if role == "assistant":
        calls = {"tool_calls": calls} if calls else {}
        return [{"role": role, "content": _text(texts), **calls}]
    return [*results, *([{"role": role, "content": _text(texts)}] if texts else [])]


def _call(block: ToolUse) -> dict[str, Any]:
    function = {"name": block.name, "arguments": dumps(block.input or {})}
    return {"id": block.id, "type": "function", "function": function}


def _tool(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
    }
    present = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": present}


def _text(content: str | Sequence[WithText] | None) -> str:
    parts = content or ""
    return parts if isinstance(parts, str) else "".join(part.text for part in parts)


def _head(done: Completion) -> dict[str, Any]:
    return {
        "id": done.reply["id"],
        "type": "message",
        "role": "assistant",
        "model": done.call.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _blocks_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls", ())
    blocks = []
    if reasoning := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"] or ""})
    for call in calls:
        function = call["function"]
        arguments = _arguments(function["arguments"])
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}
        )
    return blocks


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = loads_written(text)
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": text}


def _events(done: Completion) -> Iterator[dict[str, Any]]:
    message = message_of(done)
    usage = message["usage"]
    yield {
        "type": "message_start",
        "message": {**_head(done), "usage": {**usage, "output_tokens": 0}},
    }
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty = {**block, "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        elif block["type"] == "thinking":
            empty = {**block, "thinking": ""}
            delta = {"type": "thinking_delta", "thinking": block["thinking"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {
        "type": "message_delta",
        "delta": {"stop_reason": message["stop_reason"], "stop_sequence": None},
        "usage": {"output_tokens": usage["output_tokens"]},
    }
    yield {"type": "message_stop"}
