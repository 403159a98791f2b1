"""Grammars of forced tool calls: what they allow is what the parser of the format reads."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest
from tiny_tokenizer import EOS, byte_tokenizer
from tokenizers import AddedToken

from areal.engine.native.grammar import GrammarCompiler
from areal.openai.grammars import reply_grammar
from areal.openai.parsing.formats import TOOL_FORMATS
from areal.openai.parsing.parser import parse_output
from areal.openai.requests import parse_chat

pytest.importorskip("llguidance", reason="constrained output needs the extra `grammar`")

COUNT = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"type": "string", "enum": ["m", "km"]},
        "deep": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["n", "unit"],
    "additionalProperties": False,
}
SAY = {
    "type": "object",
    "properties": {"text": {"type": "string", "maxLength": 5}, "loud": {"type": "boolean"}},
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "count", "parameters": COUNT}},
    {"type": "function", "function": {"name": "say", "parameters": SAY}},
    {"type": "function", "function": {"name": "wait"}},
]
SCHEMAS = {"count": COUNT, "say": SAY, "wait": {"type": "object"}}
CLOSES = {"qwen3_xml": "\n</parameter>\n", "glm47": "</arg_value>\n"}  # after a text
# Qwen adds <tool_call> to its vocabulary and does not call it special.
KINDS = ["text", "added", "special"]
FORMATS = sorted({id(known): name for name, known in TOOL_FORMATS.items()}.values())


def forced(tool_format: str, tools, tokenizer, *, choice="required", parallel=True, **options):
    """The grammar of a reply that has to call one of `tools`."""
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": tools}
    call = parse_chat({**body, "tool_choice": choice, "parallel_tool_calls": parallel})
    return reply_grammar(call, tool_format=tool_format, tokenizer=tokenizer, **options)


def named(tool: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": tool}}


def tokenizer_of(tool_format: str, *, kind: str):
    """With the marks of the format as text, or as tokens of their own, which may be special."""
    tokenizer = byte_tokenizer()
    if kind != "text":
        marks = sorted(TOOL_FORMATS[tool_format].marks(has_tools=True))
        tokenizer.add_tokens([AddedToken(mark, special=kind == "special") for mark in marks])
    return tokenizer


def drawn(tokenizer, grammar, seed: int, close: str = '"') -> str:
    """A random text; where almost any letter can follow, a few of them, then `close`."""
    state, rng = GrammarCompiler(tokenizer, [EOS]).state(grammar), random.Random(seed)
    tokens: list[int] = []
    for _ in range(2000):
        mask = state.allowed(len(tokenizer), frozenset([EOS]))
        assert mask is not None, (state.fault, tokenizer.decode(tokens))
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        written = [rng.choice(allowed)]
        if len(allowed) > 100:
            written = tokenizer.encode(rng.choice(["x", "<", close]), add_special_tokens=False)
        if written == [EOS]:
            return tokenizer.decode(tokens, skip_special_tokens=False)
        state.accept(written)
        assert not state.fault, (state.fault, tokenizer.decode(tokens))
        tokens += written
    raise AssertionError(f"no end: {tokenizer.decode(tokens)[:300]}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tool_format", FORMATS)
def test_every_format_is_read_as_it_is_constrained(tool_format, kind):
    tokenizer = tokenizer_of(tool_format, kind=kind)
    grammar = forced(tool_format, TOOLS[:2], tokenizer)
    names = set()
    for seed in range(8):
        text = drawn(tokenizer, grammar, seed, CLOSES.get(tool_format, '"'))
        found = parse_output(text, tool_format, tools=TOOLS)
        assert found.calls and not found.content.strip(), text
        for call in found.calls:
            names.add(call.name)
            arguments = json.loads(call.arguments)
            if tool_format not in CLOSES:  # a text there has no length
                jsonschema.validate(arguments, SCHEMAS[call.name])
            assert SCHEMAS[call.name]["properties"].keys() >= arguments.keys()
            assert arguments.keys() >= set(SCHEMAS[call.name].get("required", ()))
    assert names == {"count", "say"}


@pytest.mark.parametrize("tool_format", ["hermes", "mistral", "qwen3_coder"])
def test_one_call_of_the_tool_that_is_named(tool_format):
    tokenizer = byte_tokenizer()
    grammar = forced(tool_format, TOOLS, tokenizer, choice=named("count"), parallel=False)
    for seed in range(6):
        (call,) = parse_output(drawn(tokenizer, grammar, seed), tool_format, tools=TOOLS).calls
        assert call.name == "count"


def test_a_tool_without_a_schema_takes_any_object():
    tokenizer = byte_tokenizer()
    grammar = forced("hermes", TOOLS, tokenizer, choice=named("wait"), parallel=False)
    (call,) = parse_output(drawn(tokenizer, grammar, 1), "hermes", tools=TOOLS).calls
    assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("kind", KINDS)
def test_reasoning_that_has_begun_ends_before_the_call(kind):
    tokenizer = tokenizer_of("hermes", kind=kind)
    grammar = forced("hermes", TOOLS[:1], tokenizer, in_reasoning=True, parallel=False)
    state = GrammarCompiler(tokenizer, [EOS]).state(grammar)
    call = '<tool_call>\n{"name": "count", "arguments": {"n": 3, "unit": "km"}}\n</tool_call>'
    text = f"<tool_call> or not?</think>\n\n{call}"
    if kind != "text":
        text = text.replace("<tool_call> or", "or")  # a token of its own is no text
    state.accept(tokenizer.encode(text))
    assert not state.fault
    found = parse_output(text, "hermes", tools=TOOLS, in_reasoning=True)
    assert found.reasoning and [one.name for one in found.calls] == ["count"]
