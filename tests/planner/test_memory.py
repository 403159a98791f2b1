"""Counts against models that are built, memory by hand, and what more devices do to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model
from tiny_vision import tiny_vision_config

from areal.api.config.train_engine import TrainEngineConfig
from areal.engine.native.kv_cache import MIN_STATES, STATES_OF_PREFIX, STATES_OF_SEQUENCE
from areal.engine.native.state_cache import state_bytes
from areal.models import decoder_args
from areal.models.hf_io import build_model
from areal.models.lora import Adapters
from areal.planner.devices import GIB, load_device
from areal.planner.engines import lora_weights
from areal.planner.engines import shape_of as planned_shape
from areal.planner.memory import ServerRank, TrainingRank
from areal.planner.scale import known_models
from areal.planner.shapes import FAMILIES, Shape, UnplannableError
from areal.planner.speed import Layout

H200 = load_device("h200")
VISION_FAMILIES = ("gemma3", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl")
QWEN_1B = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
# In the shapes of a Qwen3.5 2B, with half of its layers.
HYBRID = {
    "model_type": "qwen3_5_text",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "vocab_size": 248320,
    "tie_word_embeddings": True,
}


def shape_of(hf_config: dict, **options) -> Shape:
    return Shape(decoder_args(hf_config, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_counted_as_the_model_has_them(family):
    if family in VISION_FAMILIES:
        model = build_model(tiny_vision_config(family), device="cpu", dtype=torch.float32)
    else:
        model = tiny_model(family)
    shape = Shape(model.args)
    assert shape.num_weights == sum(p.numel() for p in model.parameters())
    for layer, block in enumerate(model.blocks):
        assert shape.block_weights(layer) == sum(p.numel() for p in block.parameters())


@pytest.mark.parametrize("name", known_models())
def test_weights_of_large_models_are_counted_as_they_are_built(name):
    hf_config = known_models()[name]
    model = build_model(hf_config, device="meta", dtype=torch.bfloat16)
    assert shape_of(hf_config).num_weights == sum(p.numel() for p in model.parameters())


def test_critics_have_a_score_in_place_of_the_head():
    untied = QWEN_1B | {"tie_word_embeddings": False}
    shape = shape_of(untied, is_critic=True)
    assert shape_of(untied).num_weights - shape.num_weights == 1536 * (151936 - 1)


@pytest.mark.parametrize("targets", [[], ["q_proj", "v_proj"], ["up_proj"]])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_adapters_are_counted_as_they_are_made(family, targets):
    model = tiny_model(family)
    shape = Shape(model.args)
    Adapters(model, rank=4, alpha=8, target_modules=targets)
    config = TrainEngineConfig(path="m", use_lora=True, lora_rank=4, target_modules=targets)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert lora_weights(config, shape) == trained


def test_a_family_without_counts_is_refused_by_name():
    args = tiny_model("qwen2").args
    object.__setattr__(args, "model_type", "mamba")
    with pytest.raises(UnplannableError, match="'mamba' cannot be planned: known are deepseek_v2"):
        Shape(args)


def test_a_model_of_transformers_alone_cannot_be_planned():
    with pytest.raises(UnplannableError, match="'gpt_neox' is not supported"):
        planned_shape({"model_type": "gpt_neox"})


def test_the_peak_of_one_rank_by_hand():
    # 1,543,714,304 weights: 2 bytes, a master of 4 and two moments of 4 each; gradients of 2, to
    # which several micro-batches add their sum in 4.
    rank = TrainingRank(shape=shape_of(QWEN_1B), device=H200, tokens=32768, mode="full")
    memory = rank.memory("actor")
    library = H200.library_gib * GIB
    assert sum(memory.phases["collect"].values()) == 16 * 1_543_714_304 + library
    several = replace(rank, num_micro_batches=2).memory("actor")
    assert sum(several.phases["collect"].values()) == 20 * 1_543_714_304 + library
    # SGD has one moment, and copies the gradients for it.
    by_sgd = replace(rank, num_moments=1).memory("actor")
    assert sum(by_sgd.phases["collect"].values()) == 16 * 1_543_714_304 + library
    # The loss: 14 bytes a weight; the inputs of 28 blocks, the embedded tokens and the last norm's
    # output; logits of 2048 rows in float32 with gradients in bfloat16; the head's gradient in
    # float32; the hidden states'.
    tokens, dim, vocab = 32768, 1536, 151936
    kept = (28 + 2) * tokens * dim * 2
    head = 2048 * vocab * (4 + 2) + 4 * vocab * dim + tokens * dim * 2
    held = 14 * 1_543_714_304 + library
    assert sum(memory.phases["loss"].values()) == pytest.approx(held + kept + head)


def test_shards_by_hand():
    shape = shape_of(QWEN_1B)
    rank = TrainingRank(
        shape=shape, device=H200, tokens=1, layout=Layout(dp=4), num_micro_batches=2
    )
    held = rank.memory("actor").phases["loss"]
    weights = shape.num_weights
    assert held["weights"] == weights  # 4 bytes of a quarter
    assert held["optimizer"] == 2 * weights
    assert held["gradients"] == weights
    assert held["gathered"] == 2 * (shape.root_weights + 2 * shape.block_weights(0))


def test_adapters_have_no_gradients_of_the_rest():
    rank = TrainingRank(
        shape=shape_of(QWEN_1B), device=H200, tokens=1, trained_weights=1000, mode="full"
    )
    memory = rank.memory("actor")
    assert memory.phases["collect"]["gradients"] == 2 * 1000
    assert memory.phases["collect"]["optimizer"] == (4 + 8 + 2) * 1000


def test_a_server_takes_half_of_what_is_free_for_its_cache():
    shape = shape_of(QWEN_1B)
    server = ServerRank(shape=shape, device=H200, max_running=100_000)
    free = H200.memory_bytes - 2 * shape.num_weights
    token = 2 * 28 * 2 * 128 * 2
    assert server.token_bytes == token
    assert server.pages == 1 + int(free / 2 // (token * 16))
    few = ServerRank(shape=shape, device=H200, max_running=2)
    assert few.pages == 1 + 2 * (32768 // 16 + 1)


def test_a_server_of_recurrent_layers_keeps_states_as_the_engine_does():
    shape = shape_of(HYBRID)
    server = ServerRank(shape=shape, device=H200, num_pages=4000, max_running=64)
    assert server.state_bytes == state_bytes(shape.args, 2) == 9 * (3 * 6144 * 2 + 16 * 128**2 * 4)
    assert server.num_states == 1 + 64 * (STATES_OF_SEQUENCE + STATES_OF_PREFIX)
    assert server.memory("").phases["decode"]["states"] == server.num_states * server.state_bytes
    many = ServerRank(shape=shape, device=H200, max_running=100_000)
    quarter = (H200.memory_bytes - many.weight_bytes) / 4
    assert many.num_states == int(quarter // many.state_bytes)
    assert quarter - many.token_bytes * 32 < many.cache_bytes < quarter + many.token_bytes * 32
    none = ServerRank(shape=shape, device=H200, reserved_bytes=H200.memory_bytes)
    assert none.num_states == MIN_STATES


SIZES = st.sampled_from([1, 2, 4])
LAYOUTS = st.builds(Layout, dp=SIZES, tp=SIZES.filter(lambda n: n < 4), cp=st.just(1))


@settings(max_examples=60, deadline=None)
@given(
    layout=LAYOUTS,
    mode=st.sampled_from(["none", "selective", "compiled", "full"]),
    tokens=st.integers(1, 100_000),
    family=st.sampled_from(["qwen2", "qwen3_moe", "gemma3_text"]),
)
def test_more_data_parallel_ranks_never_need_more_each(layout, mode, tokens, family):
    shape = Shape(tiny_model(family).args)
    both = {"shape": shape, "device": H200, "mode": mode, "tokens": tokens}
    wider = Layout(dp=layout.dp * 2, tp=layout.tp)
    if layout.world == 1:
        return  # its weights are in the dtype of products, shards are float32: another design
    few = TrainingRank(**both, layout=layout).memory("a").peak
    assert TrainingRank(**both, layout=wider).memory("a").peak <= few


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(1, 50_000), more=st.integers(0, 50_000), chunk=st.integers(1, 4096))
def test_more_tokens_never_need_less(tokens, more, chunk):
    both = {"shape": shape_of(QWEN_1B), "device": H200, "logits_chunk": chunk, "mode": "selective"}
    less = TrainingRank(**both, tokens=tokens).memory("a").peak
    assert TrainingRank(**both, tokens=tokens + more).memory("a").peak >= less


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "gemma3_text"])
def test_checkpointing_keeps_less(family):
    shape = Shape(tiny_model(family).args)
    kept = [shape.kept(mode) for mode in ("none", "compiled", "selective", "full")]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[2] > kept[3]
