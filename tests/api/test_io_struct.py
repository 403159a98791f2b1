"""The travelling values: what they derive, and what they refuse to hold."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from areal.api.alloc_mode import ModelAllocation
from areal.api.io_struct import (
    MAX_GRAMMAR_CHARS,
    FinetuneSpec,
    Grammar,
    HttpGenerationResult,
    ModelRequest,
    ModelResponse,
    ParamSpec,
    StepInfo,
    WeightUpdateMeta,
)

TOKENIZER = SimpleNamespace(eos_token_id=2, pad_token_id=0)


def response(tokens: list[int], stop_reason: str = "stop", tokenizer=TOKENIZER) -> ModelResponse:
    logprobs, versions = [-1.0] * len(tokens), [3] * len(tokens)
    return ModelResponse([5, 6], tokens, logprobs, versions, stop_reason, tokenizer)


def test_request_copy_shares_nothing_that_changes() -> None:
    chat = [{"role": "user", "content": [{"type": "image_url"}]}]
    request = ModelRequest([1, 2], metadata={"a": 1}, image_data=["eA=="], vision_msg_vllm=chat)
    copy = request.copy()
    copy.image_data.append("eQ==")
    copy.vision_msg_vllm[0]["content"].clear()
    assert (request.image_data, len(chat[0]["content"])) == (["eA=="], 1)
    copy.input_ids.append(3)
    copy.metadata["a"] = 2
    copy.gconfig.stop_token_ids.append(9)
    assert request.input_ids == [1, 2]
    assert request.metadata == {"a": 1}
    assert request.gconfig.stop_token_ids == []
    assert copy.rid == request.rid
    assert ModelRequest(input_ids=[1]).rid != request.rid


def test_a_listener_belongs_to_one_call_in_this_process():
    request = ModelRequest([1, 2], on_tokens=lambda tokens, logprobs: None)
    for other in (request.copy(), pickle.loads(pickle.dumps(request))):
        assert other.on_tokens is None and other == request
    assert request.on_tokens is not None


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "grammar: expected exactly one of json_schema, regex, lark, got none"),
        ({"regex": "a", "lark": "b"}, "grammar: expected exactly one of .*, got regex, lark"),
        ({"json_schema": "{}"}, "grammar.json_schema: expected an object, got '{}'"),
        ({"regex": 3}, "grammar.regex: expected a text, got 3"),
        ({"regex": "\ud83d"}, "grammar.regex: a lone surrogate"),
        ({"lark": "a" * (MAX_GRAMMAR_CHARS + 1)}, "grammar.lark: expected at most"),
        ({"json_schema": {"minimum": float("nan")}}, "grammar.json_schema: not JSON"),
        ({"json_schema": {"enum": [{1}]}}, "grammar.json_schema: not JSON"),
    ],
)
def test_a_grammar_is_one_text(fields, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        Grammar(**fields)


def test_a_grammar_has_a_kind_and_a_text() -> None:
    assert (Grammar(regex="").kind, Grammar(regex="").text) == ("regex", "")
    schema = Grammar(json_schema={"type": "string"})
    assert (schema.kind, schema.text) == ("json_schema", '{"type":"string"}')
    assert ModelRequest([1], grammar=schema).copy().grammar == schema


def test_response_strips_the_stop_tokens_at_its_end_only() -> None:
    reply = response([7, 2, 8, 2, 0])
    assert (reply.input_len, reply.output_len, reply.end_with_stop) == (2, 5, True)
    assert reply.output_tokens_without_stop == [7, 2, 8]
    assert response([7, 8], "length").output_tokens_without_stop == [7, 8]


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (response([7, 8]), "does not end with EOS or PAD"),
        (response([2, 0]), "nothing but stop tokens"),
        (response([7], tokenizer=None), "no tokenizer"),
    ],
)
def test_response_refuses_to_guess(reply: ModelResponse, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _ = reply.output_tokens_without_stop


def test_every_output_token_has_logprob_and_version() -> None:
    with pytest.raises(ValueError, match="one length"):
        ModelResponse([1], [2, 3], [-1.0], [0, 0], "length")


def test_versioned_folder_lies_beside_the_last() -> None:
    meta = WeightUpdateMeta.from_disk("/run/weights").with_version(3)
    assert (meta.path, meta.version) == ("/run/weights/weight_update_v3", 3)
    assert meta.with_version(4).path == "/run/weights/weight_update_v4"
    assert WeightUpdateMeta(type="direct").with_version(2).path == ""


def test_step_info_turns_over_at_the_end_of_an_epoch() -> None:
    step = StepInfo(epoch=0, epoch_step=0, global_step=0, steps_per_epoch=2).next()
    assert (step.epoch, step.epoch_step, step.global_step) == (0, 1, 1)
    step = step.next()
    assert (step.epoch, step.epoch_step, step.global_step) == (1, 0, 2)


def test_finetune_spec_counts_whole_batches() -> None:
    spec = FinetuneSpec(total_train_epochs=3, dataset_size=10, train_batch_size=4)
    assert (spec.steps_per_epoch, spec.total_train_steps) == (2, 6)
    assert FinetuneSpec(3, 10, 4, max_train_steps=5).total_train_steps == 5


def test_param_size_is_in_bytes() -> None:
    assert ParamSpec("w", (2, 3), "bfloat16").size == 12
    assert ParamSpec("scale", (), "float32").size == 4


def test_weights_by_xccl_know_their_receiver_and_need_no_folder() -> None:
    receiver = ModelAllocation.from_str("sglang:d2t2")
    for build in (WeightUpdateMeta.from_fsdp_xccl, WeightUpdateMeta.from_megatron_xccl):
        meta = build(receiver, nccl_master_port=29500).with_version(4)
        assert (meta.type, meta.version, meta.path) == ("xccl", 4, "")
        assert meta.gen_allocation.parallel.world_size == 4


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: WeightUpdateMeta(type="awex"), "unknown weight transport 'awex', expected one"),
        (lambda: WeightUpdateMeta.from_awex(), "awex is not part of areal: use from_fsdp_xccl"),
        (lambda: WeightUpdateMeta(type="xccl"), "gen_allocation: xccl needs"),
        (
            lambda: WeightUpdateMeta.from_disk("/w", use_lora=True, lora_name=""),
            "use_lora: adapters travel with a lora_name",
        ),
    ],
)
def test_an_update_that_nothing_can_do_is_refused(build, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build()


@pytest.mark.parametrize(
    ("logprobs", "says"),
    [
        ([-0.1], "one per output token, got 1 for 2"),
        ([-0.1, float("nan")], "finite numbers of at least -1000, got nan"),
        ([-0.1, -9999.0], "finite numbers of at least -1000, got -9999"),
        ([-0.1, 0.5], "at or below 0 .rounding: 0.001., got 0.5"),
        ([-0.1, True], "expected a list of numbers"),
    ],
)
def test_a_reply_that_cannot_be_trained_on_is_refused(logprobs: list[float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        HttpGenerationResult([7, 8], logprobs, "stop")
