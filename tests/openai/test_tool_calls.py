"""Tool calls in text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.openai.tool_calls import (
    TOOL_PARSERS,
    parse_tool_calls,
    parser_of_template,
    tool_calls_may_begin,
)

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'
SUB = '<tool_call>{"name": "sub", "arguments": {}}</tool_call>'


def functions(calls):
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("just text ", "just text ", []),
        (ADD, None, ["add"]),
        (f"I think.\n{ADD}\n", "I think.", ["add"]),
        (f"{ADD}\n{SUB}", None, ["add", "sub"]),
        (f" a {ADD} b {SUB} c ", " a\nb\nc", ["add", "sub"]),
        ('<tool_call>{"name": "sub"}', None, ["sub"]),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        (f"<tool_call>[]</tool_call>{SUB}", "<tool_call>[]</tool_call>", ["sub"]),
        ("<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
    ],
)
def test_hermes(text, content, names):
    found, calls = parse_tool_calls(text)
    assert found == content
    assert [name for name, _ in functions(calls)] == names
    assert parse_tool_calls(text, "qwen")[0] == content


def test_arguments_are_json_in_a_text():
    _, calls = parse_tool_calls(ADD)
    assert functions(calls) == [("add", {"a": 1, "b": "ü"})]
    assert "ü" in calls[0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', None, ["add"]),
        ('<|python_tag|>{"name": "a"}; {"name": "b"}\n', None, ["a", "b"]),
        ('{"answer": 3}', '{"answer": 3}', []),
        ('{"name": "a"} and more', '{"name": "a"} and more', []),
        ("text", "text", []),
    ],
)
def test_llama(text, content, names):
    found, calls = parse_tool_calls(text, "llama")
    assert found == content
    assert [name for name, _ in functions(calls)] == names


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (f"<think>{ADD}</think>done", f"<think>{ADD}</think>done", []),
        (f"<think>{ADD}</think>\n{SUB}", f"<think>{ADD}</think>", ["sub"]),
        (f"<think>{ADD} and no end", f"<think>{ADD} and no end", []),
        (f"a <think>{ADD}</think> b {SUB} c", f"a <think>{ADD}</think> b\nc", ["sub"]),
        (f"{SUB}<think>{ADD}</think>{SUB}", f"<think>{ADD}</think>", ["sub", "sub"]),
        (f"{SUB}<think>{ADD}", f"<think>{ADD}", ["sub"]),
        (f"</think>{SUB}", "</think>", ["sub"]),  # it closes nothing
        (f"<tool_call> <think> </tool_call>{SUB}", f"<tool_call> <think> </tool_call>{SUB}", []),
        ('<tool_call>{"name": "<think>"}</tool_call>' + SUB, None, ["<think>", "sub"]),
    ],
)
def test_a_call_in_reasoning_is_not_made(text, content, names):
    found, calls = parse_tool_calls(text)
    assert found == content and [name for name, _ in functions(calls)] == names


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (f"I could {ADD}</think>\n\n{SUB}", f"I could {ADD}</think>", ["sub"]),
        (f"I could {ADD}", f"I could {ADD}", []),
        (f"no</think>{ADD}<think>{SUB}</think>", "no</think>\n<think>" + SUB + "</think>", ["add"]),
    ],
)
def test_an_output_that_begins_in_reasoning(text, content, names):
    found, calls = parse_tool_calls(text, in_reasoning=True)
    assert found == content and [name for name, _ in functions(calls)] == names


LLAMA = '{"name": "add", "parameters": {}}'


@pytest.mark.parametrize(
    ("text", "in_reasoning", "content", "names"),
    [
        (f"<think>{LLAMA}</think>", False, f"<think>{LLAMA}</think>", []),
        (f"<think>hm</think>\n{LLAMA}", False, "<think>hm</think>", ["add"]),
        (f"<think>{LLAMA}", False, f"<think>{LLAMA}", []),
        (LLAMA, True, LLAMA, []),
        (f"{LLAMA}</think> {LLAMA}", True, f"{LLAMA}</think>", ["add"]),
    ],
)
def test_reasoning_before_calls_of_llama(text, in_reasoning, content, names):
    found, calls = parse_tool_calls(text, "llama", in_reasoning=in_reasoning)
    assert found == content and [name for name, _ in functions(calls)] == names


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (r'{"a": "\ud83d"}', {"a": "\ufffd"}),
        (r'{"a": "\ude00\ud83d\ude00"}', {"a": "\ufffd\U0001f600"}),
        (r'{"\udfff": "\\ud83d"}', {"\ufffd": r"\ud83d"}),
        ('{"a": "\ud83d"}', {"a": "\ufffd"}),
    ],
)
def test_half_a_character_in_a_call(arguments, read):
    _, calls = parse_tool_calls(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
    assert functions(calls) == [("f", read)]
    calls[0]["function"]["arguments"].encode()


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "9" * 400, "9" * 5000])
def test_a_call_with_a_number_that_no_client_reads_is_text(number):
    call = f'{{"name": "f", "arguments": {{"a": {number}}}}}'
    for parser, text in (("hermes", f"<tool_call>{call}</tool_call>"), ("llama", call)):
        assert parse_tool_calls(text, parser) == (text, [])


def test_many_openings_take_no_quadratic_time():
    text = "<tool_call>{" * 20_000 + "<think></think>" * 20_000
    assert parse_tool_calls(text) == (text, [])


words = st.sampled_from(
    [ADD, SUB, LLAMA, "<tool_call>", "</tool_call>", '{"name": "f"}', "{", " ", "ab"]
    + ["<think>", "</think>", "<think>", "</think>"]
)


@given(st.lists(words | st.text("<tol_ca> x\n", max_size=5), max_size=8), st.booleans(), st.data())
def test_what_a_stream_may_show_is_where_the_content_begins(parts, in_reasoning, data):
    text = "".join(parts)
    for parser in TOOL_PARSERS:
        content, _ = parse_tool_calls(text, parser, in_reasoning=in_reasoning)
        end = data.draw(st.integers(0, len(text)))
        begin = tool_calls_may_begin(text[:end], parser, in_reasoning=in_reasoning)
        assert begin <= end
        assert (content or "").startswith(text[:begin])


@given(st.text(max_size=20), st.sampled_from([ADD, SUB]), st.text(max_size=20), st.booleans())
def test_no_call_is_made_of_what_is_said_in_reasoning(before, call, after, is_closed):
    before, after = before.replace("</think>", ""), after.replace("</think>", "")
    for text, in_reasoning in ((f"<think>{before}", False), (before, True)):
        text += call + after + "</think>" * is_closed
        assert parse_tool_calls(text, in_reasoning=in_reasoning) == (text, [])
        assert tool_calls_may_begin(text, in_reasoning=in_reasoning) >= len(text.rstrip())


@pytest.mark.parametrize(
    ("text", "shown"),
    [("ab", "ab"), ("ab <tool", "ab"), ("ab <tool_call>{", "ab"), ("ab <toolbox", "ab <toolbox")],
)
def test_plain_text_is_shown_at_once(text, shown):
    assert text[: tool_calls_may_begin(text)] == shown


def test_the_parser_follows_the_chat_template():
    assert parser_of_template("... <tool_call>{{ tool_call.name }}</tool_call>") == "hermes"
    assert parser_of_template('{"name": function name, "parameters": dictionary}') == "llama"
    assert parser_of_template(None) == "hermes"
