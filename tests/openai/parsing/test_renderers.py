"""The same outputs, read by package `renderers`, which has parsers of its own for most families."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import byte_tokenizer
from tokenizers import AddedToken
from written_output import TOOLS, WRITERS, parse

from areal.openai.parsing.formats import TOOL_FORMATS

pytestmark = pytest.mark.slow
parsing = pytest.importorskip(
    "renderers.parsing", reason="compares with package renderers: pip install renderers"
)

# Ids of marks that a parser of `renderers` asks for.
FAMILIES = {
    "hermes": ("parse_qwen3", {"tool_call": "<tool_call>", "tool_call_end": "</tool_call>",
                               "reasoning_end": "</think>"}),
    "qwen3_coder": ("parse_qwen35", {"think": "<think>", "think_end": "</think>",
                                     "tool_call": "<tool_call>", "tool_call_end": "</tool_call>"}),
    "glm45": ("parse_glm", {"think": "<think>", "think_end": "</think>",
                            "tool_call": "<tool_call>", "tool_call_end": "</tool_call>",
                            "arg_key": "<arg_key>", "arg_key_end": "</arg_key>",
                            "arg_value": "<arg_value>", "arg_value_end": "</arg_value>"}),
    "deepseek_v3": ("parse_deepseek_v3", {"tool_calls_begin": "<｜tool▁calls▁begin｜>",
                                          "tool_calls_end": "<｜tool▁calls▁end｜>",
                                          "tool_call_begin": "<｜tool▁call▁begin｜>",
                                          "tool_call_end": "<｜tool▁call▁end｜>",
                                          "tool_sep": "<｜tool▁sep｜>"}),
    "kimi_k2": ("parse_kimi_k2", {"tool_calls_section_begin": "<|tool_calls_section_begin|>",
                                  "tool_calls_section_end": "<|tool_calls_section_end|>",
                                  "tool_call_begin": "<|tool_call_begin|>",
                                  "tool_call_argument_begin": "<|tool_call_argument_begin|>",
                                  "tool_call_end": "<|tool_call_end|>"}),
    "gpt-oss": ("parse_gpt_oss", {"start": "<|start|>", "channel": "<|channel|>",
                                  "message": "<|message|>", "constrain": "<|constrain|>",
                                  "end": "<|end|>", "call": "<|call|>", "return": "<|return|>"}),
    "llama": ("parse_llama_3", {}),
}  # fmt: skip


def tokenizer_of(name: str):
    """Every mark of the family is one token, as in its models."""
    tokenizer = byte_tokenizer()
    marks = {*FAMILIES[name][1].values(), *TOOL_FORMATS[name].marks(has_tools=True)}
    if name in ("deepseek_v3", "kimi_k2"):
        marks -= {"<think>", "</think>"}  # plain text there
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    return tokenizer


TOKENIZERS = {name: tokenizer_of(name) for name in FAMILIES}


def theirs(text: str, name: str):
    function, marks = FAMILIES[name]
    tokenizer = TOKENIZERS[name]
    options = {f"{key}_id": tokenizer.convert_tokens_to_ids(mark) for key, mark in marks.items()}
    if name != "gpt-oss":
        options["stop_ids"] = {tokenizer.eos_token_id}
    if name in ("qwen3_coder", "glm45"):
        options["tools"] = TOOLS
    ids = tokenizer.encode(text, add_special_tokens=False)
    parsed = getattr(parsing, function)(tokenizer, ids, **options)
    calls = [(call.name, call.arguments) for call in parsed.tool_calls if call.status == "ok"]
    # For GLM it keeps the white space around both.
    return parsed.content.strip(), (parsed.reasoning_content or "").strip(), calls


words = st.text("abc.,:{}[]\"'\\<>ü 1", min_size=1, max_size=8).map(str.strip).filter(bool)
arguments = st.fixed_dictionaries(
    {}, optional={"a": st.integers(-99, 99), "text": words, "items": st.lists(words | st.none())}
)
calls = st.lists(st.tuples(st.sampled_from(["add", "sub"]), arguments), max_size=3)


def written(name: str, reasoning: str, content: str, calls) -> str:
    """In the family's own order: reasoning, content, calls."""
    if name == "gpt-oss":
        head = "<|start|>assistant<|channel|>"
        texts = [f"{head}analysis<|message|>{reasoning}<|end|>"] if reasoning else []
        if content:
            texts.append(f"{head}commentary<|message|>{content}<|end|>")
        return "".join([*texts, *(WRITERS[name](*call) for call in calls)])
    if name == "llama":
        return WRITERS[name](*calls[0]) if calls else content
    body = "\n".join(WRITERS[name](*call) for call in calls)
    if name in ("deepseek_v3", "kimi_k2"):  # one section around all
        begin, end = TOOL_FORMATS[name].sections
        body = body.replace(begin, "").replace(end, "")
        body = f"{begin}{body}{end}" if body else ""
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    return thought + content + body


@given(st.sampled_from(sorted(FAMILIES)), words | st.just(""), words | st.just(""), calls)
def test_renderers_reads_the_same(name, reasoning, content, calls):
    text = written(name, reasoning, content, calls)
    ours = parse(text, name)
    assert ours == theirs(text, name)
    if name != "llama":
        assert ours == (content, reasoning, calls)


# For GLM a call ends the reasoning there; here it never does.
thinking = st.sampled_from(["hermes", "qwen3_coder", "deepseek_v3", "kimi_k2"])


@given(thinking, words, calls.filter(bool))
def test_renderers_makes_no_call_in_reasoning_either(name, reasoning, calls):
    text = written(name, reasoning + written(name, "", "", calls), "Done.", [])
    assert parse(text, name)[1:] == theirs(text, name)[1:]
    assert parse(text, name)[2] == []
