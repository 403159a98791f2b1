"""What is said to vLLM and SGLang for each sampling option, and how their answers are read."""

from __future__ import annotations

import dataclasses

import pytest
from image_prompts import END, IMAGE, START, picture, write_seeing_model

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import Grammar, ModelRequest
from areal.engine.remote.protocol import Draft
from areal.engine.remote.sglang import SGLangProtocol
from areal.engine.remote.stock import continuation, depends_on_start, read_metrics
from areal.engine.remote.vllm import VLLMProtocol

VLLM, SGLANG = VLLMProtocol("unused"), SGLangProtocol("unused")

# option -> (value, what vLLM is told, what SGLang is told); the rest of a payload stays the same.
SAID = {
    "max_new_tokens": (9, {"max_tokens": 9}, {"max_new_tokens": 9}),
    "min_new_tokens": (3, {"min_tokens": 3}, {"min_new_tokens": 3}),
    "greedy": (True, {"temperature": 0.0}, {"temperature": 0.0}),
    "top_p": (0.5, {"top_p": 0.5}, {"top_p": 0.5}),
    "top_k": (4, {"top_k": 4}, {"top_k": 4}),
    "temperature": (0.7, {"temperature": 0.7}, {"temperature": 0.7}),
    "stop_token_ids": ([5, 6], {"stop_token_ids": [5, 6]}, {"stop_token_ids": [5, 6]}),
    "ignore_eos": (True, {"ignore_eos": True}, {"ignore_eos": True}),
    "skip_special_tokens": (False, {"skip_special_tokens": False}, {"skip_special_tokens": False}),
    "stop": (["x"], {"stop": ["x"]}, {"stop": ["x"], "no_stop_trim": True}),
    "frequency_penalty": (0.5, {"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
    "presence_penalty": (0.5, {"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
    "repetition_penalty": (1.5, {"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "min_p": (0.5, {"min_p": 0.5}, {"min_p": 0.5}),
    "logit_bias": ({5: 1.0}, {"logit_bias": {"5": 1.0}}, {"logit_bias": {"5": 1.0}}),
    "seed": (11, {"seed": 11}, {"sampling_seed": 11}),
    "lora_name": ("mine", {"model": "mine"}, {"lora_path": "mine"}),
}
# What no server is told: a group is many requests, `max_tokens` bounds `max_new_tokens` here.
NOT_SAID = {
    "n_samples",
    "max_tokens",
    "use_beam_search",
    "reward_normalization",
    "drop_incomplete_group",
}


def said(protocol, **options):
    """The payload, flat."""
    gconfig = GenerationHyperparameters(**options)
    payload = protocol.generation(ModelRequest([2, 3], gconfig=gconfig)).payload
    return {**payload, **payload.get("sampling_params", {})}


@pytest.mark.parametrize(
    ("grammar", "to_vllm", "to_sglang"),
    [
        (
            Grammar(json_schema={"type": "object"}),
            {"json": {"type": "object"}},
            {"json_schema": '{"type":"object"}'},
        ),
        (Grammar(regex="a|b"), {"regex": "a|b"}, {"regex": "a|b"}),
        (Grammar(lark='start: "a"'), {"grammar": 'start: "a"'}, None),
    ],
)
def test_grammars(grammar, to_vllm, to_sglang):
    request = ModelRequest([2, 3], grammar=grammar)
    plain = VLLM.generation(ModelRequest([2, 3])).payload
    assert VLLM.generation(request).payload == {**plain, "structured_outputs": to_vllm}
    if to_sglang is None:
        with pytest.raises(ValueError, match="^grammar.lark: a SGLang server takes no Lark"):
            SGLANG.generation(request)
        return
    plain = SGLANG.generation(ModelRequest([2, 3])).payload
    sampling = {**plain["sampling_params"], **to_sglang}
    assert SGLANG.generation(request).payload == {**plain, "sampling_params": sampling}


def test_a_grammar_is_sent_again_and_begins_again():
    """A server parses the output of its own request alone."""
    request = ModelRequest([2, 3], grammar=Grammar(regex="a|b"))
    assert continuation(Draft(request, 10)).grammar is request.grammar
    assert depends_on_start(request) and not depends_on_start(ModelRequest([2, 3]))


def test_every_option_is_accounted_for():
    known = {field.name for field in dataclasses.fields(GenerationHyperparameters)}
    assert known == SAID.keys() | NOT_SAID


@pytest.mark.parametrize("option", SAID)
@pytest.mark.parametrize("protocol", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_an_option_changes_what_it_names_and_nothing_else(protocol, option):
    value, to_vllm, to_sglang = SAID[option]
    expected = to_vllm if isinstance(protocol, VLLMProtocol) else to_sglang
    plain, changed = said(protocol), said(protocol, **{option: value})
    difference = {
        name: item
        for name, item in changed.items()
        if name != "sampling_params" and plain.get(name, "absent") != item
    }
    assert difference == expected


@pytest.mark.parametrize("protocol", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_defaults_of_the_model_cannot_change_the_distribution(protocol):
    payload = said(protocol)
    assert payload["temperature"] == 1.0 and payload["top_p"] == 1.0
    assert payload["top_k"] in (0, -1)  # the word of each server for "all"
    assert payload["repetition_penalty"] == 1.0 and payload["min_p"] == 0.0


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    folder = write_seeing_model(tmp_path_factory.mktemp("model"))
    return VLLMProtocol(folder), SGLangProtocol(folder)


CHAT = [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image_url"}]}]
IMAGE_PROMPT = [5, START, *[IMAGE] * 6, END]


def image_request(**changes):
    given = {"image_data": [picture(1)], "vision_msg_vllm": CHAT}
    return ModelRequest(IMAGE_PROMPT, **given | changes)


def test_images_are_sent_in_each_servers_way(seeing):
    vllm, sglang = seeing
    request = image_request()
    for protocol in seeing:
        protocol.check_request(request)
    call = vllm.generation(request)
    assert call.endpoint == "/v1/chat/completions" and "prompt" not in call.payload
    url = f"data:image/png;base64,{picture(1)}"
    assert call.payload["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hi"},
                {"type": "image_url", "image_url": {"url": url}},
            ],
        }
    ]
    call = sglang.generation(request)
    assert call.payload["input_ids"] == [5, START, IMAGE, END]
    assert call.payload["image_data"] == [picture(1)]
    draft = Draft(request, 8)
    assert depends_on_start(request) and continuation(draft).image_data == [picture(1)]


def test_no_server_samples_a_token_that_stands_for_an_image(seeing):
    banned = {str(token): -100.0 for token in (60, 61, 62, 63)}
    for protocol in seeing:
        assert said(protocol)["logit_bias"] == banned
        assert said(protocol, logit_bias={5: 1.0})["logit_bias"] == {"5": 1.0, **banned}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"image_data": ["aGVsbG8="]}, r"image_data\[0\]: the image begins with"),
        ({"image_data": ["https://a/b.png"]}, "not fetched"),
        ({"input_ids": [5]}, "no image token .60"),
    ],
)
def test_images_that_cannot_be_sent_are_refused(seeing, changes, says):
    for protocol in seeing:
        with pytest.raises(ValueError, match=says):
            protocol.check_request(dataclasses.replace(image_request(), **changes))


@pytest.mark.parametrize("chat", [None, [{"role": "user", "content": "hi"}], [*CHAT, *CHAT]])
def test_vllm_needs_the_chat_of_the_images(seeing, chat):
    with pytest.raises(ValueError, match="vision_msg_vllm"):
        seeing[0].check_request(image_request(vision_msg_vllm=chat))


def test_a_server_that_read_another_prompt_is_not_believed(seeing):
    vllm, sglang = seeing
    request = image_request()
    vllm.check_prompt({"prompt_token_ids": IMAGE_PROMPT}, request)
    sglang.check_prompt({"meta_info": {"prompt_tokens": len(IMAGE_PROMPT)}}, request)
    with pytest.raises(ValueError, match="prompt_token_ids"):
        vllm.check_prompt({"prompt_token_ids": [5]}, request)
    with pytest.raises(ValueError, match="prompt_tokens"):
        sglang.check_prompt({"meta_info": {"prompt_tokens": 4}}, request)


def test_a_reply_to_a_chat_is_read(seeing):
    logprobs = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]}
    found = VLLM.read(vllm_answer(message={"content": "ab"}, logprobs=logprobs))
    assert (found.output_tokens, found.output_logprobs) == ([4, 5], [-0.5, -0.25])


