"""OpenAI's responses API, translated to its chat API and back.

In: the body of POST /v1/responses. Out: the body of the equivalent chat completion, and its reply
as a response or an event stream. `previous_response_id` may name an earlier response of the same
session. Tools other than functions are rejected; reasoning items of earlier turns are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Tag

from areal.agents.completions import Completion, named_event
from areal.openai.requests import (
    Arguments,
    Count,
    Sampling,
    ToolChoice,
    WireError,
    parse_body,
)
from areal.utils.http_body import Body, Items, Name, Text

if TYPE_CHECKING:
    from areal.api.interaction import InteractionCache

_SAME = {*Sampling.model_fields, "tool_choice", "chat_template_kwargs"}


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
    usage, cut = done.reply["usage"], done.finish_reason == "length"
    return {
        **_head(done),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(_items(done)),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def response_events(done: Completion) -> Iterator[bytes]:
    for number, event in enumerate(_events(done)):
        yield named_event({**event, "sequence_number": number})


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
            case Message():
                messages.append({"role": item.role, "content": _text(item.content)})
            case FunctionCall():
                # One assistant message is several items: its text, then its tool calls.
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


def _head(done: Completion) -> dict[str, Any]:
    gconfig, asked = done.call.gconfig, done.asked
    return {
        "id": done.reply["id"],
        "object": "response",
        "created_at": done.reply["created"],
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": asked.get("instructions"),
        "max_output_tokens": gconfig.max_new_tokens,
        "metadata": asked.get("metadata") or {},
        "model": done.call.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": asked.get("previous_response_id"),
        "temperature": 0.0 if gconfig.greedy else gconfig.temperature,
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
        "top_p": gconfig.top_p,
        "usage": None,
    }


def _items(done: Completion) -> Iterator[dict[str, Any]]:
    name, calls = done.reply["id"], done.message.get("tool_calls", ())
    if reasoning := done.message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": reasoning}
        yield {
            "id": f"{name}_reasoning",
            "type": "reasoning",
            "summary": [],
            "content": [part],
            "status": "completed",
        }
    if done.message["content"] or not calls:
        part = {"type": "output_text", "text": done.message["content"] or "", "annotations": []}
        yield {
            "id": f"{name}_text",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }
    for i, call in enumerate(calls):
        yield {
            "id": f"{name}_call{i}",
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            **call["function"],
        }


def _events(done: Completion) -> Iterator[dict[str, Any]]:
    yield {"type": "response.created", "response": _head(done)}
    response = response_of(done)
    for index, item in enumerate(response["output"]):
        place = {"output_index": index}
        begun = {**item, "status": "in_progress"}
        begun |= {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield {"type": "response.output_item.added", **place, "item": begun}
        yield from _item_events(item, {**place, "item_id": item["id"]})
        yield {"type": "response.output_item.done", **place, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _item_events(item: dict[str, Any], place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if item["type"] == "function_call":
        kind, text = "response.function_call_arguments", item["arguments"]
        yield {"type": f"{kind}.delta", **place, "delta": text}
        yield {"type": f"{kind}.done", **place, "arguments": text, "name": item["name"]}
        return
    (part,) = item["content"]
    place = {**place, "content_index": 0}
    if item["type"] == "reasoning":
        kind, text = "response.reasoning_text", part["text"]
        yield {"type": f"{kind}.delta", **place, "delta": text}
        yield {"type": f"{kind}.done", **place, "text": text}
        return
    text = {"delta": part["text"], "logprobs": []}
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    yield {"type": "response.output_text.delta", **place, **text}
    yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
    yield {"type": "response.content_part.done", **place, "part": part}
