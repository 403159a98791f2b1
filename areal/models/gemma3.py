"""Gemma 3 (text): sliding-window layers with a full-attention layer every few, one rope for each of
the two kinds, norms before and after attention and feed-forward, scaled by 1 + w.

Checkpoints with a vision tower are of another family: gemma3_vl.py.
"""

from __future__ import annotations

from areal.models.common.decoder import Decoder
from areal.models.common.state_dict_adapter import QK_NORM_DECODER_FROM_HF, StateDictAdapter
from areal.models.family_args import Gemma3ModelArgs
from areal.models.spec import ModelSpec


class Gemma3StateDictAdapter(StateDictAdapter):
    from_hf_map = {
        **QK_NORM_DECODER_FROM_HF,
        "model.layers.{}.post_attention_layernorm.weight": "layers.{}.attention_out_norm.weight",
        "model.layers.{}.pre_feedforward_layernorm.weight": "layers.{}.ffn_norm.weight",
        "model.layers.{}.post_feedforward_layernorm.weight": "layers.{}.ffn_out_norm.weight",
    }


class Gemma3Model(Decoder):
    adapter_class = Gemma3StateDictAdapter


SPEC = ModelSpec(
    name="Gemma3",
    model_class=Gemma3Model,
    model_args_class=Gemma3ModelArgs,
    state_dict_adapter_class=Gemma3StateDictAdapter,
    supported_model_types=frozenset({"gemma3_text"}),
)
