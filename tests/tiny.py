"""Tiny random models for tests of every package: a Hugging Face config, a module, a folder.

    config = tiny_config("qwen3", vocab_size=50)            # dict, as parsed from a config.json
    model = tiny_model("qwen3", seed=1, vocab_size=50)      # our module, float32, CPU, eval mode
    folder = write_tiny_model(tmp_path / "m", "llama")      # loads in transformers and in areal

Keyword overrides are keys of config.json. Same family, seed and overrides: same bits, always.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SHARED: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    # Ten times the usual spread: logits of a tiny model are then far from uniform, so that a test
    # which compares distributions or greedy tokens can fail.
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}

_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False},
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 8,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_key_value_heads": 4,
        "head_dim": None,
        "kv_lora_rank": 12,
        "q_lora_rank": None,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "routed_scaling_factor": 1.5,
        "topk_method": "greedy",
        "tie_word_embeddings": False,
    },
    "qwen3_5_text": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "num_hidden_layers": 3,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.5,
        # The gated norm divides by the length of what the state returned, which may be tiny: with
        # the usual 1e-6 two orders of the same sums differ in the fourth digit.
        "rms_norm_eps": 1e-2,
        "attention_bias": False,
    },
    "qwen3_5_moe_text": {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "intermediate_size": None,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.5,
        # The gated norm divides by the length of what the state returned, which may be tiny: with
        # the usual 1e-6 two orders of the same sums differ in the fourth digit.
        "rms_norm_eps": 1e-2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 20,
        "attention_bias": False,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 12,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
    },
}


def tiny_config(family: str = "qwen3", **overrides: Any) -> dict[str, Any]:
    """A config.json as a dict."""
    return {"model_type": family, **_SHARED, **_FAMILIES[family], **overrides}


def tiny_model(family: str = "qwen3", seed: int = 0, **overrides: Any):
    """Our module on the CPU in float32, with weights drawn from `seed`."""
    import torch

    from areal.models.hf_io import build_model

    model = build_model(tiny_config(family, **overrides), device="cpu", dtype=torch.float32)
    model.init_weights(seed)
    return model.eval()


def write_tiny_model(
    folder: str | Path, family: str = "qwen3", seed: int = 0, **overrides: Any
) -> Path:
    """Write config.json and safetensors (no tokenizer) into `folder`, made when absent."""
    from areal.models.hf_io import save_hf

    folder = Path(folder)
    model = tiny_model(family, seed, **overrides)
    save_hf(model.named_hf_tensors(), tiny_config(family, **overrides), folder)
    return folder


def draw_score_head(model) -> None:
    """In place of the zeros a critic starts with, so that its trunk has a gradient to compare."""
    import torch

    with torch.no_grad():
        model.score.weight.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(1))
