"""Which models the CUDA kernels compute; the others run in plain torch on any device."""

from __future__ import annotations

import pytest
from tiny import tiny_model

from areal.engine.native.make_runner import kernels_take


@pytest.mark.parametrize(
    ("family", "overrides", "taken"),
    [
        ("qwen2", {"head_dim": 16}, True),
        ("qwen3", {"head_dim": 64}, True),
        ("llama", {"head_dim": 16, "mlp_bias": True}, True),
        ("llama", {"head_dim": 8}, True),
        ("llama", {"head_dim": 48}, True),
        ("qwen3_moe", {"head_dim": 16}, True),
        ("deepseek_v2", {}, True),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
            True,
        ),
        ("gemma3_text", {"head_dim": 16, "final_logit_softcapping": 30.0}, True),
        ("qwen3_5_text", {"linear_key_head_dim": 16, "linear_value_head_dim": 128}, True),
        ("qwen3_5_text", {"linear_key_head_dim": 24, "linear_value_head_dim": 128}, False),
        ("qwen3_5_moe_text", {"linear_key_head_dim": 16, "linear_value_head_dim": 16}, True),
        ("qwen3_5_moe_text", {"linear_key_head_dim": 24, "linear_value_head_dim": 16}, False),
    ],
)
def test_the_kernels_take_all_but_recurrent_layers_of_odd_heads(family, overrides, taken):
    assert kernels_take(tiny_model(family, **overrides)) == taken
