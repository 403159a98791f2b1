"""Replies of Anthropic's messages API: a chat completion as a message or a stream of events.

Reasoning becomes a thinking block without a signature. Requests are in areal/openai/anthropic.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from areal.agents.completions import Completion, named_event
from areal.api.json_text import dumps, loads_written

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def message_of(done: Completion) -> dict[str, Any]:
    usage, stop_string = done.reply["usage"], done.reply["choices"][0]["stop_reason"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    reason = _STOP_REASONS.get(done.finish_reason, done.finish_reason)
    if stop_string is not None and done.finish_reason == "stop":
        reason = "stop_sequence"
    return {
        **_head(done),
        "content": _blocks_of(done.message),
        "stop_reason": reason,
        "stop_sequence": stop_string,
        "usage": {
            "input_tokens": usage["prompt_tokens"] - cached,  # the others are counted below
            "output_tokens": usage["completion_tokens"],
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
        },
    }


def message_events(done: Completion) -> Iterator[bytes]:
    return map(named_event, _events(done))


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
        "delta": {
            "stop_reason": message["stop_reason"],
            "stop_sequence": message["stop_sequence"],
        },
        "usage": {"output_tokens": usage["output_tokens"]},
    }
    yield {"type": "message_stop"}
