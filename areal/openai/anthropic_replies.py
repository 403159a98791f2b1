"""Anthropic's messages API as a reply: a completion as a message or a stream of events, and errors.

Reasoning becomes a thinking block without a signature. Requests are in anthropic_requests.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from areal.api.json_text import dumps, loads_written
from areal.openai.errors import WireError
from areal.openai.parsing.parser import Content, Event, Reasoning, ToolCall
from areal.openai.replies import ChatOutput, Completion, ReplyHead, Usage, usage_of
from areal.openai.requests import ChatCall
from areal.openai.streams import PartEncoder, WireEvent

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def message_of(done: Completion[ChatCall]) -> dict[str, Any]:
    (output,) = done.outputs
    return {
        **_head(done.head),
        **_stop(output),
        "content": [_block(part) for part in output.parts],
        "usage": _usage(done.usage),
    }


def error_of(error: WireError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    message = error.message
    if error.code == "context_length_exceeded":  # clients know it by these words, and compact
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def _head(head: ReplyHead[ChatCall]) -> dict[str, Any]:
    return {
        "id": head.id,
        "type": "message",
        "role": "assistant",
        "model": head.call.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _usage(usage: Usage) -> dict[str, int]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,  # the others are counted below
        "output_tokens": usage["completion_tokens"],
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def _stop(output: ChatOutput) -> dict[str, str | None]:
    reason = output.finish_reason
    if reason == "stop" and output.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_string}
    return {"stop_reason": _STOP_REASONS.get(reason, reason), "stop_sequence": None}


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

    def ended(self, output: ChatOutput, usage: Usage) -> Iterator[WireEvent]:
        yield {"type": "message_delta", "delta": _stop(output), "usage": _usage(usage)}
        yield {"type": "message_stop"}

    def fail(self, error: WireError) -> list[WireEvent]:
        return [error_of(error)]

    def _delta(self, kind: str, **content: str) -> WireEvent:
        delta = {"type": kind, **content}
        return {"type": "content_block_delta", "index": self.index, "delta": delta}
