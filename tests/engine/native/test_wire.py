"""The /generate codec: exact round trips, and for garbage a ValueError that names the field."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import Grammar, ModelRequest
from areal.engine.native.sequence import Finished, GenRequest, Progress
from areal.engine.native.wire import (
    Options,
    Refusal,
    Reply,
    check_supported,
    decode_line,
    decode_requests,
    encode_lines,
    encode_requests,
)

LINE_FIELDS = ["output_tokens", "output_logprobs", "output_versions", "stop_reason", "latency"]
LINE_FIELDS += ["ttft", "refused", "message", "progress"]

gconfigs = st.builds(
    GenerationHyperparameters,
    max_new_tokens=st.integers(10, 10_000),
    min_new_tokens=st.integers(0, 10),
    greedy=st.booleans(),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(1, 1000),
    temperature=st.floats(0.01, 10),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=3),
    ignore_eos=st.booleans(),
    stop=st.none() | st.lists(st.text(min_size=1), max_size=3),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 2),
    min_p=st.floats(0, 1),
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
)
token_ids = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


# Tokens, log-probabilities and versions.
outputs = st.lists(
    st.tuples(
        st.integers(0, 2**63 - 1),
        st.floats(-1000, 0),
        st.integers(0, 10**6),
    )
).map(lambda rows: [list(column) for column in zip(*rows, strict=True)] or [[], [], []])


@given(
    st.lists(
        st.builds(
            GenRequest, st.uuids().map(str), token_ids, gconfigs, progress_tokens=st.integers(0, 99)
        ),
        min_size=1,
    ),
    st.lists(st.none() | outputs),
)
def test_requests_round_trip(requests, drawn):
    for request, output in zip(requests, drawn, strict=False):
        request.so_far = None if output is None else Progress(request.rid, *output)
    assert decode_requests(encode_requests(requests)) == requests


@given(gconfigs, st.lists(st.none() | st.integers(0, 2**62), min_size=1, max_size=9))
def test_a_group_is_one_entry_and_round_trips(gconfig, seeds):
    group = [
        GenRequest(f"r{i}", [5, 7], gconfig.with_seed(seed), group="r0" if len(seeds) > 1 else "")
        for i, seed in enumerate(seeds)
    ]
    alone = GenRequest("alone", [5, 7], gconfig)
    body = encode_requests([*group, alone])
    assert len(json.loads(body)["requests"]) == 2
    assert decode_requests(body) == [*group, alone]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gconfig": {"top_p": 7.0}}, "top_p"),
        ({"input_ids": []}, "input_ids: expected a list that is not empty"),
        ({"further": [{"rid": "b", "seed": "x"}]}, "further[0].seed"),
        (
            {"so_far": {"output_tokens": [], "output_logprobs": [], "output_versions": []}},
            "further: expected none beside so_far",
        ),
    ],
)
def test_a_bad_group_is_refused_for_each_of_its_samples(change, message):
    entry = {"rid": "a", "input_ids": [1], "further": [{"rid": "b", "seed": 3}], **change}
    refusals = decode_requests(json.dumps({"requests": [entry]}).encode())
    assert [one.rid for one in refusals] == ["a", "b"]
    assert all(isinstance(one, Refusal) and message in one.message for one in refusals)


def test_a_group_has_no_rid_twice():
    entry = {"rid": "a", "input_ids": [1], "further": [{"rid": "a"}]}
    with pytest.raises(ValueError, match="given twice"):
        decode_requests(json.dumps({"requests": [entry]}).encode())


@given(outputs, st.sampled_from(["length", "stop", "abort"]))
def test_replies_round_trip_exactly(output, reason):
    reply = Reply(Finished("a", *output, reason), latency=0.5, ttft=0.1)
    results = [reply, Refusal("ü\n", "engine", "why\nso"), Progress("b", *output)]
    lines = encode_lines(results).split(b"\n")
    assert lines.pop() == b""
    assert [decode_line(line) for line in lines] == results


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_experts_travel_as_bytes(dtype):
    routed = (37 * np.arange(5 * 4 * 3) % 250).reshape(5, 4, 3).astype(dtype)
    finished = Finished("a", [5], [-1.0], [0], "stop", routed_experts=routed)
    (line,) = encode_lines([Reply(finished, latency=0.5, ttft=0.1)]).splitlines()
    assert len(line) < 200 + 2 * routed.nbytes
    found = decode_line(line).finished.routed_experts
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, routed)
    request = GenRequest("a", [1], GenerationHyperparameters(), return_routed_experts=True)
    assert decode_requests(encode_requests([request])) == [request]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "AAA"}, "routed_experts.data: expected base64"),
        ({"data": "AAAA"}, "routed_experts.data: expected 4 bytes, got 3"),
        ({"dtype": "float32"}, "routed_experts.dtype: expected"),
        ({"shape": [4]}, "routed_experts.shape: expected"),
        ({"shape": [-1, 2, -2]}, "routed_experts.shape[0]: expected an integer of at least 0"),
    ],
)
def test_malformed_experts_are_refused(change, message):
    routed = {"dtype": "uint8", "shape": [2, 1, 2], "data": "AAAAAA==", **change}
    line = {"rid": "a", "output_tokens": [5], "output_logprobs": [-1.0], "output_versions": [0]}
    line |= {"stop_reason": "stop", "latency": 0.1, "ttft": 0.1, "routed_experts": routed}
    with pytest.raises(ValueError, match=re.escape(message)):
        decode_line(json.dumps(line).encode())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"progress_tokens": -1}, "progress_tokens: expected an integer of at least 0, got -1"),
        ({"progress_tokens": "8"}, "progress_tokens: expected an integer"),
        ({"so_far": [5]}, "so_far: expected a JSON object"),
        ({"so_far": {"output_tokens": ["x"]}}, "so_far.output_tokens[0]: expected a token id"),
    ],
)
def test_what_is_said_of_earlier_tokens_is_checked(more, message):
    body = json.dumps({"requests": [{"rid": "a", "input_ids": [1], **more}]}).encode()
    (refusal,) = decode_requests(body)
    assert isinstance(refusal, Refusal) and message in refusal.message


def test_every_sampling_option_travels():
    of_a_group = {"n_samples", "reward_normalization", "drop_incomplete_group"}
    refused_or_about_text = {"use_beam_search", "skip_special_tokens"}
    assert set(Options.model_fields) | of_a_group | refused_or_about_text == {
        f.name for f in fields(GenerationHyperparameters)
    }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"image_data": ["eA==", "\ud83d"]}, r"image_data\[1\].*base64"),
        ({"vision_msg_vllm": [{"role": "user"}]}, "vision_msg_vllm"),
        (
            {"gconfig": GenerationHyperparameters(lora_name="\ud83d")},
            "gconfig.lora_name.*surrogate",
        ),
        ({"gconfig": GenerationHyperparameters(stop=["\ud83d"])}, "gconfig.stop.*surrogate"),
    ],
)
def test_what_the_engine_cannot_honour_is_refused(change, field):
    check_supported(ModelRequest([1]))
    with pytest.raises(ValueError, match=f"^{field}"):
        check_supported(ModelRequest([1], **change))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(json_schema={"type": "object", "properties": {"ü": {"enum": [1, 0.5, None]}}}),
        Grammar(regex="a|ü\\d"),
        Grammar(lark='start: "a"'),
    ],
)
def test_a_grammar_travels(grammar):
    sent = GenRequest("a", [1], GenerationHyperparameters(), grammar=grammar)
    assert decode_requests(encode_requests([sent])) == [sent]


def test_group_size_is_not_sent():
    gconfig = GenerationHyperparameters(n_samples=8, seed=3)
    (received,) = decode_requests(encode_requests([GenRequest("a", [1], gconfig)]))
    assert received.gconfig == GenerationHyperparameters(seed=3)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, True]}, "input_ids"),
        ({"input_ids": [1, "2"]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [10**5000]}, "body"),  # Python itself refuses to read so many digits
        ({"input_ids": [2**63]}, "input_ids"),
        ({"prompt": "hello"}, "prompt"),
        ({"gconfig": 3}, "gconfig"),
        ({"gconfig": {"tempurature": 1}}, "gconfig.tempurature"),
        ({"gconfig": {"temperature": "hot"}}, "gconfig.temperature"),
        ({"gconfig": {"stop": "END"}}, "gconfig.stop"),
        ({"gconfig": {"stop": ["END", 1]}}, "gconfig.stop"),
        ({"gconfig": {"stop": [""]}}, "stop"),
        ({"gconfig": {"frequency_penalty": 3}}, "frequency_penalty"),
        ({"gconfig": {"temperature": 0}}, "temperature"),
        ({"gconfig": {"temperature": float("inf")}}, "body"),  # `Infinity` is not JSON
        ({"gconfig": {"greedy": 1}}, "gconfig.greedy"),
        ({"gconfig": {"max_new_tokens": 1.5}}, "gconfig.max_new_tokens"),
        ({"gconfig": {"max_new_tokens": True}}, "gconfig.max_new_tokens"),
        ({"gconfig": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"gconfig": {"seed": 2**63}}, "gconfig.seed"),
        ({"gconfig": {"stop_token_ids": [None]}}, "gconfig.stop_token_ids"),
        ({"gconfig": {"n_samples": 8}}, "gconfig.n_samples"),
        ({"grammar": {}}, "grammar: expected exactly one of"),
        ({"grammar": {"regex": "a", "lark": "b"}}, "grammar: expected exactly one of"),
        ({"grammar": {"regex": None}}, "grammar: expected exactly one of"),
        ({"grammar": {"json_schema": "{}"}}, "grammar.json_schema"),
        ({"grammar": {"json_schema": {"minimum": float("nan")}}}, "grammar.json_schema: not JSON"),
        ({"grammar": {"lark": "a" * 300_000}}, "grammar.lark: expected at most"),
        ({"grammar": "a"}, "grammar"),
    ],
)
def test_a_bad_field_is_named_and_spares_the_others(change, field):
    good = {"rid": "good", "input_ids": [1, 2]}
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    body = json.dumps({"requests": [good, {**good, "rid": "bad", **change}]}).encode()
    sys.set_int_max_str_digits(limit)
    if field == "body":
        with pytest.raises(ValueError, match="body: not JSON"):
            decode_requests(body)
        return
    first, second = decode_requests(body)
    assert first == GenRequest("good", [1, 2], GenerationHyperparameters())
    assert isinstance(second, Refusal) and second.rid == "bad" and second.kind == "request"
    assert field in second.message


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"\xff\xfe", "body"),
        (b"[" * 100_000, "body"),
        (b"[]", "body"),
        (b"{}", "requests"),
        (b'{"requests": []}', "requests"),
        (b'{"requests": [{"rid": "a", "input_ids": [1]}], "x": NaN}', "body: not JSON"),
        (b'{"requests": {"a": 1}}', "requests"),
        (b'{"requests": [3]}', r"requests\[0\]: expected a JSON object, got 3"),
        (b'{"requests": [{"rid": "a"}, {"rid": ""}]}', r"requests\[1\].rid"),
        (b'{"requests": [{"rid": "a"}, {"rid": "a"}]}', "given twice"),
    ],
)
def test_requests_that_cannot_be_told_apart(body, field):
    with pytest.raises(ValueError, match=field):
        decode_requests(body)


@given(st.binary(max_size=60))
def test_any_bytes_give_a_value_error_only(body):
    for decode in (decode_requests, decode_line):
        with pytest.raises(ValueError, match=r"^(body|line|requests)"):
            decode(body)


@given(
    st.dictionaries(
        st.sampled_from(["rid", "input_ids", "gconfig", "x"]),
        json_values
        | st.just("rid")
        | st.just([1])
        | st.dictionaries(st.sampled_from([*Options.model_fields, "n_samples"]), json_values),
    )
)
def test_any_request_is_read_or_refused(entry):
    try:
        (result,) = decode_requests(json.dumps({"requests": [entry]}).encode())
    except ValueError as err:
        assert str(err).startswith(("requests[0]", "body: not JSON"))  # NaN is not JSON
    else:
        assert isinstance(result, GenRequest | Refusal)


@given(
    st.fixed_dictionaries(
        {"rid": st.just("a")},
        optional={
            "output_tokens": json_values | st.just([1, 2]),
            "output_logprobs": json_values | st.just([-1.0, -2.0]),
            "output_versions": json_values | st.just([0, 0]),
            "stop_reason": json_values | st.just("stop"),
            "latency": json_values,
            "ttft": json_values,
            "refused": json_values,
            "message": json_values,
        },
    )
)
def test_any_line_is_read_or_refused(content):
    try:
        result = decode_line(json.dumps(content).encode())
    except ValueError as err:
        named = re.split(r"[:,.\[]", str(err))[0]
        assert named in LINE_FIELDS or str(err).startswith("line: not JSON")  # NaN is not JSON
    else:
        assert isinstance(result, Reply | Refusal)
