"""Names of Qwen3's weights: the dense table, QK norms, optional biases, experts."""

from __future__ import annotations

from areal.models.common.state_dict_adapter import (
    DENSE_FROM_HF,
    EXPERTS_FROM_HF,
    OUT_BIAS_FROM_HF,
    QK_NORM_FROM_HF,
    QKV_BIAS_FROM_HF,
    StateDictAdapter,
)

_EXPERT_BIAS = "model.layers.{}.mlp.expert_bias"


class Qwen3StateDictAdapter(StateDictAdapter):
    from_hf_map = {
        **DENSE_FROM_HF,
        **QKV_BIAS_FROM_HF,
        **OUT_BIAS_FROM_HF,
        **QK_NORM_FROM_HF,
        **EXPERTS_FROM_HF,
        _EXPERT_BIAS: "layers.{}.feed_forward.router.expert_bias",
    }
    optional = frozenset({_EXPERT_BIAS})  # balancing may begin with a checkpoint that had none
