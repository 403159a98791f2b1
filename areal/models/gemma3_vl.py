"""Gemma 3 with its vision tower (vision/gemma3.py). In its decoder, that of gemma3.py, the tokens
of an image see all of it."""

from __future__ import annotations

from areal.models.common.decoder import Decoder
from areal.models.common.state_dict_adapter import StateDictAdapter, below
from areal.models.family_args import Gemma3ModelArgs
from areal.models.gemma3 import Gemma3StateDictAdapter
from areal.models.spec import ModelSpec
from areal.models.vision.gemma3 import Gemma3Tower

# In the order in which they are tried; the values are what checkpoints on the hub have.
_PREFIXES = {
    "model.language_model.": "language_model.model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.vision_tower.": "vision_tower.",
    "language_model.lm_head.": "lm_head.",
}
_TOWER = "vision_tower.vision_model."
_TOWER_FROM_HF = {
    f"{_TOWER}embeddings.position_embedding.weight": "tower.pos_embed.weight",
    "multi_modal_projector.mm_input_projection_weight": "tower.projection.weight",
    "multi_modal_projector.mm_soft_emb_norm.weight": "tower.soft_norm.weight",
    **{
        f"{_TOWER}{theirs}.{leaf}": f"tower.{ours}.{leaf}"
        for theirs, ours in {
            "embeddings.patch_embedding": "patch_embed",
            "post_layernorm": "norm",
            "encoder.layers.{}.layer_norm1": "blocks.{}.norm1",
            "encoder.layers.{}.layer_norm2": "blocks.{}.norm2",
            "encoder.layers.{}.self_attn.q_proj": "blocks.{}.attn.q_proj",
            "encoder.layers.{}.self_attn.k_proj": "blocks.{}.attn.k_proj",
            "encoder.layers.{}.self_attn.v_proj": "blocks.{}.attn.v_proj",
            "encoder.layers.{}.self_attn.out_proj": "blocks.{}.attn.proj",
            "encoder.layers.{}.mlp.fc1": "blocks.{}.mlp.fc1",
            "encoder.layers.{}.mlp.fc2": "blocks.{}.mlp.fc2",
        }.items()
        for leaf in ("weight", "bias")
    },
}


class Gemma3VLStateDictAdapter(StateDictAdapter):
    from_hf_map = {
        **below("language_model.model.", Gemma3StateDictAdapter.from_hf_map),
        **_TOWER_FROM_HF,
    }

    def usual_hf_name(self, hf_name: str) -> str:
        for prefix, usual in _PREFIXES.items():
            if hf_name.startswith(prefix):
                hf_name = usual + hf_name.removeprefix(prefix)
        # transformers' own files leave one level out.
        if hf_name.startswith("vision_tower.") and not hf_name.startswith(_TOWER):
            hf_name = _TOWER + hf_name.removeprefix("vision_tower.")
        return hf_name

    def module_name(self, name: str) -> str:
        hf_name = self.to_hf_name(name).replace(_TOWER, "vision_tower.")
        if hf_name.startswith("language_model.model."):
            return hf_name.replace("language_model.model.", "model.language_model.", 1)
        return f"model.{hf_name}" if name.startswith("tower.") else hf_name

    def is_kept(self, hf_name: str) -> bool:
        # A tower may come with the head of a classifier, which nothing reads.
        return self.usual_hf_name(hf_name).startswith(f"{_TOWER}head.")

    def from_hf_name(self, hf_name: str) -> str | None:
        return None if self.is_kept(hf_name) else super().from_hf_name(hf_name)


class Gemma3VLModel(Decoder):
    adapter_class = Gemma3VLStateDictAdapter
    tower_class = Gemma3Tower


SPEC = ModelSpec(
    name="Gemma3-VL",
    model_class=Gemma3VLModel,
    model_args_class=Gemma3ModelArgs,
    state_dict_adapter_class=Gemma3VLStateDictAdapter,
    supported_model_types=frozenset({"gemma3"}),
)
