"""Llama 2 and 3, and models that keep its architecture and name (SmolLM2): optional biases, scaled
rope.
"""

from __future__ import annotations

from areal.models.common.decoder import Decoder
from areal.models.common.state_dict_adapter import (
    DENSE_FROM_HF,
    OUT_BIAS_FROM_HF,
    QKV_BIAS_FROM_HF,
    StateDictAdapter,
)
from areal.models.family_args import LlamaModelArgs
from areal.models.spec import ModelSpec


class LlamaStateDictAdapter(StateDictAdapter):
    from_hf_map = {
        **DENSE_FROM_HF,
        **QKV_BIAS_FROM_HF,
        **OUT_BIAS_FROM_HF,
        "model.layers.{}.mlp.gate_proj.bias": "layers.{}.feed_forward.w1.bias",
        "model.layers.{}.mlp.down_proj.bias": "layers.{}.feed_forward.w2.bias",
        "model.layers.{}.mlp.up_proj.bias": "layers.{}.feed_forward.w3.bias",
    }


class LlamaModel(Decoder):
    adapter_class = LlamaStateDictAdapter


SPEC = ModelSpec(
    name="Llama",
    model_class=LlamaModel,
    model_args_class=LlamaModelArgs,
    state_dict_adapter_class=LlamaStateDictAdapter,
    supported_model_types=frozenset({"llama"}),
)
