"""Args from config.json: both spellings of rope, defaults of each family, and what is refused."""

from __future__ import annotations

import pytest
from tiny import tiny_config

from areal.models import get_model_spec
from areal.models.common.args import RopeArgs


def args_of(family: str, **overrides):
    config = tiny_config(family, **overrides)
    return get_model_spec(family).model_args_class.from_hf_config(config)


def test_sizes_are_mapped():
    args = args_of("llama", num_key_value_heads=1, rms_norm_eps=1e-5)
    assert (args.dim, args.n_layers, args.n_heads, args.n_kv_heads) == (32, 2, 4, 1)
    assert (args.head_dim, args.hidden_dim, args.vocab_size, args.norm_eps) == (8, 48, 64, 1e-5)


def test_absent_keys_take_the_family_defaults():
    assert args_of("llama", head_dim=None, num_key_value_heads=None).head_dim == 8
    assert args_of("llama", num_key_value_heads=None).n_kv_heads == 4
    assert args_of("qwen3", head_dim=None).head_dim == 128


@pytest.mark.parametrize(
    ("family", "qk_norm", "qkv_bias", "out_bias"),
    [("qwen2", False, True, False), ("qwen3", True, False, False), ("llama", False, False, False)],
)
def test_families_differ_by_norm_and_bias(family, qk_norm, qkv_bias, out_bias):
    args = args_of(family)
    assert (args.qk_norm, args.qkv_bias, args.attention_out_bias) == (qk_norm, qkv_bias, out_bias)


def test_old_and_new_rope_spellings_mean_the_same():
    scaling = {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0}
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **scaling}}
    new = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **scaling}}
    assert RopeArgs.from_hf_config(old) == RopeArgs.from_hf_config(new)
    assert RopeArgs.from_hf_config(new).theta == 5e5


def test_default_rope_ignores_null_scaling():
    assert RopeArgs.from_hf_config({"rope_scaling": None}) == RopeArgs()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor, high"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'.*got 'gelu'"),
        ({"use_sliding_window": True}, "set use_sliding_window to false"),
        ({"quantization_config": {"bits": 4}}, "quantized weights are not supported"),
        ({"num_key_value_heads": 3}, r"\(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"hidden_size": None}, "no 'hidden_size'"),
    ],
)
def test_what_cannot_be_computed_exactly_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        args_of("qwen3", **overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"topk_method": "noaux_tc"}, "topk_method must be .* got 'noaux_tc'"),
        ({"topk_method": "group_limited_greedy"}, "has no n_group, topk_group"),
        (
            {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1},
            "n_group must divide the 8 experts, got 3",
        ),
        (
            {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 1},
            r"hold num_experts_per_tok \(2\) experts, got 1",
        ),
        ({"num_experts_per_tok": None}, "no num_experts_per_tok"),
        ({"num_key_value_heads": 2}, r"num_attention_heads \(4\).* got 2"),
        ({"norm_topk_prob": True}, "norm_topk_prob of a deepseek_v2 must be false"),
        ({"attention_bias": True}, "attention_bias of a deepseek_v2 must be false"),
        ({"first_k_dense_replace": 2}, r"below num_hidden_layers \(2\), got 2"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim must be even"),
        ({"v_head_dim": 15}, r"at most qk_nope_head_dim \+ qk_rope_head_dim \(14\), got 15"),
    ],
)
def test_what_a_deepseek_v2_cannot_be(overrides, message):
    with pytest.raises(ValueError, match=message):
        args_of("deepseek_v2", **overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"layer_types": ["linear_attention"]}, "layer_types must name all 3 layers, got 1"),
        ({"layer_types": ["mamba"] * 3}, r"layer_types must be .* got \['mamba'\]"),
        ({"linear_num_value_heads": 3}, r"linear_num_value_heads \(3\) must be a multiple of"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be at least 2, got 1"),
        ({"attn_output_gate": False}, "attn_output_gate must be true"),
        ({"partial_rotary_factor": 0.4}, "rotates 3 of the 8 dims of a head"),
    ],
)
def test_what_a_qwen3_5_cannot_be(overrides, message):
    with pytest.raises(ValueError, match=message):
        args_of("qwen3_5_text", **overrides)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "num_hidden_layers"])
@pytest.mark.parametrize("value", [0, -8, "64"])
def test_sizes_must_be_positive_numbers(key, value):
    with pytest.raises(ValueError, match=f"{key} {value!r}: expected a positive number"):
        args_of("qwen2", **{key: value})
