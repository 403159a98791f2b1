"""OpenAI's responses API, translated to its chat API and back.

In: the body of POST /v1/responses. Out: the body of the equivalent chat completion, and its reply
as a response or a stream of events. `previous_response_id` may name an earlier response of the same
session. Tools other than functions are rejected; reasoning items of earlier turns are dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Tag

from areal.agents.streams import Completion, PartEncoder, ReplyHead, WireEvent
from areal.openai.parsing import parser
from areal.openai.parsing.parser import Content, Event, ToolCall
from areal.openai.requests import (
    Arguments,
    Count,
    Sampling,
    ToolChoice,
    WireError,
    error_body,
    parse_body,
)
from areal.utils.http_body import Body, Items, Name, Text

if TYPE_CHECKING:
    from areal.api.interaction import InteractionCache

_SAME = {*Sampling.model_fields, "tool_choice", "chat_template_kwargs"}
_ID_PREFIXES = {parser.Reasoning: "rs_", Content: "msg_", ToolCall: "fc_"}


class TextPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: Text = ""


Words = Text | Items[TextPart]


class Message(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Words


class FunctionCall(Body):
    type: Literal["function_call"]
    call_id: Any = None
    name: Text
    arguments: Arguments


class FunctionCallOutput(Body):
    type: Literal["function_call_output"]
    call_id: Any = None
    output: Words


class Reasoning(Body):
    type: Literal["reasoning"]


def _kind_of(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else None


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(_kind_of),
]


class Tool(Body):
    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None


class ResponsesBody(Sampling):
    max_output_tokens: Count = None
    instructions: Text | None = None
    input: Text | Items[Item]
    previous_response_id: Text | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    text: Any = None  # its `format`


def chat_body(content: dict[str, Any], cache: InteractionCache) -> dict[str, Any]:
    body = parse_body(ResponsesBody, content)
    chat = body.model_dump(include=_SAME, exclude_none=True)
    if body.max_output_tokens is not None:
        chat["max_completion_tokens"] = body.max_output_tokens
    if isinstance(body.text, dict) and "format" in body.text:
        chat["response_format"] = body.text["format"]
    if body.tools is not None:
        functions = (tool.model_dump(exclude={"type"}, exclude_none=True) for tool in body.tools)
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
    chat["messages"] = [*_earlier(body.previous_response_id, cache), *_messages(body.input)]
    if body.instructions:
        chat["messages"].insert(0, {"role": "system", "content": body.instructions})
    return chat


def response_of(done: Completion) -> dict[str, Any]:
    usage, is_cut = done.reply["usage"], done.finish_reason == "length"
    last = len(done.parts) - 1
    return {
        **_head(done.head),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": [
            _item(done.head, index, part, is_cut=is_cut and index == last)
            for index, part in enumerate(done.parts)
        ],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _earlier(name: str | None, cache: InteractionCache) -> list[dict[str, Any]]:
    """The chat up to and including this response; instructions are not carried over."""
    if name is None:
        return []
    if name not in cache:
        raise WireError(
            400, f"previous_response_id: no {name!r:.60} in this session", "previous_response_id"
        )
    chat = cache[name].whole_chat()
    has_instructions = (cache[name].response or {}).get("instructions") is not None
    return chat[1:] if has_instructions else chat


def _messages(given: str | list[Item]) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for item in given:
        match item:
            case Message(role="assistant") if messages and messages[-1].get("tool_calls"):
                messages[-1]["content"] += _text(item.content)  # the turn has not ended
            case Message():
                messages.append({"role": item.role, "content": _text(item.content)})
            case FunctionCall():
                # One assistant message is several items: texts and tool calls.
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            case FunctionCallOutput():
                result = {"role": "tool", "tool_call_id": item.call_id}
                messages.append({**result, "content": _text(item.output)})
    return messages


def _text(content: Words) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _head(head: ReplyHead) -> dict[str, Any]:
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
        "parallel_tool_calls": True,
        "previous_response_id": asked.get("previous_response_id"),
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
        "top_p": gconfig.top_p,
        "usage": None,
    }


def _item(head: ReplyHead, index: int, part: Event, *, is_cut: bool) -> dict[str, Any]:
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


def _item_id(head: ReplyHead, index: int, part: Event) -> str:
    return f"{_ID_PREFIXES[type(part)]}{index}_{head.id}"


def _text_part(part: parser.Reasoning | Content) -> dict[str, Any]:
    if isinstance(part, Content):
        return {"type": "output_text", "text": part.text, "annotations": []}
    return {"type": "reasoning_text", "text": part.text}


class ResponseEncoder(PartEncoder):
    """A response: a part is an output item, of one content part if it is text."""

    def __init__(self, head: ReplyHead) -> None:
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

    def finish(self, done: Completion) -> list[WireEvent]:
        response = response_of(done)
        return [
            *self.close_part(is_cut=done.finish_reason == "length"),
            self._event(f"response.{response['status']}", response=response),
        ]

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
