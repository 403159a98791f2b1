"""Replies of OpenAI's responses API: a chat completion as a response or a stream of events.

Requests are in areal/openai/responses.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from areal.agents.completions import Completion, named_event


def response_of(done: Completion) -> dict[str, Any]:
    usage, cut = done.reply["usage"], done.finish_reason == "length"
    return {
        **_head(done),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(_items(done)),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def response_events(done: Completion) -> Iterator[bytes]:
    for number, event in enumerate(_events(done)):
        yield named_event({**event, "sequence_number": number})


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
        "parallel_tool_calls": done.call.parallel_tool_calls,
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
