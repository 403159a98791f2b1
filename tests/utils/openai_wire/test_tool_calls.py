"""Tool calls in text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.utils.openai_wire import (
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


words = st.sampled_from([ADD, SUB, "<tool_call>", "</tool_call>", '{"name": "f"}', "{", " ", "ab"])


@given(st.lists(words | st.text("<tol_ca> x\n", max_size=5), max_size=6), st.data())
def test_what_a_stream_may_show_is_where_the_content_begins(parts, data):
    text = "".join(parts)
    for parser in TOOL_PARSERS:
        content, _ = parse_tool_calls(text, parser)
        end = data.draw(st.integers(0, len(text)))
        shown = text[: tool_calls_may_begin(text[:end], parser)]
        assert (content or "").startswith(shown)


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
