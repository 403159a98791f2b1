"""OpenAI's responses API as a reply: a completion as a response or a stream of events.

Requests are in responses_requests.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from areal.openai.errors import WireError, error_body
from areal.openai.parsing import parser
from areal.openai.parsing.parser import Content, Event, ToolCall
from areal.openai.replies import ChatOutput, Completion, ReplyHead, Usage
from areal.openai.requests import ChatCall
from areal.openai.streams import PartEncoder, WireEvent

_ID_PREFIXES = {parser.Reasoning: "rs_", Content: "msg_", ToolCall: "fc_"}


def response_of(done: Completion[ChatCall]) -> dict[str, Any]:
    (output,) = done.outputs
    return _response(done.head, output, done.usage)


def _response(head: ReplyHead[ChatCall], output: ChatOutput, usage: Usage) -> dict[str, Any]:
    is_cut, last = output.finish_reason == "length", len(output.parts) - 1
    return {
        **_head(head),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": [
            _item(head, index, part, is_cut=is_cut and index == last)
            for index, part in enumerate(output.parts)
        ],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _head(head: ReplyHead[ChatCall]) -> dict[str, Any]:
    gconfig, asked = head.call.gconfig, head.asked
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": asked.get("instructions"),
        "max_output_tokens": gconfig.max_new_tokens,
        "metadata": asked.get("metadata") or {},
        "model": head.call.model,
        "output": [],
        "parallel_tool_calls": head.call.parallel_tool_calls,
        "previous_response_id": asked.get("previous_response_id"),
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
        "top_p": gconfig.top_p,
        "usage": None,
    }


def _item(head: ReplyHead[ChatCall], index: int, part: Event, *, is_cut: bool) -> dict[str, Any]:
    """One part of the output; a call is never in parts, so only a text can be cut."""
    status = "incomplete" if is_cut and not isinstance(part, ToolCall) else "completed"
    shared = {"id": _item_id(head, index, part), "status": status}
    match part:
        case parser.Reasoning():
            return {"type": "reasoning", "summary": [], "content": [_text_part(part)], **shared}
        case Content():
            content = [_text_part(part)]
            return {"type": "message", "role": "assistant", "content": content, **shared}
    call = {"call_id": part.id, "name": part.name, "arguments": part.arguments}
    return {"type": "function_call", **call, **shared}


def _item_id(head: ReplyHead[ChatCall], index: int, part: Event) -> str:
    return f"{_ID_PREFIXES[type(part)]}{index}_{head.id}"


def _text_part(part: parser.Reasoning | Content) -> dict[str, Any]:
    if isinstance(part, Content):
        return {"type": "output_text", "text": part.text, "annotations": []}
    return {"type": "reasoning_text", "text": part.text}


class ResponseEncoder(PartEncoder):
    """A response: a part is an output item, of one content part if it is text."""

    def __init__(self, head: ReplyHead[ChatCall]) -> None:
        super().__init__(head)
        self._numbers = itertools.count()

    def begin(self) -> list[WireEvent]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=_head(self.head)) for kind in kinds]

    def opened(self, event: Event) -> Iterator[WireEvent]:
        if isinstance(event, ToolCall):
            empty = {"arguments": ""}
        else:
            event, empty = type(event)(""), {"content": []}
        item = _item(self.head, self.index, event, is_cut=False) | empty
        item["status"] = "in_progress"
        yield self._event("response.output_item.added", output_index=self.index, item=item)
        if not isinstance(event, ToolCall):
            yield self._of_text("response.content_part.added", event, part=_text_part(event))

    def delta(self, event: Event) -> Iterator[WireEvent]:
        match event:
            case parser.Reasoning():
                yield self._of_text("response.reasoning_text.delta", event, delta=event.text)
            case Content():
                text = {"delta": event.text, "logprobs": []}
                yield self._of_text("response.output_text.delta", event, **text)
            case ToolCall():
                yield self._of_item(
                    "response.function_call_arguments.delta", event, delta=event.arguments
                )

    def closed(self, part: Event, *, is_cut: bool) -> Iterator[WireEvent]:
        if isinstance(part, ToolCall):
            call = {"name": part.name, "arguments": part.arguments}
            yield self._of_item("response.function_call_arguments.done", part, **call)
        else:
            is_content = isinstance(part, Content)
            kind = f"response.{'output' if is_content else 'reasoning'}_text.done"
            text = {"text": part.text, **({"logprobs": []} if is_content else {})}
            yield self._of_text(kind, part, **text)
            yield self._of_text("response.content_part.done", part, part=_text_part(part))
        item = _item(self.head, self.index, part, is_cut=is_cut)
        yield self._event("response.output_item.done", output_index=self.index, item=item)

    def ended(self, output: ChatOutput, usage: Usage) -> Iterator[WireEvent]:
        response = _response(self.head, output, usage)
        yield self._event(f"response.{response['status']}", response=response)

    def fail(self, error: WireError) -> list[WireEvent]:
        """The first event makes OpenAI's clients raise; others wait for the second."""
        reason = error_body(error)["error"]
        told = {name: reason[name] for name in ("code", "message", "param")}
        failure = {"code": "server_error", "message": error.message}
        response = {**_head(self.head), "status": "failed", "error": failure}
        return [
            self._event("error", **told, error=reason),
            self._event("response.failed", response=response),
        ]

    def _event(self, kind: str, **content: Any) -> WireEvent:
        return {"type": kind, "sequence_number": next(self._numbers), **content}

    def _of_item(self, kind: str, event: Event, **content: Any) -> WireEvent:
        item_id = _item_id(self.head, self.index, event)
        return self._event(kind, output_index=self.index, item_id=item_id, **content)

    def _of_text(self, kind: str, event: Event, **content: Any) -> WireEvent:
        return self._of_item(kind, event, content_index=0, **content)
