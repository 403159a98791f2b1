"""Chunks of a streamed choice: joined, they say what the whole reply says.

The events of the three APIs of chats are in tests/agents/test_streaming.py.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer

from areal.openai.replies import (
    ChatOutput,
    ChatReader,
    Completion,
    Output,
    ReplyHead,
    TextReader,
    chat_reply,
    completion_reply,
    usage_of,
)
from areal.openai.requests import parse_chat, parse_completion
from areal.openai.streams import ChatEncoder, TextEncoder
from areal.openai.text_stream import visible_text

TOKENIZER = byte_tokenizer()
TOOL = {"type": "function", "function": {"name": "add"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

texts = st.lists(
    st.sampled_from(
        [CALL, "<tool_call>", "ü ", "STOP", "\n", '{"name": "f"}', "a", "<think>", "</think>"]
    ),
    max_size=8,
).map("".join)
tokens = texts.map(TOKENIZER.encode) | st.lists(st.integers(2, VOCAB_SIZE - 1), max_size=20)
sizes = st.lists(st.integers(1, 5), max_size=20)
reasons = st.sampled_from(["stop", "length"])


def head_of(call, **options):
    return ReplyHead({}, call, "c", 1, [[1]], TOKENIZER, **options)


def chat_reader(call, **options):
    return ChatReader(call, TOKENIZER, stop_ids=[EOS], **{"tool_format": "hermes", **options})


def streamed(encoder, reader, ids, logprobs, sizes, reason):
    """Choices of all chunks, when tokens come in groups of these sizes, the rest at the end."""
    chunks, position = encoder.begin(), 0
    for size in [*sizes, len(ids)]:
        part = slice(position, position + size)
        chunks += encoder.push(reader.push(ids[part]), ids[part], logprobs[part])
        position += size
    chunks += encoder.push(reader.finish(), [], [])
    chunks += encoder.finish(reader.output(ids, logprobs, reason), None)
    return [chunk["choices"][0] for chunk in chunks]


@given(tokens, sizes, reasons, st.booleans(), st.sampled_from([None, ["STOP", "TO"]]))
def test_completion_chunks_join_to_the_reply(ids, sizes, reason, ends, stop):
    call = parse_completion({"model": "m", "prompt": "a", "logprobs": 0, "stop": stop})
    text = visible_text(TOKENIZER, ids, call.gconfig)
    ids = [*ids, EOS] if ends else ids
    logprobs = [-0.5 * i for i in range(len(ids))]
    output = Output(ids, logprobs, reason, text)
    (whole,) = completion_reply(Completion(head_of(call), [output]))["choices"]
    reader = TextReader(call.gconfig, TOKENIZER, stop_ids=[EOS])
    chunks = streamed(TextEncoder(head_of(call)), reader, ids, logprobs, sizes, reason)
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert sum((chunk["logprobs"][name] for chunk in chunks), []) == whole["logprobs"][name]
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [reason]


flags = st.booleans()


@given(tokens, sizes, reasons, flags, flags, flags, st.sampled_from(["hermes", "llama"]))
def test_chat_chunks_join_to_the_reply(
    ids, sizes, reason, has_tools, logprobs, in_reasoning, parser
):
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "logprobs": logprobs}
    call = parse_chat({**body, "tools": [TOOL] if has_tools else None})
    values = [-0.5 * i for i in range(len(ids))]
    options = {"tool_format": parser, "in_reasoning": in_reasoning}
    reader = chat_reader(call, **options)
    reader.push(ids)
    reader.finish()
    output = ChatOutput(ids, values, reason, reader.parts)
    (whole,) = chat_reply(Completion(head_of(call), [output]))["choices"]
    encoder, reader = ChatEncoder(head_of(call)), chat_reader(call, **options)
    chunks = streamed(encoder, reader, ids, values, sizes, reason)
    deltas = [chunk["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant" and deltas[-1] == {}
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert reasoning == whole["message"].get("reasoning_content", "")
    content = "".join(delta.get("content", "") for delta in deltas)
    assert content == (whole["message"]["content"] or "")
    calls = sum((delta.get("tool_calls", []) for delta in deltas), [])
    assert [call["index"] for call in calls] == list(range(len(calls)))
    expected = [call["function"] for call in whole["message"].get("tool_calls", [])]
    assert [call["function"] for call in calls] == expected
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]
    said = [chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"]]
    assert sum(said, []) == (whole["logprobs"]["content"] if logprobs else [])


def test_text_before_a_tool_call_is_not_held_back():
    call = parse_chat({"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]})
    encoder, reader = ChatEncoder(head_of(call)), chat_reader(call)
    ids = TOKENIZER.encode("Well, " + CALL)
    shown = [encoder.push(reader.push([token]), [token], [0.0]) for token in ids]
    *deltas, call = [chunk["choices"][0]["delta"] for chunks in shown for chunk in chunks]
    assert "".join(delta["content"] for delta in deltas) == "Well,"
    assert call["tool_calls"][0]["function"]["name"] == "add"  # before the output is complete


def test_the_usage_comes_once_and_last():
    body = {"messages": [{"role": "user", "content": "a"}], "n": 2, "stream": True}
    call = parse_chat({**body, "stream_options": {"include_usage": True}})
    output, chunks = ChatOutput([5], [0.0], "stop", []), []
    for choice, usage in enumerate([None, usage_of(1, 2)]):
        chunks += ChatEncoder(head_of(call, choice=choice)).finish(output, usage)
    first, second, last = chunks
    assert [chunk["choices"][0]["index"] for chunk in (first, second)] == [0, 1]
    assert first["usage"] is second["usage"] is None
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 3
