"""The parser of a stream: no cut changes its result, no text is lost, and time is linear."""

from __future__ import annotations

import re

import pytest
from growth import assert_linear
from hypothesis import given
from hypothesis import strategies as st
from written_output import MARKED, TOOLS, WRITERS, parse, pushed, result

from areal.openai.parsing.formats import TOOL_FORMATS
from areal.openai.parsing.parser import (
    REASONING_PARSERS,
    Content,
    OutputParser,
    Reasoning,
    ToolCall,
    parse_output,
)

CALLS = [write("add", {"a": 1, "text": "ü"}) for write in WRITERS.values()]
PIECES = sorted(
    {piece for call in CALLS for piece in re.findall(r"<[^>]*>|\[[A-Z_]+\]|\W|\w+", call)}
)
STRANGE = ["<think>", "</think>", "[THINK]", "[/THINK]", "NaN", "1e999", "9" * 400, "[" * 300]
STRANGE += [r"\ud83d", "\ud83d", "\0", "\\", '"', "'", "`", "\x1b", "\u2028", " ", "\n\n"]

texts = st.lists(
    st.one_of(*map(st.sampled_from, (CALLS, PIECES, STRANGE)), st.text(max_size=4)), max_size=10
).map("".join)
formats = st.sampled_from(sorted(TOOL_FORMATS))
options = st.fixed_dictionaries(
    {
        "tools": st.sampled_from([TOOLS, TOOLS, TOOLS, []]),
        "reasoning": st.sampled_from(REASONING_PARSERS),
        "in_reasoning": st.booleans(),
    }
)


@given(texts, formats, options, st.lists(st.integers(1, 40), max_size=40))
def test_any_cut_of_any_text_gives_the_same_result(text, name, options, sizes):
    whole = result(parse_output(text, name, **options))
    assert result(pushed(text, name, 1, **options)) == whole
    parser, events = OutputParser(name, **options), []
    for size in sizes:
        events += parser.push(text[:size])
        text = text[size:]
    events += [*parser.push(text), *parser.finish()]
    said = {
        kind: "".join(e.text for e in events if type(e) is kind) for kind in (Content, Reasoning)
    }
    assert (said[Content], said[Reasoning]) == whole[:2]
    assert [event.name for event in events if type(event) is ToolCall] == [n for n, _ in whole[2]]


_MARKS = sorted({m for f in TOOL_FORMATS.values() for m in f.marks(has_tools=True)}, key=len)
_LOST = re.compile(r"\s|" + "|".join(map(re.escape, _MARKS[::-1])))


@given(texts, formats, options)
def test_no_text_is_lost(text, name, options):
    parser = OutputParser(name, **options)
    events = [*parser.push(text), *parser.finish()]
    if any(isinstance(event, ToolCall) for event in events):
        return
    kept = "".join(event.text for event in events)
    if TOOL_FORMATS[name].is_harmony:  # the names of channels are marks too
        shown = iter(text)
        assert all(letter in shown for letter in kept if not letter.isspace())
    else:
        assert _LOST.sub("", kept) == _LOST.sub("", text)
    if (
        options["reasoning"] == "none"
        and not TOOL_FORMATS[name].sections
        and name
        not in (
            "gpt-oss",
            "openai",
        )
    ):
        assert kept == text


words = st.text("abc .", min_size=1, max_size=6).map(lambda text: f"w{text}w")
parts = st.lists(
    st.tuples(st.just("content"), words)
    | st.tuples(st.just("reasoning"), words)
    | st.tuples(st.just("call"), words),
    max_size=8,
)


@given(parts, st.sampled_from(sorted(MARKED)))
def test_an_output_is_taken_apart_as_it_was_put_together(parts, name):
    text, shown = "", {"content": [], "reasoning": [], "call": []}
    for kind, word in parts:
        if kind == "content":
            text += f" {word}\n"
        elif kind == "reasoning":
            text += f"<think>{MARKED[name]('sub', {})}{word}</think>"
            word = MARKED[name]("sub", {}) + word
        else:
            text += MARKED[name]("add", {"text": word})
        shown[kind].append(word)
    content, reasoning, calls = parse(text, name)
    assert content.split() == " ".join(shown["content"]).split()
    assert reasoning == "\n".join(shown["reasoning"])
    assert calls == [("add", {"text": word}) for word in shown["call"]]


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_text_and_reasoning_are_shown_at_once(name):
    parser = OutputParser(name, tools=TOOLS)
    if name == "gpt-oss":
        assert parser.push("<|channel|>analysis<|message|>") == []
    else:
        assert parser.push("<thi") == [] and parser.push("nk>") == []
    assert parser.push("Hm") == [Reasoning("Hm")]
    assert parser.push(", what") == [Reasoning(", what")]
    if name == "gpt-oss":
        assert parser.push("<|end|><|start|>assistant<|channel|>final<|message|>") == []
    else:
        assert parser.push("</think>\n\n") == []
    assert parser.push("Well") == [Content("Well")]
    assert parser.push(", 1 < 2") == [Content(", 1 < 2")]
    assert parser.push("\n[a] {b}") == [Content("\n[a] {b}")]
    if name not in ("llama", "pythonic"):
        events = parser.push(WRITERS[name]("add", {"a": 1}) + " So")
        call, *rest = events
        assert isinstance(call, ToolCall) and call.name == "add"
        assert rest == [Content("\nSo")]
    assert parser.finish() == []


def test_what_may_be_a_call_waits_no_longer_than_needed():
    parser = OutputParser("hermes", tools=TOOLS)
    assert parser.push("ab <tool") == [Content("ab")]
    assert parser.push("box") == [Content(" <toolbox")]
    assert parser.push("<tool_call> x") == [Content("<tool_call> x")]
    parser = OutputParser("llama", tools=TOOLS)
    assert parser.push('{"ans') == []
    assert parser.push('wer": ') == [Content('{"answer":')]
    parser = OutputParser("pythonic", tools=TOOLS)
    assert parser.push("[1") == [Content("[1")]


def test_a_closing_mark_alone_closes_nothing():
    assert parse("a </think> b") == ("a </think> b", "", [])


def test_names_outside_the_tools_are_calls():
    text = '<tool_call>{"name": "other"}</tool_call>'
    assert parse(text) == ("", "", [("other", {})])


HOSTILE = {
    "hermes": ["<tool_call>", '<tool_call>{"a": "', "<think></think>", "\n", "<tool_call>{" * 3],
    "qwen3_coder": ["<function=", "<function=f><parameter=a></parameter>", "<tool_call>"],
    "glm45": ["<tool_call>f<arg_key>", "<tool_call>f<arg_key>a</arg_key><arg_value></arg_value>"],
    "llama": ['{"name":"', '{"name": "f"};', "<|python_tag|>"],
    "pythonic": ["[f(a='", "[f(a=[", "[f(a=1),"],
    "mistral": ["[TOOL_CALLS]", '[TOOL_CALLS]f[ARGS]{"a":"'],
    "deepseek_v3": ["<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜>"],
    "kimi_k2": ["<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"],
    "gpt-oss": ["<|start|>", "<|channel|>commentary to=functions.f<|message|>{"],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_many_openings_take_linear_time(name):
    for unit in HOSTILE[name]:
        assert_linear(lambda text: parse_output(text, name, tools=TOOLS), unit, 20_000)
        assert_linear(lambda text: pushed(text, name, 4, tools=TOOLS), unit, 4_000)
