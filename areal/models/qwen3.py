"""Qwen3, dense and mixture of experts: RMS norm on the heads of queries and keys, biases on all
four projections by `attention_bias`, experts in the layers that `decoder_sparse_step` and
`mlp_only_layers` leave to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal.models.common.args import DecoderArgs, MoEArgs, common_decoder_fields
from areal.models.common.decoder import Decoder
from areal.models.common.state_dict_adapter import (
    DENSE_FROM_HF,
    EXPERTS_FROM_HF,
    OUT_BIAS_FROM_HF,
    QK_NORM_FROM_HF,
    QKV_BIAS_FROM_HF,
    StateDictAdapter,
)
from areal.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Qwen3ModelArgs(DecoderArgs):
    @classmethod
    def from_hf_config(cls, hf: Mapping[str, Any]) -> Qwen3ModelArgs:
        bias = hf.get("attention_bias", False)
        moe = _moe_args(hf) if hf.get("model_type") == "qwen3_moe" else None
        if moe is None and not hf.get("head_dim"):
            # The dense models' own default: heads wider than hidden_size / num_attention_heads.
            hf = {**hf, "head_dim": 128}
        fields = common_decoder_fields(hf)
        return cls(**fields, qk_norm=True, qkv_bias=bias, attention_out_bias=bias, moe=moe)


def _moe_args(hf: Mapping[str, Any]) -> MoEArgs:
    num_experts = hf.get("num_experts", hf.get("num_local_experts"))
    needed = {
        "num_experts": num_experts,
        "num_experts_per_tok": hf.get("num_experts_per_tok"),
        "moe_intermediate_size": hf.get("moe_intermediate_size"),
    }
    missing = [key for key, value in needed.items() if value is None]
    if missing:
        raise ValueError(f"the model's config.json has no {', '.join(missing)}: experts need it")
    step, dense = hf.get("decoder_sparse_step", 1), set(hf.get("mlp_only_layers") or ())
    layers = range(hf["num_hidden_layers"])
    return MoEArgs(
        num_experts=num_experts,
        top_k=hf["num_experts_per_tok"],
        hidden_dim=hf["moe_intermediate_size"],
        norm_topk_prob=hf.get("norm_topk_prob", False),
        layers=frozenset(i for i in layers if i not in dense and (i + 1) % step == 0),
        expert_bias=hf.get("use_expert_bias", False),
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
