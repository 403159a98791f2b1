"""Qwen3-VL: the decoder of Qwen3 with interleaved M-RoPE, and a vision tower with deepstack
(vision/qwen3_vl.py)."""

from __future__ import annotations

from areal.models.common.decoder import Decoder
from areal.models.common.state_dict_adapter import (
    QK_NORM_DECODER_FROM_HF,
    StateDictAdapter,
    below,
)
from areal.models.family_args import Qwen3VLModelArgs
from areal.models.spec import ModelSpec
from areal.models.vision.qwen3_vl import Qwen3VLTower

_TOWER_LAYERS = {
    "patch_embed.proj": "patch_embed",
    "blocks.{}.norm1": "blocks.{}.norm1",
    "blocks.{}.norm2": "blocks.{}.norm2",
    "blocks.{}.attn.qkv": "blocks.{}.attn.qkv",
    "blocks.{}.attn.proj": "blocks.{}.attn.proj",
    "blocks.{}.mlp.linear_fc1": "blocks.{}.mlp.linear_fc1",
    "blocks.{}.mlp.linear_fc2": "blocks.{}.mlp.linear_fc2",
    **{
        f"{theirs}.{layer}": f"{ours}.{layer}"
        for theirs, ours in (
            ("merger", "merger"),
            ("deepstack_merger_list.{}", "deepstack_mergers.{}"),
        )
        for layer in ("norm", "linear_fc1", "linear_fc2")
    },
}


TOWER_FROM_HF: dict[str, str] = {
    "model.visual.pos_embed.weight": "tower.pos_embed.weight",
    **{
        f"model.visual.{theirs}.{leaf}": f"tower.{ours}.{leaf}"
        for theirs, ours in _TOWER_LAYERS.items()
        for leaf in ("weight", "bias")
    },
}


class Qwen3VLStateDictAdapter(StateDictAdapter):
    from_hf_map = {
        **below("model.language_model.", QK_NORM_DECODER_FROM_HF),
        **TOWER_FROM_HF,
    }


class Qwen3VLModel(Decoder):
    adapter_class = Qwen3VLStateDictAdapter
    tower_class = Qwen3VLTower


SPEC = ModelSpec(
    name="Qwen3-VL",
    model_class=Qwen3VLModel,
    model_args_class=Qwen3VLModelArgs,
    state_dict_adapter_class=Qwen3VLStateDictAdapter,
    supported_model_types=frozenset({"qwen3_vl"}),
)
