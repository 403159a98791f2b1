"""OpenAI's responses API, translated to its chat API and back.

In: the body of POST /v1/responses. Out: the body of the equivalent chat completion, and its reply
as a response or an event stream. `previous_response_id` may name an earlier response of the same
session. Tools other than functions are rejected; reasoning items of earlier turns are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from areal.agents.completions import Completion, named_event
from areal.openai import WireError

if TYPE_CHECKING:
    from areal.api.interaction import InteractionCache

# Options with the same name in both APIs; the last ones are extensions OpenAI does not have.
_SAME = [
    "model",
    "temperature",
    "top_p",
    "stream",
    "tool_choice",
    "chat_template_kwargs",
    "frequency_penalty",
    "stop",
    "seed",
    "top_k",
    "min_new_tokens",
    "max_total_tokens",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
]
_TEXT_PARTS = ("input_text", "output_text", "text")


def chat_body(body: dict[str, Any], cache: InteractionCache) -> dict[str, Any]:
    chat = {name: body[name] for name in _SAME if name in body}
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if isinstance(body.get("text"), dict) and "format" in body["text"]:
        chat["response_format"] = body["text"]["format"]
    if body.get("tools") is not None:
        tools = _list(body["tools"], "tools")
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    chat["messages"] = [*_earlier(body, cache), *_messages(body.get("input"))]
    if instructions := _text_or_null(body, "instructions"):
        chat["messages"].insert(0, {"role": "system", "content": instructions})
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


def _earlier(body: dict[str, Any], cache: InteractionCache) -> list[dict[str, Any]]:
    """The chat up to and including `previous_response_id`; instructions are not carried over."""
    name = _text_or_null(body, "previous_response_id")
    if name is None:
        return []
    if name not in cache:
        raise WireError(
            400, f"previous_response_id: no {name!r:.60} in this session", "previous_response_id"
        )
    chat = cache[name].whole_chat()
    has_instructions = (cache[name].response or {}).get("instructions") is not None
    return chat[1:] if has_instructions else chat


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(_list(given, "input")):
        _add_item(messages, item, f"input[{i}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    if not isinstance(item, dict):
        raise WireError(400, f"{where}: expected a JSON object, got {item!r:.60}", where)
    match item.get("type", "message"):
        case "message":
            content = _text(item.get("content"), f"{where}.content")
            messages.append({"role": item.get("role"), "content": content})
        case "function_call":
            # One assistant message is several items: its text, then its tool calls.
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = _text(item.get("output"), f"{where}.output")
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            )
        case kind if kind != "reasoning":
            raise WireError(400, f"{where}.type: {kind!r:.60} is not understood here", where)


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = _list(content, where)
    if any(not isinstance(p, dict) or p.get("type") not in _TEXT_PARTS for p in parts):
        raise WireError(400, f"{where}: expected a text or parts of text", where)
    texts = [part.get("text", "") for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise WireError(400, f"{where}: expected a text in every part", where)
    return "".join(texts)


def _text_or_null(body: dict[str, Any], name: str) -> str | None:
    value = body.get(name)
    if not isinstance(value, str | None):
        raise WireError(400, f"{name}: expected a text, got {value!r:.60}", name)
    return value


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise WireError(400, f"{where}.type: expected 'function', got {tool!r:.60}", where)
    function = {name: tool.get(name) for name in ("name", "description", "parameters")}
    present = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": present}


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise WireError(400, f"{where}: expected a text or a list, got {value!r:.60}", where)
    return value


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