def vllm_answer(**changes):
    choice = {
        "token_ids": [4, 5],
        "logprobs": {"token_logprobs": [-0.5, -0.25]},
        "finish_reason": "stop",
    }
    return {"choices": [{**choice, **changes}]}


def sglang_answer(finish, pairs=((-0.5, 4, None), (-0.25, 5, None))):
    return {"meta_info": {"finish_reason": finish, "output_token_logprobs": list(pairs)}}


def test_answers_are_read():
    for result in (
        VLLM.read(vllm_answer()),
        SGLANG.read(sglang_answer({"type": "stop", "matched": 5})),
    ):
        assert result.output_tokens == [4, 5] and result.output_logprobs == [-0.5, -0.25]
        assert result.stop_reason == "stop"
        assert result.cached_tokens == 0, "unless it is told"
    usage = {"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 16}}
    assert VLLM.read({**vllm_answer(), "usage": usage}).cached_tokens == 16
    answer = sglang_answer({"type": "stop", "matched": 5})
    answer["meta_info"]["cached_tokens"] = 16
    assert SGLANG.read(answer).cached_tokens == 16
    answer["meta_info"]["cached_tokens"] = -1
    with pytest.raises(ValueError, match="cached_tokens: expected a count, got -1"):
        SGLANG.read(answer)
    early = VLLM.read(vllm_answer(token_ids=[], logprobs=None, finish_reason="abort"))
    assert early.output_tokens == [] and early.stop_reason == "abort"
    before_prefill = sglang_answer({"type": "abort", "message": "Abort before prefill"}, ())
    assert SGLANG.read(before_prefill).output_tokens == []


@pytest.mark.parametrize(
    ("protocol", "answer"),
    [
        (VLLM, {}),
        (VLLM, vllm_answer(finish_reason="error")),
        (VLLM, vllm_answer(token_ids=[4])),
        (VLLM, vllm_answer(logprobs={"token_logprobs": [-0.5, float("nan")]})),
        (VLLM, vllm_answer(logprobs={"token_logprobs": [-0.5, -9999.0]})),
        (VLLM, vllm_answer(logprobs={"token_logprobs": [-0.5, True]})),
        (VLLM, vllm_answer(logprobs={"token_logprobs": [-0.5, None]})),
        (VLLM, vllm_answer(logprobs={"token_logprobs": [-0.5, 0.25]})),
        (VLLM, vllm_answer(logprobs=None)),
        (VLLM, vllm_answer(token_ids=[4, True])),
        (VLLM, vllm_answer(token_ids=[4, -5])),
        (SGLANG, sglang_answer({"type": "odd"})),
        (SGLANG, sglang_answer({"type": "abort", "status_code": 500, "message": "no"})),
        (SGLANG, sglang_answer({"type": "stop"}, [(float("-inf"), 4, None)])),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused(protocol, answer):
    with pytest.raises((ValueError, KeyError)):
        protocol.read(answer)


def test_metrics_are_summed_over_their_labels():
    text = (
        "# HELP vllm:num_requests_running Number of requests\n"
        'vllm:num_requests_running{engine="0"} 2.0\n'
        'vllm:num_requests_running{engine="1"} 3.0\n'
        'vllm:num_requests_running_bucket{engine="1"} 99\n'
        "vllm:generation_tokens_total 1e3\n"
    )
    names = {"vllm:num_requests_running": "running", "vllm:generation_tokens_total": "tokens"}
    assert read_metrics(text, names) == {"running": 5.0, "tokens": 1000.0}
