"""Replies and chunks, as the `openai` package's own types read them."""

from __future__ import annotations

import json

import pytest
from openai.types import Completion as CompletionReply
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tiny_tokenizer import EOS, byte_tokenizer

from areal.openai.parsing.parser import Content
from areal.openai.replies import (
    ChatOutput,
    ChatReader,
    Completion,
    Output,
    ReplyHead,
    chat_chunk,
    chat_logprobs,
    chat_reply,
    completion_chunk,
    completion_logprobs,
    completion_reply,
    usage_chunk,
    usage_of,
)
from areal.openai.requests import parse_chat, parse_completion

TOOL = {"type": "function", "function": {"name": "add"}}
CALL_TEXT = 'Well.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


TOKENIZER = byte_tokenizer()


@pytest.fixture
def tokenizer():
    return TOKENIZER


def chat_call(**fields):
    return parse_chat({"model": "m", "messages": [{"role": "user", "content": "a"}], **fields})


def completed(call, outputs, *, tokens=(5,)):
    """`tokens`: the number of each prompt."""
    prompts = [[1] * count for count in tokens]
    return Completion(ReplyHead({}, call, "c", 17, prompts, TOKENIZER), outputs)


def replied(call, text, stop_reason="stop", **options):
    """The reply to `call` with an output of this text."""
    reader = ChatReader(call, TOKENIZER, tool_format="hermes", stop_ids=[EOS], **options)
    ids = TOKENIZER.encode(text)
    reader.push(ids)
    reader.finish()
    output = ChatOutput(ids, [-0.5] * len(ids), stop_reason, reader.parts)
    return chat_reply(completed(call, [output]))


def test_chat_reply():
    outputs = [
        ChatOutput([10, 11, EOS], [-0.5, -1.0, -0.1], "stop", [Content("hi")]),
        ChatOutput([10], [-0.5], "length", [Content("h")]),
    ]
    reply = chat_reply(completed(chat_call(n=2), outputs))
    typed = ChatCompletion.model_validate(json.loads(json.dumps(reply)), strict=True)
    assert (typed.id, typed.object, typed.created, typed.model) == (
        "c", "chat.completion", 17, "m",
    )  # fmt: skip
    assert [c.message.content for c in typed.choices] == ["hi", "h"]
    assert [c.finish_reason for c in typed.choices] == ["stop", "length"]
    assert [c.index for c in typed.choices] == [0, 1]
    assert typed.choices[0].logprobs is None and typed.choices[0].message.tool_calls is None
    assert (typed.usage.prompt_tokens, typed.usage.completion_tokens) == (5, 4)
    assert typed.usage.total_tokens == 9


def test_tool_calls_of_a_chat():
    (choice,) = replied(chat_call(tools=[TOOL]), CALL_TEXT)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    # Without tools the text is text; cut off by length it is no finished call.
    (choice,) = replied(chat_call(), CALL_TEXT)["choices"]
    assert choice["message"]["content"] == CALL_TEXT and choice["finish_reason"] == "stop"
    (choice,) = replied(chat_call(tools=[TOOL]), CALL_TEXT, "length")["choices"]
    assert choice["finish_reason"] == "length"


def test_reasoning_of_a_chat():
    text = f"Hm.\n</think>\n\n{CALL_TEXT}"
    reply = replied(chat_call(tools=[TOOL]), text, in_reasoning=True)
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Well.")
    assert len(message["tool_calls"]) == 1
    reply = replied(chat_call(), text, in_reasoning=True)
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", CALL_TEXT)


def test_log_probabilities_name_their_tokens(tokenizer):
    ids = [*tokenizer.encode("aü"), *tokenizer.encode("😀"), EOS]
    assert len(ids) == 1 + 1 + 4 + 1
    content = chat_logprobs(tokenizer, ids, [-0.5] * 7)["content"]
    assert [entry["token"] for entry in content[:2]] == ["a", "ü"]
    assert bytes(sum((entry["bytes"] for entry in content[1:6]), [])) == "ü😀".encode()
    assert content[6]["token"] == "<|eos|>"
    output = ChatOutput(ids, [-0.5] * 7, "stop", [Content("aü😀")])
    reply = chat_reply(completed(chat_call(logprobs=True), [output]))
    typed = ChatCompletion.model_validate(reply, strict=True)
    assert [entry.logprob for entry in typed.choices[0].logprobs.content] == [-0.5] * 7


def test_completion_reply(tokenizer):
    call = parse_completion({"model": "m", "prompt": ["a", "b"], "logprobs": 0})
    ids = tokenizer.encode("he the")
    outputs = [Output(ids, [-0.25] * len(ids), "abort", "he the"), Output([], [], "stop", "")]
    reply = completion_reply(completed(call, outputs, tokens=(1, 1)))
    typed = CompletionReply.model_validate({**reply, "choices": []}, strict=True)
    assert typed.object == "text_completion" and typed.usage.total_tokens == 2 + len(ids)
    first = reply["choices"][0]
    assert first["text"] == "he the" and first["finish_reason"] == "abort"
    logprobs = first["logprobs"]
    assert "".join(logprobs["tokens"]) == "he the"
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert "he the"[offset : offset + len(token)] == token
    later = completion_logprobs(tokenizer, ids, [-1.0] * len(ids), text_offset=5)
    assert later["text_offset"] == [5 + offset for offset in logprobs["text_offset"]]


def test_chunks():
    call = chat_call(stream=True, stream_options={"include_usage": True})
    chunk = chat_chunk(call, "c", 1, 2, {"content": "x"}, finish_reason="stop")
    typed = ChatCompletionChunk.model_validate(chunk, strict=True)
    assert typed.choices[0].index == 2 and typed.choices[0].delta.content == "x"
    assert chunk["usage"] is None
    last = usage_chunk(call, "c", 1, usage_of(3, 4))
    typed = ChatCompletionChunk.model_validate(last, strict=True)
    assert typed.choices == [] and typed.usage.total_tokens == 7
    plain = parse_completion({"model": "m", "prompt": "a", "stream": True})
    chunk = completion_chunk(plain, "c", 1, 0, "x")
    assert "usage" not in chunk and chunk["choices"][0]["text"] == "x"
    assert usage_chunk(plain, "c", 1, usage_of(1, 1))["object"] == "text_completion"
