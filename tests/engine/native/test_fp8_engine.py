"""An engine in FP8 on the CPU: its tokens are those of a model whose numbers are rounded alike."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model, write_tiny_model

from areal.api.config.inference import GenerationHyperparameters
from areal.engine.native.engine import NativeEngine
from areal.engine.native.inspection import weight_checksums
from areal.engine.native.sequence import Finished, GenRequest
from areal.engine.stored_weights import checksum_as
from areal.models.common.fp8 import FP8, dequantize, quantize_blocks
from areal.models.hf_io import dtype_named
from areal.weight_sync.bucket import checksum_of

PROMPT = [5, 9, 2, 33, 7]


@pytest.fixture
def folder(tmp_path):
    return write_tiny_model(tmp_path / "model", "qwen3")


def generate(engine: NativeEngine) -> Finished:
    options = GenerationHyperparameters(max_new_tokens=12, seed=4, ignore_eos=True)
    engine.add(GenRequest("a", PROMPT, options))
    while engine.has_work:
        for done in engine.step():
            if isinstance(done, Finished):
                return done
    raise AssertionError("no result")


def test_the_name_of_the_config():
    assert (dtype_named("fp8"), dtype_named("bfloat16")) == (FP8, torch.bfloat16)
    assert dtype_named(None) is None


def test_it_draws_by_the_rounded_model_before_and_after_an_update(folder):
    engine = NativeEngine.from_pretrained(folder, dtype=FP8)
    plain = NativeEngine.from_pretrained(folder)
    assert engine.model.embedding_weight.dtype == torch.float32
    assert next(iter(engine.model.blocks)).attention.wq.weight.dtype == FP8
    for version in (0, 1):
        done = generate(engine)
        scores = engine.score([PROMPT + done.output_tokens])[0].logprobs
        assert done.output_logprobs == pytest.approx(scores[-13:-1], abs=1e-5)
        assert done.output_logprobs != pytest.approx(generate(plain).output_logprobs, abs=1e-5)
        assert set(done.output_versions) == {version}
        weights = list(tiny_model("qwen3", seed=1).named_hf_tensors())
        engine.load_weights(weights, version + 1, recompute_kv=True)
    loaded = dict(engine.model.named_hf_tensors())
    name = "model.layers.0.self_attn.q_proj.weight"
    rounded = dequantize(*quantize_blocks(dict(weights)[name], 16), torch.float32)
    assert torch.equal(loaded[name], rounded)


def test_its_checksums_are_those_of_a_trainer_that_rounds_alike(folder):
    engine = NativeEngine.from_pretrained(folder, dtype=FP8)
    shown = weight_checksums(engine)
    own = dict(tiny_model("qwen3").named_hf_tensors())

    def differing() -> list[str]:
        return [
            name for name, one in own.items() if checksum_as(one, shown[name][0]) != shown[name]
        ]

    assert {dtype for dtype, _ in shown.values()} == {"F32", "FP8_16", "FP8_32"}
    assert shown.keys() == own.keys() and differing() == []
    name = "model.layers.1.mlp.down_proj.weight"
    own[name] = own[name].flip(0)
    assert differing() == [name]


def test_a_name_of_blocks_that_do_not_fit_is_no_dtype():
    weight = torch.ones(24, 8)
    for stored in (None, "FP8_16", "FP8_3", "FP8_16\n", "what"):
        assert checksum_as(weight, stored) == checksum_of(weight)
    assert checksum_as(weight, "FP8_8")[0] == "FP8_8"


def test_weights_that_left_the_device_come_back(folder):
    engine = NativeEngine.from_pretrained(folder, dtype=FP8)
    expected = generate(engine)
    engine.offload()
    engine.onload()
    again = generate(engine)
    assert again.output_tokens == expected.output_tokens
    assert again.output_logprobs == expected.output_logprobs


def test_experts_are_refused(tmp_path):
    folder = write_tiny_model(tmp_path / "model", "qwen3_moe")
    with pytest.raises(ValueError, match="dtype fp8: .* has experts; use bfloat16"):
        NativeEngine.from_pretrained(folder, dtype=FP8)
