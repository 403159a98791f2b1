"""Replies of Anthropic's messages API: a chat completion as a message or a stream of events.

Reasoning becomes a thinking block without a signature. Requests are in areal/openai/anthropic.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from areal.agents.streams import Completion, PartEncoder, ReplyHead, WireEvent
from areal.api.json_text import dumps, loads_written
from areal.openai.anthropic import error_of
from areal.openai.errors import WireError
from areal.openai.parsing.parser import Content, Event, Reasoning, ToolCall
from areal.openai.replies import usage_of

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def message_of(done: Completion) -> dict[str, Any]:
    return {
        **_head(done.head),
        **_stop(done),
        "content": [_block(part) for part in done.parts],
        "usage": _usage(done.reply["usage"]),
    }


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


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,  # the others are counted below
        "output_tokens": usage["completion_tokens"],
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


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
        message = {**_head(self.head), "usage": _usage(usage_of(len(self.head.prompt_ids), 0))}
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
        usage = _usage(done.reply["usage"])
        last = {"type": "message_delta", "delta": _stop(done), "usage": usage}
        return [*self.close_part(), last, {"type": "message_stop"}]

    def fail(self, error: WireError) -> list[WireEvent]:
        return [error_of(error)]

    def _delta(self, kind: str, **content: str) -> WireEvent:
        delta = {"type": kind, **content}
        return {"type": "content_block_delta", "index": self.index, "delta": delta}
