"""Names of Qwen3's weights: the dense table, the norms of queries and keys, optional biases."""

from __future__ import annotations

from areal.models.common.state_dict_adapter import (
    DENSE_FROM_HF,
    OUT_BIAS_FROM_HF,
    QKV_BIAS_FROM_HF,
    StateDictAdapter,
)


class Qwen3StateDictAdapter(StateDictAdapter):
    from_hf_map = {
        **DENSE_FROM_HF,
        **QKV_BIAS_FROM_HF,
        **OUT_BIAS_FROM_HF,
        "model.layers.{}.self_attn.q_norm.weight": "layers.{}.attention.q_norm.weight",
        "model.layers.{}.self_attn.k_norm.weight": "layers.{}.attention.k_norm.weight",
    }
