"""Our decoder against transformers in float32: logits, gradients, and random small configs."""

from __future__ import annotations

import pytest
import torch
from hf_twins import assert_same_gradients, assert_same_logits, twin_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN_ALL = {
    **YARN,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "mscale": 0.8,
    "mscale_all_dim": 0.5,
    "truncate": False,
}
GROUPS = {
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
}
LINEAR = {"rope_type": "linear", "factor": 3.0}

CASES = {
    "qwen2-tied": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2-no-head-dim-key": ("qwen2", {"head_dim": None, "num_key_value_heads": 4}),
    "qwen2-yarn": ("qwen2", {"rope_scaling": YARN}),
    "qwen3-tied": ("qwen3", {}),
    "qwen3-untied": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 24, "num_key_value_heads": 1}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "qwen3-yarn-all-keys": ("qwen3", {"rope_scaling": YARN_ALL}),
    "llama-tied": ("llama", {}),
    "llama-untied-no-gqa": ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3}),
    "llama-linear": ("llama", {"rope_scaling": LINEAR}),
    "llama-linear-old-key": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama-theta": ("llama", {"rope_theta": 500000.0}),
    "moe-dense-layers": ("qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [1]}),
    "moe-every-second": ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2}),
    "moe-weights-as-they-are": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "moe-all-experts": ("qwen3_moe", {"num_experts_per_tok": 4, "tie_word_embeddings": False}),
    "moe-no-head-dim-key": ("qwen3_moe", {"head_dim": None, "attention_bias": True}),
    "deepseek-lite": ("deepseek_v2", {}),
    "deepseek-latent-queries": ("deepseek_v2", {"q_lora_rank": 9, "rms_norm_eps": 1e-2}),
    "deepseek-groups": ("deepseek_v2", {**GROUPS, "first_k_dense_replace": 0}),
    "deepseek-yarn": ("deepseek_v2", {"rope_scaling": YARN_ALL, "v_head_dim": 14}),
    "deepseek-yarn-equal": (
        "deepseek_v2",
        {"rope_scaling": {**YARN_ALL, "mscale_all_dim": 0.8}, "tie_word_embeddings": True},
    ),
    "deepseek-yarn-no-mscale": ("deepseek_v2", {"rope_scaling": YARN}),
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5-untied-bias": (
        "qwen3_5_text",
        {"tie_word_embeddings": False, "attention_bias": True, "linear_num_key_heads": 4},
    ),
    "qwen3.5-interval": (
        "qwen3_5_text",
        {"full_attention_interval": 3, "partial_rotary_factor": 0.25},
    ),
    "qwen3.5-layer-types": (
        "qwen3_5_text",
        {"layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    ),
    "qwen3.5-conv": ("qwen3_5_text", {"linear_conv_kernel_dim": 2, "linear_key_head_dim": 12}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {"num_experts_per_tok": 3}),
    "mistral-window": ("mistral", {}),
    "mistral-all": ("mistral", {"sliding_window": None, "num_key_value_heads": 4}),
    "mistral-tied": ("mistral", {"tie_word_embeddings": True, "sliding_window": 400}),
    "gemma3-pattern": ("gemma3_text", {"num_hidden_layers": 5, "sliding_window_pattern": 2}),
    "gemma3-layer-types": (
        "gemma3_text",
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "gemma3-no-window": ("gemma3_text", {"sliding_window": 400}),
    "gemma3-global-rope": ("gemma3_text", {"rope_scaling": LINEAR, "rope_local_base_freq": 500.0}),
    "gemma3-softcap": ("gemma3_text", {"final_logit_softcapping": 3.0}),
    "gemma3-untied-bias": ("gemma3_text", {"tie_word_embeddings": False, "attention_bias": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_of_packed_sequences_equal_transformers(case):
    family, overrides = CASES[case]
    ours, theirs = twin_models(family, **overrides)
    assert ours.tok_embeddings.weight.std() > 0.1  # else any two models would agree
    assert_same_logits(ours, theirs, lengths=[1, 5, 90, 33, 12])


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen2", {}),
        ("qwen3", {}),
        ("llama", {}),
        ("mistral", {}),
        ("qwen3_moe", {}),
        ("gemma3_text", {}),
        ("deepseek_v2", {**GROUPS, "q_lora_rank": 9}),
        ("qwen3_5_text", {}),
        ("qwen3_5_moe_text", {}),
    ],
)
def test_gradients_equal_transformers(family, overrides):
    # No pad token: transformers stops the gradient of its embedding, and ours has no padding.
    ours, theirs = twin_models(family, pad_token_id=None, **overrides)
    assert_same_gradients(ours, theirs, lengths=[3, 40, 17])


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_small_configs_equal_transformers(data):
    family = data.draw(st.sampled_from(["qwen2", "qwen3", "llama"]))
    kv_heads = data.draw(st.integers(1, 3))
    heads = kv_heads * data.draw(st.integers(1, 3))
    head_dim = data.draw(st.sampled_from([2, 8, 10, 16]))
    overrides = {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        # Only Qwen3 allows heads whose widths do not add up to the model's.
        "hidden_size": data.draw(st.sampled_from([12, 32]))
        if family == "qwen3"
        else heads * head_dim,
        "intermediate_size": data.draw(st.integers(4, 40)),
        "num_hidden_layers": data.draw(st.integers(1, 3)),
        "vocab_size": data.draw(st.integers(5, 80)),
        "tie_word_embeddings": data.draw(st.booleans()),
        "attention_bias": data.draw(st.booleans()),
        "mlp_bias": data.draw(st.booleans()),
        "rope_theta": data.draw(st.sampled_from([1e4, 1e6])),
        "rope_scaling": data.draw(st.sampled_from([None, LINEAR, LLAMA3, YARN])),
    }
    ours, theirs = twin_models(family, **overrides)
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=4))
    assert_same_logits(ours, theirs, lengths)


def test_casting_the_model_does_not_round_the_rope_table():
    model = tiny_model("llama")
    positions = torch.arange(5000)
    exact = model.rope(positions, torch.float32)
    after = model.to(torch.bfloat16).rope(positions, torch.float32)
    assert all(torch.equal(x, y) for x, y in zip(exact, after, strict=True))
    assert model.norm.weight.dtype == torch.bfloat16
