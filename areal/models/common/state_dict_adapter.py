"""Names of weights: ours <-> those of a Hugging Face checkpoint, one table for both directions.

A family subclasses `StateDictAdapter` and adds its rows to `DENSE_FROM_HF`. `{}` in a row stands
for the layer index. A second `{}`, on the Hugging Face side only, is the index in a tensor that we
keep stacked (experts). Mapping names never changes a tensor's values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

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

# Optional rows, added by families whose checkpoints may have them.
QKV_BIAS_FROM_HF: dict[str, str] = {
    "model.layers.{}.self_attn.q_proj.bias": "layers.{}.attention.wq.bias",
    "model.layers.{}.self_attn.k_proj.bias": "layers.{}.attention.wk.bias",
    "model.layers.{}.self_attn.v_proj.bias": "layers.{}.attention.wv.bias",
}
OUT_BIAS_FROM_HF: dict[str, str] = {
    "model.layers.{}.self_attn.o_proj.bias": "layers.{}.attention.wo.bias",
}
QK_NORM_FROM_HF: dict[str, str] = {
    "model.layers.{}.self_attn.q_norm.weight": "layers.{}.attention.q_norm.weight",
    "model.layers.{}.self_attn.k_norm.weight": "layers.{}.attention.k_norm.weight",
}
# Of a decoder whose heads of queries and keys are normed, with or without biases.
QK_NORM_DECODER_FROM_HF: dict[str, str] = {
    **DENSE_FROM_HF,
    **QKV_BIAS_FROM_HF,
    **OUT_BIAS_FROM_HF,
    **QK_NORM_FROM_HF,
}
EXPERTS_FROM_HF: dict[str, str] = {
    "model.layers.{}.mlp.gate.weight": "layers.{}.feed_forward.router.weight",
    "model.layers.{}.mlp.experts.{}.gate_proj.weight": "layers.{}.feed_forward.experts.w1",
    "model.layers.{}.mlp.experts.{}.down_proj.weight": "layers.{}.feed_forward.experts.w2",
    "model.layers.{}.mlp.experts.{}.up_proj.weight": "layers.{}.feed_forward.experts.w3",
}
SHARED_EXPERTS_FROM_HF: dict[str, str] = {
    f"model.layers.{{}}.mlp.shared_experts.{theirs}.weight": (
        f"layers.{{}}.feed_forward.shared.{ours}.weight"
    )
    for theirs, ours in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))
}
GATED_SHARED_EXPERT_FROM_HF: dict[str, str] = {
    **{
        theirs.replace("shared_experts", "shared_expert"): ours
        for theirs, ours in SHARED_EXPERTS_FROM_HF.items()
    },
    "model.layers.{}.mlp.shared_expert_gate.weight": "layers.{}.feed_forward.shared_gate.weight",
}
DELTA_FROM_HF: dict[str, str] = {
    f"model.layers.{{}}.linear_attn.{theirs}": f"layers.{{}}.attention.{ours}"
    for theirs, ours in (
        ("in_proj_qkv.weight", "in_qkv.weight"),
        ("in_proj_z.weight", "in_gate.weight"),
        ("in_proj_b.weight", "in_beta.weight"),
        ("in_proj_a.weight", "in_decay.weight"),
        ("conv1d.weight", "kernel"),
        ("A_log", "log_rate"),
        ("dt_bias", "decay_bias"),
        ("norm.weight", "norm.weight"),
        ("out_proj.weight", "out.weight"),
    )
}
LATENT_FROM_HF: dict[str, str] = {
    "model.layers.{}.self_attn.q_a_proj.weight": "layers.{}.attention.wq_a.weight",
    "model.layers.{}.self_attn.q_a_layernorm.weight": "layers.{}.attention.q_norm.weight",
    "model.layers.{}.self_attn.q_b_proj.weight": "layers.{}.attention.wq_b.weight",
    "model.layers.{}.self_attn.kv_a_proj_with_mqa.weight": "layers.{}.attention.wkv_a.weight",
    "model.layers.{}.self_attn.kv_a_layernorm.weight": "layers.{}.attention.kv_norm.weight",
    "model.layers.{}.self_attn.kv_b_proj.weight": "layers.{}.attention.wkv_b.weight",
}

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def below(prefix: str, rows: Mapping[str, str]) -> dict[str, str]:
    """`rows` of a decoder that checkpoints have below `prefix` in place of "model."."""
    return {theirs.replace("model.", prefix, 1): ours for theirs, ours in rows.items()}


class StateDictAdapter:
    """Maps names for one model; its args tell which names have nothing to load."""

    from_hf_map: ClassVar[dict[str, str]]
    # Hugging Face rows a checkpoint may lack; the tensor keeps its initial value.
    optional: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, args: DecoderArgs):
        self.args = args
        self.to_hf_map = {ours: theirs for theirs, ours in self.from_hf_map.items()}

    def usual_hf_name(self, hf_name: str) -> str:
        """The canonical name (`to_hf_name`) of a tensor that some checkpoints call `hf_name`."""
        return hf_name

    def unfused(self, hf_name: str, shape: Sequence[int]) -> list[tuple[str, tuple[Any, ...]]]:
        """Hugging Face names of the weights that a checkpoint has in one tensor, and their place in
        it; of most tensors their own name, and the whole."""
        return [(hf_name, ())]

    def multimodal_hf_name(self, hf_name: str) -> str:
        """The name in a multimodal checkpoint, which servers of other projects load by, of a weight
        called `hf_name` in a language model."""
        return hf_name

    def is_kept(self, hf_name: str) -> bool:
        """Whether a model neither computes nor trains it, and is saved with it unchanged."""
        return False

    def from_hf_name(self, hf_name: str) -> str | None:
        """Our name, or None for a tensor that is not loaded: rope tables, the head of a tied
        model, the LM head when a critic is initialized from a language model."""
        hf_name = self.usual_hf_name(hf_name)
        if hf_name.endswith("rotary_emb.inv_freq"):
            return None
        if hf_name == "lm_head.weight" and (self.args.tie_word_embeddings or self.args.is_critic):
            return None
        template, numbers = _split(hf_name)
        return _row(self.from_hf_map, template, hf_name).format(*numbers[:1])

    def stack_index(self, hf_name: str) -> int | None:
        """Index in our stacked tensor; None if it is not stacked."""
        numbers = _split(hf_name)[1]
        return int(numbers[1]) if len(numbers) == 2 else None

    def is_optional(self, hf_name: str) -> bool:
        return _split(hf_name)[0] in self.optional

    def to_hf_name(self, name: str, index: int | None = None) -> str:
        """`index`: index in a stacked tensor."""
        template, numbers = _split(name)
        theirs = _row(self.to_hf_map, template, name)
        assert theirs.count("{}") == len(numbers) + (index is not None), f"{name} at {index}"
        return theirs.format(*numbers, index)

    def module_name(self, name: str) -> str:
        """Name of the parameter in transformers' modules, where its files have other names."""
        return self.to_hf_name(name)

    def convert_single_to_hf(
        self, name: str, tensor: torch.Tensor
    ) -> list[tuple[str, torch.Tensor]]:
        """A list because some layouts (stacked experts) split one of ours into many of theirs."""
        template, numbers = _split(name)
        if _row(self.to_hf_map, template, name).count("{}") == len(numbers):
            return [(self.to_hf_name(name), tensor)]
        return [(self.to_hf_name(name, index), part) for index, part in enumerate(tensor)]

    def to_hf(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(
            pair
            for name, tensor in state.items()
            for pair in self.convert_single_to_hf(name, tensor)
        )

    def from_hf(self, hf_state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        stacks: dict[str, dict[int, torch.Tensor]] = {}
        for hf_name, tensor in hf_state.items():
            name, index = self.from_hf_name(hf_name), self.stack_index(hf_name)
            if name is None:
                continue
            if index is None:
                state[name] = tensor
            else:
                stacks.setdefault(name, {})[index] = tensor
        for name, parts in stacks.items():
            state[name] = torch.stack([parts[index] for index in range(len(parts))])
        return state


def _split(name: str) -> tuple[str, list[str]]:
    """The name with `{}` in place of its numbers, and the numbers."""
    return _NUMBER.sub("{}", name), _NUMBER.findall(name)


def _row(table: Mapping[str, str], template: str, name: str) -> str:
    if template not in table:
        raise ValueError(f"unknown weight name {name!r}: this model family has no such weight")
    return table[template]
