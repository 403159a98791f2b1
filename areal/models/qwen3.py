"""Qwen3, dense and mixture of experts: RMS norm on the heads of queries and keys, biases on all
four projections by `attention_bias`, experts in the layers that `decoder_sparse_step` and
`mlp_only_layers` leave to them.
"""

from __future__ import annotations

from areal.models.common.decoder import Decoder
from areal.models.common.state_dict_adapter import (
    EXPERTS_FROM_HF,
    QK_NORM_DECODER_FROM_HF,
    StateDictAdapter,
)
from areal.models.family_args import Qwen3ModelArgs
from areal.models.spec import ModelSpec

_EXPERT_BIAS = "model.layers.{}.mlp.expert_bias"


class Qwen3StateDictAdapter(StateDictAdapter):
    from_hf_map = {
        **QK_NORM_DECODER_FROM_HF,
        **EXPERTS_FROM_HF,
        _EXPERT_BIAS: "layers.{}.feed_forward.router.expert_bias",
    }
    optional = frozenset({_EXPERT_BIAS})  # balancing may start from a checkpoint without it


class Qwen3Model(Decoder):
    adapter_class = Qwen3StateDictAdapter


SPEC = ModelSpec(
    name="Qwen3",
    model_class=Qwen3Model,
    model_args_class=Qwen3ModelArgs,
    state_dict_adapter_class=Qwen3StateDictAdapter,
    supported_model_types=frozenset({"qwen3", "qwen3_moe"}),
)
