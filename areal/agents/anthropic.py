"""Anthropic's messages API, translated to OpenAI's chat API and back.

In: the body of POST /v1/messages. Out: the body of the equivalent chat completion, and its reply as
a message, a stream of events or an error in Anthropic's format. Reasoning becomes a thinking block
without a signature. Blocks other than text and tool use are rejected, except thinking blocks of
earlier turns, which are dropped: the session has recorded them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from areal.agents.streams import Completion, PartEncoder, ReplyHead, WireEvent
from areal.api.json_text import dumps, loads_written
from areal.openai.parsing.parser import Content, Event, Reasoning, ToolCall
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
    return {
        **_head(done.head),
        **_stop(done),
        "content": [_block(part) for part in done.parts],
        "usage": _usage(done.head, done.reply["usage"]["completion_tokens"]),
    }


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


def _head(head: ReplyHead) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.call.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _usage(head: ReplyHead, output_tokens: int) -> dict[str, int]:
    return {"input_tokens": head.prompt_tokens, "output_tokens": output_tokens}


def _stop(done: Completion) -> dict[str, str | None]:
    if done.finish_reason == "stop" and done.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": done.stop_string}
    reason = _STOP_REASONS.get(done.finish_reason, done.finish_reason)
    return {"stop_reason": reason, "stop_sequence": None}


def _block(part: Event) -> dict[str, Any]:
    match part:
        case Reasoning():
            return {"type": "thinking", "thinking": part.text, "signature": ""}
        case Content():
            return {"type": "text", "text": part.text}
    return {**_tool_use(part), "input": _arguments(part.arguments)}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _arguments(text: str) -> dict[str, Any]:
    try:
        arguments = loads_written(text)
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": text}


class MessageEncoder(PartEncoder):
    """A message: a part is a content block."""

    def begin(self) -> list[WireEvent]:
        message = {**_head(self.head), "usage": _usage(self.head, 0)}
        return [{"type": "message_start", "message": message}]

    def opened(self, event: Event) -> Iterator[WireEvent]:
        is_call = isinstance(event, ToolCall)
        block = _tool_use(event) if is_call else _block(type(event)(""))
        yield {"type": "content_block_start", "index": self.index, "content_block": block}

    def delta(self, event: Event) -> Iterator[WireEvent]:
        match event:
            case Reasoning():
                yield self._delta("thinking_delta", thinking=event.text)
            case Content():
                yield self._delta("text_delta", text=event.text)
            case ToolCall():
                yield self._delta(
                    "input_json_delta", partial_json=dumps(_arguments(event.arguments))
                )

    def closed(self, part: Event, *, is_cut: bool) -> Iterator[WireEvent]:
        if isinstance(part, Reasoning):
            yield self._delta("signature_delta", signature="")
        yield {"type": "content_block_stop", "index": self.index}

    def finish(self, done: Completion) -> list[WireEvent]:
        usage = _usage(self.head, done.reply["usage"]["completion_tokens"])
        last = {"type": "message_delta", "delta": _stop(done), "usage": usage}
        return [*self.close_part(), last, {"type": "message_stop"}]

    def fail(self, error: WireError) -> list[WireEvent]:
        return [error_of(error)]

    def _delta(self, kind: str, **content: str) -> WireEvent:
        delta = {"type": kind, **content}
        return {"type": "content_block_delta", "index": self.index, "delta": delta}
