"""Sampling options: what they refuse, and how they read in OpenAI's words."""

from __future__ import annotations

import pytest

from areal.api.config.inference import GenerationHyperparameters
from areal.openai.requests import parse_chat

EVERYTHING = GenerationHyperparameters(
    n_samples=2,
    max_new_tokens=64,
    min_new_tokens=3,
    max_tokens=512,
    top_p=0.9,
    top_k=40,
    temperature=0.7,
    stop_token_ids=[5],
    ignore_eos=True,
    skip_special_tokens=False,
    stop=["END"],
    frequency_penalty=-1.5,
    presence_penalty=0.5,
    repetition_penalty=1.25,
    min_p=0.125,
    logit_bias={7: -3.0},
    seed=11,
)
UNNAMED = {  # in every interface
    "top_k": 40,
    "repetition_penalty": 1.25,
    "min_p": 0.125,
    "min_new_tokens": 3,
    "max_total_tokens": 512,
    "stop_token_ids": [5],
    "ignore_eos": True,
    "skip_special_tokens": False,
}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"frequency_penalty": 2.5}, "frequency_penalty must lie between -2 and 2, got 2.5"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must lie between -2 and 2"),
        ({"presence_penalty": -3}, "presence_penalty must lie between -2 and 2, got -3"),
        ({"repetition_penalty": 0}, "repetition_penalty must lie in (0, 2], got 0"),
        ({"min_p": float("nan")}, "min_p must lie between 0 and 1"),
        ({"logit_bias": {5: -101}}, "logit_bias must map token ids to numbers between -100 and"),
        ({"logit_bias": {"x": 1}}, "logit_bias must map token ids to numbers between -100 and"),
        ({"stop": ["a", ""]}, "stop must hold texts of at least one character"),
        ({"use_beam_search": True}, "use_beam_search must be false: sampled log-probabilities"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        GenerationHyperparameters(**options)
    assert str(caught.value).startswith(says)


def test_a_copy_has_its_own_lists() -> None:
    options = GenerationHyperparameters(stop=["a"], stop_token_ids=[1], logit_bias={"3": 1.0})
    twin = options.new()
    twin.stop.append("b")
    twin.stop_token_ids.append(2)
    twin.logit_bias["4"] = 1.0
    assert (options.stop, options.stop_token_ids) == (["a"], [1])
    assert options.logit_bias == {"3": 1.0}
    assert options.new(stop=None).stop is None


def test_chat_completions_arguments() -> None:
    assert EVERYTHING.to_openai_completions_args_dict() == {
        "n": 2,
        "max_completion_tokens": 64,
        "temperature": 0.7,
        "top_p": 0.9,
        "frequency_penalty": -1.5,
        "presence_penalty": 0.5,
        "logit_bias": {"7": -3.0},
        "stop": ["END"],
        "seed": 11,
        "extra_body": UNNAMED,
    }


def test_responses_arguments() -> None:
    assert EVERYTHING.new(n_samples=1).to_openai_responses_args_dict() == {
        "max_output_tokens": 64,
        "temperature": 0.7,
        "top_p": 0.9,
        "extra_body": {
            **UNNAMED,
            "frequency_penalty": -1.5,
            "presence_penalty": 0.5,
            "logit_bias": {"7": -3.0},
            "stop": ["END"],
            "seed": 11,
        },
    }


def test_agents_model_settings() -> None:
    assert EVERYTHING.new(n_samples=1).to_openai_agents_model_settings_dict() == {
        "max_tokens": 64,
        "temperature": 0.7,
        "top_p": 0.9,
        "frequency_penalty": -1.5,
        "presence_penalty": 0.5,
        "extra_body": {**UNNAMED, "logit_bias": {"7": -3.0}, "stop": ["END"], "seed": 11},
    }


def test_only_what_is_set_is_sent_and_greedy_is_temperature_0() -> None:
    options = GenerationHyperparameters(greedy=True, temperature=0.7, reward_normalization=True)
    assert options.to_openai_responses_args_dict() == {
        "max_output_tokens": 16384,
        "temperature": 0.0,
        "top_p": 1.0,
    }


def test_what_no_request_can_say_is_refused() -> None:
    group, adapter = EVERYTHING, GenerationHyperparameters(lora_name="mine")
    for convert in (
        group.to_openai_responses_args_dict,
        group.to_openai_agents_model_settings_dict,
    ):
        with pytest.raises(ValueError, match=r"n_samples must be 1.*new\(n_samples=1\).*got 2"):
            convert()
    with pytest.raises(ValueError, match="lora_name must be empty here.*got 'mine'"):
        adapter.to_openai_completions_args_dict()


@pytest.mark.parametrize("options", [EVERYTHING, EVERYTHING.new(greedy=True, temperature=1.0)])
def test_our_own_server_reads_back_what_was_written(options: GenerationHyperparameters) -> None:
    body = options.to_openai_completions_args_dict()
    body |= body.pop("extra_body")  # as the client sends it
    call = parse_chat({"model": "m", "messages": [{"role": "user", "content": "hi"}], **body})
    assert call.gconfig == options
