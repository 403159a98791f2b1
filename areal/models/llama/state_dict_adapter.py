"""Names of Llama's weights: the dense table, optional biases of attention and feed-forward."""

from __future__ import annotations

from areal.models.common.state_dict_adapter import (
    DENSE_FROM_HF,
    OUT_BIAS_FROM_HF,
    QKV_BIAS_FROM_HF,
    StateDictAdapter,
)


class LlamaStateDictAdapter(StateDictAdapter):
    from_hf_map = {
        **DENSE_FROM_HF,
        **QKV_BIAS_FROM_HF,
        **OUT_BIAS_FROM_HF,
        "model.layers.{}.mlp.gate_proj.bias": "layers.{}.feed_forward.w1.bias",
        "model.layers.{}.mlp.down_proj.bias": "layers.{}.feed_forward.w2.bias",
        "model.layers.{}.mlp.up_proj.bias": "layers.{}.feed_forward.w3.bias",
    }
