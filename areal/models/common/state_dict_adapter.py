"""Names of weights: ours <-> those of a Hugging Face checkpoint, one table read in both directions.

A family subclasses `StateDictAdapter` and adds its rows to `DENSE_FROM_HF`. `{}` in a row stands
for the layer's number. Mapping names never changes a tensor's values or shape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import torch

from areal.models.common.args import DecoderArgs

DENSE_FROM_HF: dict[str, str] = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.layers.{}.input_layernorm.weight": "layers.{}.attention_norm.weight",
    "model.layers.{}.self_attn.q_proj.weight": "layers.{}.attention.wq.weight",
    "model.layers.{}.self_attn.k_proj.weight": "layers.{}.attention.wk.weight",
    "model.layers.{}.self_attn.v_proj.weight": "layers.{}.attention.wv.weight",
    "model.layers.{}.self_attn.o_proj.weight": "layers.{}.attention.wo.weight",
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.ffn_norm.weight",
    "model.layers.{}.mlp.gate_proj.weight": "layers.{}.feed_forward.w1.weight",
    "model.layers.{}.mlp.down_proj.weight": "layers.{}.feed_forward.w2.weight",
    "model.layers.{}.mlp.up_proj.weight": "layers.{}.feed_forward.w3.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
    "score.weight": "score.weight",
}

# Rows a family adds when its checkpoints can have them.
QKV_BIAS_FROM_HF: dict[str, str] = {
    "model.layers.{}.self_attn.q_proj.bias": "layers.{}.attention.wq.bias",
    "model.layers.{}.self_attn.k_proj.bias": "layers.{}.attention.wk.bias",
    "model.layers.{}.self_attn.v_proj.bias": "layers.{}.attention.wv.bias",
}
OUT_BIAS_FROM_HF: dict[str, str] = {
    "model.layers.{}.self_attn.o_proj.bias": "layers.{}.attention.wo.bias",
}

_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class StateDictAdapter:
    """Maps names for one model; knows from its args which names carry nothing to load."""

    from_hf_map: ClassVar[dict[str, str]]

    def __init__(self, args: DecoderArgs):
        self.args = args
        self.to_hf_map = {ours: theirs for theirs, ours in self.from_hf_map.items()}

    def from_hf_name(self, hf_name: str) -> str | None:
        """Our name, or None for a tensor without a place here: rope tables, the head of a tied
        model, the LM head when a critic is made from a language model."""
        if hf_name.endswith("rotary_emb.inv_freq"):
            return None
        if hf_name == "lm_head.weight" and (self.args.tie_word_embeddings or self.args.is_critic):
            return None
        return _rename(hf_name, self.from_hf_map)

    def to_hf_name(self, name: str) -> str:
        return _rename(name, self.to_hf_map)

    def convert_single_to_hf(
        self, name: str, tensor: torch.Tensor
    ) -> list[tuple[str, torch.Tensor]]:
        """A list because some layouts (stacked experts) split one of ours into many of theirs."""
        return [(self.to_hf_name(name), tensor)]

    def to_hf(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(
            pair
            for name, tensor in state.items()
            for pair in self.convert_single_to_hf(name, tensor)
        )

    def from_hf(self, hf_state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        named = ((self.from_hf_name(hf_name), tensor) for hf_name, tensor in hf_state.items())
        return {name: tensor for name, tensor in named if name is not None}


def _rename(name: str, table: Mapping[str, str]) -> str:
    number = _LAYER_NUMBER.search(name)
    template = name if number is None else _LAYER_NUMBER.sub("{}", name, count=1)
    if template not in table:
        raise ValueError(f"unknown weight name {name!r}: this model family has no such weight")
    return table[template].format(number.group() if number else "")
