"""A chat completion as server-sent events.

The engine answers whole, so the reply is known when the stream begins: the agent's interaction is
recorded before its first event, and a client that leaves in the middle changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from areal.agents.completions import Completion
from areal.api.json_text import dumps
from areal.openai import chat_chunk, usage_chunk


def chat_events(done: Completion) -> Iterator[bytes]:
    for chunk in _chunks(done):
        yield f"data: {dumps(chunk)}\n\n".encode()
    yield b"data: [DONE]\n\n"


def named_event(event: dict[str, Any]) -> bytes:
    """An event that says its type twice, as Anthropic's clients and those of /v1/responses want."""
    return f"event: {event['type']}\ndata: {dumps(event)}\n\n".encode()


def _chunks(done: Completion) -> Iterator[dict[str, Any]]:
    reply, choice = done.reply, done.reply["choices"][0]
    place = (done.call, reply["id"], reply["created"])
    yield chat_chunk(*place, 0, {"role": "assistant", "content": ""})
    if done.message["content"]:
        delta = {"content": done.message["content"]}
        yield chat_chunk(*place, 0, delta, logprobs=choice["logprobs"])
    for index, call in enumerate(done.message.get("tool_calls", ())):
        yield chat_chunk(*place, 0, {"tool_calls": [{"index": index, **call}]})
    yield chat_chunk(*place, 0, {}, finish_reason=done.finish_reason)
    if done.call.include_usage:
        yield usage_chunk(*place, reply["usage"])
