"""Qwen2.5-VL: the decoder of Qwen2 with M-RoPE, and a vision tower (vision/qwen2_5_vl.py)."""

from __future__ import annotations

from areal.models.common.decoder import Decoder
from areal.models.common.state_dict_adapter import (
    DENSE_FROM_HF,
    QKV_BIAS_FROM_HF,
    StateDictAdapter,
)
from areal.models.family_args import Qwen2_5VLModelArgs
from areal.models.spec import ModelSpec
from areal.models.vision.qwen2_5_vl import Qwen2_5VLTower

_TOWER_FROM_HF = {
    "visual.patch_embed.proj.weight": "tower.patch_embed.weight",
    "visual.merger.ln_q.weight": "tower.merger.ln_q.weight",
    "visual.merger.mlp.{}.weight": "tower.merger.mlp.{}.weight",
    "visual.merger.mlp.{}.bias": "tower.merger.mlp.{}.bias",
    "visual.blocks.{}.norm1.weight": "tower.blocks.{}.norm1.weight",
    "visual.blocks.{}.norm2.weight": "tower.blocks.{}.norm2.weight",
    **{
        f"visual.blocks.{{}}.{layer}.{leaf}": f"tower.blocks.{{}}.{layer}.{leaf}"
        for layer in ("attn.qkv", "attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        for leaf in ("weight", "bias")
    },
}
# transformers' modules are nested one level deeper than its checkpoints.
_MODULE_PREFIXES = {"model.visual.": "visual.", "model.language_model.": "model."}


class Qwen2_5VLStateDictAdapter(StateDictAdapter):
    from_hf_map = {**DENSE_FROM_HF, **QKV_BIAS_FROM_HF, **_TOWER_FROM_HF}

    def usual_hf_name(self, hf_name: str) -> str:
        for prefix, usual in _MODULE_PREFIXES.items():
            if hf_name.startswith(prefix):
                return usual + hf_name.removeprefix(prefix)
        return hf_name

    def module_name(self, name: str) -> str:
        hf_name = self.to_hf_name(name)
        for prefix, usual in _MODULE_PREFIXES.items():
            if hf_name.startswith(usual):
                return prefix + hf_name.removeprefix(usual)
        return hf_name


class Qwen2_5VLModel(Decoder):
    adapter_class = Qwen2_5VLStateDictAdapter
    tower_class = Qwen2_5VLTower


SPEC = ModelSpec(
    name="Qwen2.5-VL",
    model_class=Qwen2_5VLModel,
    model_args_class=Qwen2_5VLModelArgs,
    state_dict_adapter_class=Qwen2_5VLStateDictAdapter,
    supported_model_types=frozenset({"qwen2_5_vl"}),
)
