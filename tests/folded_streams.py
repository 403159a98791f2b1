"""Streams of the three APIs, folded to the replies that clients make of them.

Only what the deltas say counts; what an event repeats of them is checked against that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from areal.api.json_text import loads
from areal.openai.apis import CHAT_APIS
from areal.openai.replies import ChatReader, Completion, ReplyHead
from areal.openai.requests import parse_chat

Events = list[dict[str, Any]]


def events_of(data: bytes | str) -> Events:
    """The JSON of server-sent events; pings, comments and [DONE] left out."""
    text = data.decode() if isinstance(data, bytes) else data
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    events = [loads(line) for line in lines if line != "[DONE]"]
    return [event for event in events if event.get("type") != "ping"]


def folded_chat(events: Events) -> dict[str, Any]:
    first, *_ = events
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    calls, logprobs, reason, stop, usage = [], [], None, None, None
    for chunk in events:
        assert (chunk["id"], chunk["object"]) == (first["id"], "chat.completion.chunk")
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            assert reason is None, "a chunk after the last one"
            delta = choice["delta"]
            message["content"] += delta.get("content", "")
            if "reasoning_content" in delta:
                thought = message.get("reasoning_content", "")
                message["reasoning_content"] = thought + delta["reasoning_content"]
            for call in delta.get("tool_calls", ()):
                assert call.pop("index") == len(calls)
                calls.append(call)
            logprobs += (choice["logprobs"] or {"content": []})["content"]
            reason = choice["finish_reason"]
            stop = choice.get("stop_reason")
    assert first["choices"][0]["delta"]["role"] == "assistant"
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": reason, "stop_reason": stop}
    choice["logprobs"] = {"content": logprobs, "refusal": None} if logprobs else None
    head = {name: first[name] for name in ("id", "created", "model")}
    return {**head, "object": "chat.completion", "choices": [choice], "usage": usage}


def folded_message(events: Events) -> dict[str, Any]:
    start, *middle, end, stop = events
    assert start["type"] == "message_start" and stop == {"type": "message_stop"}
    message, is_open = dict(start["message"]), False
    for event in middle:
        blocks = message["content"]
        if event["type"] == "content_block_start":
            assert not is_open
            blocks.append(dict(event["content_block"]))
            written, is_open = "", True
        assert is_open and event["index"] == len(blocks) - 1
        if event["type"] == "content_block_delta":
            (kind, text), block = list(event["delta"].items())[1], blocks[-1]
            assert event["delta"]["type"].startswith("input_json" if kind[0] == "p" else kind)
            if kind == "partial_json":
                written += text
                block["input"] = json.loads(written)
            else:
                block[kind] += text
        elif event["type"] == "content_block_stop":
            is_open = False
    assert not is_open and end["type"] == "message_delta"
    message["usage"] |= end["usage"]
    return {**message, **end["delta"]}


def folded_response(events: Events) -> dict[str, Any]:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, progress, *middle, last = events
    assert [created["type"], progress["type"]] == ["response.created", "response.in_progress"]
    output: Events = []
    for event in middle:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            output.append(dict(event["item"]))
            assert output[-1]["status"] == "in_progress"
        item = output[-1]
        assert event["output_index"] == len(output) - 1
        assert event.get("item_id", item["id"]) == item["id"]
        if kind == "content_part.added":
            item["content"] = [*item["content"], dict(event["part"])]
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "content_part.done":
            assert event["part"] == item["content"][event["content_index"]]
        elif kind.endswith("_text.done"):
            assert event["text"] == item["content"][event["content_index"]]["text"]
        elif kind == "function_call_arguments.done":
            assert (event["name"], event["arguments"]) == (item["name"], item["arguments"])
        elif kind == "output_item.done":
            item["status"] = event["item"]["status"]
            assert event["item"] == item
    assert last["type"] == f"response.{last['response']['status']}"
    return {**last["response"], "output": output}


FOLDS = {
    "/v1/chat/completions": folded_chat,
    "/v1/messages": folded_message,
    "/v1/responses": folded_response,
}


def completed(
    path: str,
    body: dict[str, Any],
    pieces: Iterable[list[int]],
    tokenizer: Any,
    *,
    stop_reason: str = "stop",
    **options: Any,
) -> tuple[Completion, Events]:
    """What becomes of an output whose tokens arrive in `pieces`: the result, and its stream.

    `options` are those of ChatReader.
    """
    api = CHAT_APIS[path]
    call = parse_chat(api.chat_body(body, None))
    head = ReplyHead(body, call, f"{api.id_prefix}1", 17, [[1] * 5], tokenizer)
    reader, encoder = ChatReader(call, tokenizer, **options), api.encoder(head)
    events, tokens, logprobs = [*encoder.begin()], [], []
    for piece in pieces:
        told = [-0.125 * len(tokens) - 0.5] * len(piece)
        events += encoder.push(reader.push(piece), piece, told)
        tokens, logprobs = tokens + piece, logprobs + told
    events += encoder.push(reader.finish(), [], [])
    done = Completion(head, [reader.output(tokens, logprobs, stop_reason)])
    events += encoder.finish(done.outputs[0], done.usage)
    return done, events_of(api.events.framed(events))
