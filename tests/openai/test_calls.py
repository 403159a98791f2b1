"""Request bodies: any JSON is a call or a WireError that names the field."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.config.inference import GenerationHyperparameters
from areal.openai.errors import WireError, error_body
from areal.openai.requests import (
    ChatCall,
    CompletionCall,
    check_servable,
    parse_chat,
    parse_completion,
    parse_generate,
)

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

NAMES = [
    *("model", "messages", "prompt", "n", "max_tokens", "max_completion_tokens", "min_tokens"),
    *("temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "frequency_penalty"),
    *("stream", "stream_options", "logprobs", "top_logprobs", "tools", "tool_choice", "echo"),
    *("best_of", "logit_bias", "response_format", "chat_template_kwargs", "max_total_tokens"),
]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(10**400)
    | st.floats()
    | st.text(st.characters(exclude_categories=[]), max_size=5)
    | st.sampled_from(["user", "assistant", "tool", "text", "function", "none", "auto"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "function", "name", "tool_calls"])
            | st.sampled_from(["arguments", "parameters", "include_usage"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant"]), "content": st.text(max_size=3)},
        optional={"tool_calls": json_values, "name": json_values},
    ),
    min_size=1,
    max_size=2,
)


@given(json_values)
def test_any_json_is_a_call_or_a_wire_error(body):
    check_parse(parse_chat, ChatCall, body)
    check_parse(parse_completion, CompletionCall, body)


@given(
    st.dictionaries(st.sampled_from(NAMES), json_values, max_size=4),
    messages,
    st.text(min_size=1, max_size=3) | st.lists(st.integers(0, 9), min_size=1, max_size=3),
)
def test_any_field_is_read_or_named(fields, messages, prompt):
    check_parse(parse_chat, ChatCall, {"messages": messages, **fields})
    check_parse(parse_completion, CompletionCall, {"prompt": prompt, **fields})


def check_parse(parse, kind, body):
    try:
        call = parse(body)
    except WireError as err:
        assert err.status == 400
        answer = error_body(err)["error"]
        assert answer["type"] == "invalid_request_error" and len(answer["message"]) < 500
        assert answer["param"] is None or answer["param"].split(".")[0] in answer["message"]
    else:
        assert type(call) is kind


def test_a_plain_chat():
    call = parse_chat({"model": "m", "messages": [USER]})
    assert call == ChatCall(
        model="m",
        messages=[USER],
        tools=[],
        gconfig=GenerationHyperparameters(max_tokens=1 << 30),
        stream=False,
        include_usage=False,
        logprobs=False,
        top_logprobs=0,
    )


def test_every_option_of_a_chat():
    call = parse_chat(
        {
            "model": "m",
            "messages": [USER],
            "tools": [TOOL],
            "n": 3,
            "max_tokens": 5,
            "max_completion_tokens": 9,
            "max_total_tokens": 100,
            "min_tokens": 2,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "seed": -4,
            "stop": "END",
            "stop_token_ids": [3],
            "ignore_eos": True,
            "skip_special_tokens": False,
            "frequency_penalty": -1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 2,
            "chat_template_kwargs": {"enable_thinking": False},
            "user": "me",
            "metadata": {"a": "b"},
            "presence_penalty": 0,
            "response_format": {"type": "text"},
        }
    )
    assert call.gconfig == GenerationHyperparameters(
        n_samples=3,
        max_new_tokens=9,
        max_tokens=100,
        min_new_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=-4,
        stop=["END"],
        stop_token_ids=[3],
        ignore_eos=True,
        skip_special_tokens=False,
        frequency_penalty=-1.0,
    )
    assert (call.stream, call.include_usage, call.logprobs, call.top_logprobs) == (
        True,
        True,
        True,
        2,
    )
    assert call.tools == [TOOL]
    assert call.chat_template_kwargs == {"enable_thinking": False}
    assert call.extra == {"user": "me", "metadata": {"a": "b"}}


def test_what_gconfig_sends_is_what_is_read():
    gconfig = GenerationHyperparameters(
        n_samples=2,
        max_new_tokens=40,
        min_new_tokens=3,
        max_tokens=99,
        top_k=5,
        top_p=0.5,
        temperature=0.7,
        stop_token_ids=[4],
        ignore_eos=True,
        skip_special_tokens=False,
        stop=["a", "b"],
        frequency_penalty=0.5,
        seed=3,
    )
    for sent in (gconfig, gconfig.new(greedy=True, temperature=1.0)):
        args = sent.to_openai_completions_args_dict()
        body = {"messages": [USER], **args.pop("extra_body"), **args}
        assert parse_chat(body).gconfig == sent


def test_null_is_left_out_and_zero_temperature_is_greedy():
    body = {"messages": [USER], "stop": None, "n": None, "stream": None, "max_tokens": None}
    assert parse_chat(body) == parse_chat({"messages": [USER]})
    gconfig = parse_chat({"messages": [USER], "temperature": 0, "top_k": -1}).gconfig
    assert gconfig.greedy and gconfig.temperature == 1.0 and gconfig.top_k > 10**6


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([5, 7], [[5, 7]]),
        ([[5], [7, 8]], [[5], [7, 8]]),
    ],
)
def test_the_kinds_of_prompt(prompt, prompts):
    call = parse_completion({"prompt": prompt})
    assert call.prompt == prompts
    assert call.gconfig.max_new_tokens == 16


def test_log_probabilities_of_completions_are_a_number():
    assert not parse_completion({"prompt": "a"}).logprobs
    call = parse_completion({"prompt": "a", "logprobs": 0})
    assert call.logprobs and call.top_logprobs == 0
    assert parse_completion({"prompt": "a", "logprobs": 3}).top_logprobs == 3


def test_contents_become_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    call = parse_chat(
        {
            "messages": [
                {"role": "user", "content": parts, "name": None},
                {"role": "assistant", "content": None, "tool_calls": [called]},
                {"role": "tool", "content": "3", "tool_call_id": "1"},
            ]
        }
    )
    assert call.messages == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]


def test_tools_that_may_not_be_used_are_not_shown():
    assert parse_chat({"messages": [USER], "tools": [TOOL], "tool_choice": "none"}).tools == []
    assert parse_chat({"messages": [USER], "tools": [TOOL], "tool_choice": "auto"}).tools == [TOOL]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "a list that is not empty"),
        (
            {"messages": [{"role": "robot", "content": ""}]},
            "messages[0].role",
            "'system', 'developer', ",
        ),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "a text or a list of parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].type",
            "'text' or 'image_url'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 5}]}]},
            "messages[0].content[0].image_url",
            "the URL of an image",
        ),
        (
            {
                "messages": [
                    {"role": "system", "content": [{"type": "image_url", "image_url": "x"}]}
                ]
            },
            "messages[0].content",
            "has no images",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "a text"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"n": True}, "n", "an integer"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"temperature": -1}, "temperature", "a number from 0"),
        ({"temperature": float("nan")}, "temperature", "a number"),
        ({"top_p": 0}, "top_p", r"\(0, 1\]"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_new_tokens", "max_new_tokens"),
        ({"seed": 1 << 70}, "seed", "an integer of 64 bits, got an integer beyond 64 bits"),
        ({"stop": ["a", ""]}, "stop", "none empty"),
        ({"stop": ["a"] * 65}, "stop", "at most 64"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "token ids"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"stream_options": {}}, "stream_options", "stream=true"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs=true"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "a text"),
        ({"tool_choice": "required"}, "tool_choice", "no tool to call"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice.function.name",
            "no such tool in tools, got 'sub'",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "function"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", "'function'"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "a final message"),
        ({"continue_final_message": True}, "continue_final_message", "of the assistant"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "numbers from -100 to 100 by token id"),
        ({"logit_bias": {"Paris": 1}}, "logit_bias", "numbers from -100 to 100 by token id"),
        ({"presence_penalty": 3}, "presence_penalty", "a number from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "must lie in"),
        ({"min_p": 2}, "min_p", "a number from 0 to 1"),
        ({"bad_words": ["x"]}, "bad_words", "not supported"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "a JSON object",
        ),
        ({"temprature": 1}, "temprature", "did you mean temperature"),
    ],
)
def test_a_bad_field_is_named(fields, param, message):
    with pytest.raises(WireError, match=message) as caught:
        parse_chat({"messages": [USER], **fields})
    assert caught.value.status == 400 and caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", []]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"echo": True, "stream": True}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 6}, "logprobs"),
    ],
)
def test_a_bad_field_of_a_completion_is_named(fields, param):
    with pytest.raises(WireError) as caught:
        parse_completion({"prompt": "a", **fields})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, "invalid_request_error", None),
        (401, "invalid_request_error", "invalid_api_key"),
        (429, "rate_limit_error", None),
        (503, "server_error", None),
    ],
)
def test_error_bodies(status, kind, code):
    body = error_body(WireError(status, "why", "field"))
    assert body == {"error": {"message": "why", "type": kind, "param": "field", "code": code}}


def test_what_would_take_long_is_refused():
    with pytest.raises(WireError, match="at most 4096 choices of one request, n each, got 8192"):
        parse_completion({"prompt": ["a"] * 64, "n": 128})
    with pytest.raises(WireError, match="100000 unknown options, the first is 'x0'"):
        unknown = {f"x{number}": 1 for number in range(100_000)}
        parse_chat({"messages": [{"role": "user", "content": "a"}], **unknown})


def test_what_needs_a_grammar_is_read():
    body = {"messages": [USER], "tools": [TOOL]}
    named = {"type": "function", "function": {"name": "add"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOL]}}
    for choice, forced in (("required", True), (named, "add"), (allowed, True)):
        call = parse_chat({**body, "tool_choice": choice})
        assert call.forced_tool == forced
    schema = {"type": "object", "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    for asked, read in ((wanted, schema), ({"type": "json_object"}, {"type": "object"})):
        call = parse_chat({"messages": [USER], "response_format": asked})
        assert call.json_schema == read
    check_servable(parse_chat({"messages": [USER], "response_format": {"type": "text"}}))


def test_tools_of_other_kinds_are_left_out():
    kinds = ["web_search", "custom", "code_interpreter", "mcp", "namespace", "computer"]
    tools = [{"type": kind, "name": "x"} for kind in kinds]
    assert parse_chat({"messages": [USER], "tools": [*tools, TOOL]}).tools == [TOOL]
    assert parse_chat({"messages": [USER], "tools": tools}).tools == []


def test_tokens_in_tokens_out():
    body = {"token_ids": [5, 7], "sampling_params": {"max_tokens": 3, "detokenize": False}}
    call = parse_generate({**body, "request_id": "r", "stream": False})
    assert call.prompt == [[5, 7]] and call.gconfig.max_new_tokens == 3 and not call.logprobs
    assert parse_generate({**body, "sampling_params": {"logprobs": 0}}).logprobs
    for fields, param in (
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "a"}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"logit_bias": {"x": 2}}}, "sampling_params.logit_bias"),
        ({"sampling_params": 1}, "sampling_params"),
        ({"stream": True}, "stream"),
    ):
        with pytest.raises(WireError) as caught:
            parse_generate({**body, **fields})
        assert caught.value.param == param
