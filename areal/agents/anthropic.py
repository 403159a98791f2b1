"""Anthropic's messages API, translated to OpenAI's chat API and back.

In: the body of POST /v1/messages. Out: the body of the equivalent chat completion, and its reply as
a message, an event stream or an error in Anthropic's format. Reasoning becomes a thinking block
without a signature. Blocks other than text and tool use are rejected, except thinking blocks of
earlier turns, which are dropped: the session has recorded them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from areal.agents.completions import Completion, named_event
from areal.api.json_text import dumps, loads_written
from areal.openai import WireError

if TYPE_CHECKING:
    from areal.api.interaction import InteractionCache

_SAME = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "api_error"}
_THOUGHTS = ("thinking", "redacted_thinking")


def chat_body(body: dict[str, Any], cache: InteractionCache) -> dict[str, Any]:
    chat = {name: body[name] for name in _SAME if name in body}
    system = _text(body.get("system"), "system")
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(_list(body.get("messages"), "messages")):
        chat["messages"] += _messages(_object(message, f"messages[{i}]"), f"messages[{i}]")
    if body.get("tools") is not None:
        tools = _list(body["tools"], "tools")
        chat["tools"] = [_tool(_object(tool, f"tools[{i}]")) for i, tool in enumerate(tools)]
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = _object(body["tool_choice"], "tool_choice").get("type", "nothing")
    if body.get("stop_sequences") is not None:
        chat["stop"] = _list(body["stop_sequences"], "stop_sequences")
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


def _messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """One Anthropic message may become several: each tool result is a chat message of its own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise WireError(400, f"{where}.role: expected 'user' or 'assistant', got {role!r:.60}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results, texts, calls = [], [], []
    for i, item in enumerate(_list(content, f"{where}.content")):
        block = _object(item, f"{where}.content[{i}]")
        match block.get("type"):
            case "text":
                texts.append(block)
            case "tool_use" if role == "assistant":
                calls.append(_call(block))
            case "tool_result" if role == "user":
                results.append(_result(block, f"{where}.content[{i}]"))
            case kind if kind not in _THOUGHTS:
                raise WireError(
                    400, f"{where}.content[{i}].type: {kind!r:.60} is not understood here"
                )
    text = _text(texts, f"{where}.content")
    if role == "assistant":
        return [{"role": role, "content": text, **({"tool_calls": calls} if calls else {})}]
    return [*results, *([{"role": role, "content": text}] if texts else [])]


def _call(block: dict[str, Any]) -> dict[str, Any]:
    arguments = dumps(block.get("input") or {})
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content = _text(block.get("content"), f"{where}.content")
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    present = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": present}


def _text(content: Any, where: str) -> str:
    """A text, or blocks of text."""
    if content is None or isinstance(content, str):
        return content or ""
    blocks = [_object(block, where) for block in _list(content, where)]
    if any(not isinstance(block.get("text"), str) for block in blocks):
        raise WireError(400, f"{where}: expected a text or blocks of text")
    return "".join(block["text"] for block in blocks)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise WireError(400, f"{where}: expected a list, got {type(value).__name__}", where)
    return value


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WireError(400, f"{where}: expected a JSON object, got {value!r:.60}", where)
    return value


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
