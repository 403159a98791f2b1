"""Chats as prompt tokens."""

from __future__ import annotations

import pytest
from tiny_tokenizer import IM_START, byte_tokenizer

from areal.openai.errors import WireError
from areal.openai.prompts import chat_prompt_ids, chat_prompt_text
from areal.openai.requests import parse_chat

TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def prompt_text(tokenizer, messages, **fields):
    call = parse_chat({"messages": messages, **fields})
    ids = chat_prompt_ids(tokenizer, call)
    assert ids[0] == IM_START
    assert tokenizer.decode(ids) == chat_prompt_text(tokenizer, call)
    return tokenizer.decode(ids)


def test_messages_and_the_header_of_the_answer(tokenizer):
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hü"}]
    assert prompt_text(tokenizer, messages) == (
        "<|im_start|>system be brief<|im_end|><|im_start|>user hü<|im_end|><|im_start|>assistant "
    )


def test_tools_and_earlier_calls(tokenizer):
    function = {"name": "add", "arguments": '{"a": 1}'}
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "tool_calls": [{"id": "x", "function": function}]},
        {"role": "tool", "content": "3", "tool_call_id": "x"},
    ]
    text = prompt_text(tokenizer, messages, tools=[TOOL])
    assert text.startswith('<|im_start|>tools{"type": "function", "function": {"name": "add"}}')
    assert '<tool_call>add{"a": 1}</tool_call><|im_end|>' in text
    function["arguments"] = "no JSON"
    assert '<tool_call>add"no JSON"</tool_call>' in prompt_text(tokenizer, messages, tools=[TOOL])


def test_variables_of_the_template(tokenizer):
    text = tokenizer.decode(
        chat_prompt_ids(
            tokenizer,
            parse_chat(
                {
                    "messages": [{"role": "user", "content": ""}],
                    "chat_template_kwargs": {"shout": True},
                }
            ),
        )
    )
    assert text.startswith("LOUD")


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "conversation", "return_dict"])
def test_arguments_of_the_renderer_are_not_variables(tokenizer, name):
    body = {"messages": [{"role": "user", "content": ""}], "chat_template_kwargs": {name: "x"}}
    with pytest.raises(WireError, match=f"chat_template_kwargs.{name}"):
        chat_prompt_ids(tokenizer, parse_chat(body))


def test_a_template_that_refuses_and_none_at_all():
    call = parse_chat({"messages": [{"role": "user", "content": "a"}]})
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(WireError, match="roles must alternate") as caught:
        chat_prompt_ids(tokenizer, call)
    assert caught.value.status == 400 and caught.value.param == "messages"
    tokenizer.chat_template = None
    with pytest.raises(WireError, match="no chat template"):
        chat_prompt_ids(tokenizer, call)


# Templates in the manner of those in use: what they refuse, and what they leave out.

TURNS = """{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}
{{- '<|im_start|>' + m.role + ' ' + m.content + '<|im_end|>' }}
{%- endfor %}{{ '<|im_start|>assistant ' }}"""
ALTERNATING = """{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- if m.role != ('user' if loop.index0 % 2 == 0 else 'assistant') %}
{{- raise_exception('roles must alternate') }}{% endif %}
{{- '[' + m.role + ']' + m.content }}
{%- endfor %}{{ '[assistant]' }}"""
FORGETFUL = """{%- if messages[0].role == 'system' %}{{ messages[0].content }}|{% endif %}
{%- for m in messages if m.role != 'system' %}{{ m.role + ':' + m.content + '|' }}{% endfor %}"""
CHAT = [
    {"role": "system", "content": "one"},
    {"role": "developer", "content": "two"},
    {"role": "user", "content": "a"},
    {"role": "system", "content": "three"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "c"},
    {"role": "system", "content": "four"},
    {"role": "user", "content": "d"},
]
FOUR = "<system>\nfour\n</system>"
AB = "a\n\n<system>\nthree\n</system>\n\nb"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            TURNS,
            f"<|im_start|>system one\n\ntwo<|im_end|><|im_start|>user {AB}<|im_end|>"
            f"<|im_start|>assistant c<|im_end|><|im_start|>user {FOUR}\n\nd<|im_end|>"
            "<|im_start|>assistant ",
        ),
        (ALTERNATING, f"[user]one\n\ntwo\n\n{AB}[assistant]c[user]{FOUR}\n\nd[assistant]"),
        (FORGETFUL, f"one\n\ntwo|user:{AB}|assistant:c|user:{FOUR}\n\nd|"),
    ],
    ids=["system first", "no system", "left out"],
)
def test_system_messages_anywhere(template, text):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    assert chat_prompt_text(tokenizer, parse_chat({"messages": CHAT})) == text


def test_a_chat_that_the_template_takes_is_not_changed(tokenizer):
    text = prompt_text(tokenizer, CHAT)
    assert text.count("<|im_start|>system") == 4 and "<system>" not in text


def test_a_final_message_of_the_assistant_is_continued(tokenizer):
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Well, "}]
    text = prompt_text(tokenizer, begun)
    assert text.endswith("<|im_end|><|im_start|>assistant Well, ")
    for options in ({"continue_final_message": False}, {"add_generation_prompt": True}):
        text = prompt_text(tokenizer, begun, **options)
        assert text.endswith("<|im_start|>assistant Well, <|im_end|><|im_start|>assistant ")
