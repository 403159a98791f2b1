"""Gemma 3 (text): sliding-window layers with a full-attention layer every few, one rope for each of
the two kinds, norms before and after attention and feed-forward, scaled by 1 + w. Also reads the
language model of multimodal checkpoints.
"""

from __future__ import annotations

from areal.models.common.decoder import Decoder
from areal.models.common.state_dict_adapter import (
    DENSE_FROM_HF,
    OUT_BIAS_FROM_HF,
    QK_NORM_FROM_HF,
    QKV_BIAS_FROM_HF,
    StateDictAdapter,
)
from areal.models.family_args import Gemma3ModelArgs
from areal.models.spec import ModelSpec

# In a multimodal checkpoint the language model is nested one level deeper.
_LANGUAGE_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
_IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.")


class Gemma3StateDictAdapter(StateDictAdapter):
    from_hf_map = {
        **DENSE_FROM_HF,
        **QKV_BIAS_FROM_HF,
        **OUT_BIAS_FROM_HF,
        **QK_NORM_FROM_HF,
        "model.layers.{}.post_attention_layernorm.weight": "layers.{}.attention_out_norm.weight",
        "model.layers.{}.pre_feedforward_layernorm.weight": "layers.{}.ffn_norm.weight",
        "model.layers.{}.post_feedforward_layernorm.weight": "layers.{}.ffn_out_norm.weight",
    }

    def usual_hf_name(self, hf_name: str) -> str:
        for prefix, usual in _LANGUAGE_PREFIXES.items():
            if hf_name.startswith(prefix):
                return usual + hf_name.removeprefix(prefix)
        return hf_name

    def from_hf_name(self, hf_name: str) -> str | None:
        if hf_name.removeprefix("model.").startswith(_IMAGE_PARTS):
            return None
        return super().from_hf_name(hf_name)


class Gemma3Model(Decoder):
    adapter_class = Gemma3StateDictAdapter


SPEC = ModelSpec(
    name="Gemma3",
    model_class=Gemma3Model,
    model_args_class=Gemma3ModelArgs,
    state_dict_adapter_class=Gemma3StateDictAdapter,
    supported_model_types=frozenset({"gemma3_text"}),
)
