"""Gemma 3 (text): sliding-window layers with a full-attention layer every few, one rope for each of
the two kinds, norms before and after attention and feed-forward, scaled by 1 + w. Also reads the
language model of multimodal checkpoints.

Shape legend: T tokens, D model dim, N heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from areal.models.common.args import DecoderArgs, RopeArgs, common_decoder_fields
from areal.models.common.decoder import Decoder, DecoderBlock
from areal.models.common.state_dict_adapter import (
    DENSE_FROM_HF,
    OUT_BIAS_FROM_HF,
    QK_NORM_FROM_HF,
    QKV_BIAS_FROM_HF,
    StateDictAdapter,
)
from areal.models.spec import ModelSpec

# config.json omits default values.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_WINDOW, _ALL = "sliding_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Gemma3ModelArgs(DecoderArgs):
    @classmethod
    def from_hf_config(cls, hf: Mapping[str, Any]) -> Gemma3ModelArgs:
        hf = _DEFAULTS | {key: value for key, value in hf.items() if value is not None}
        _refuse_unsupported(hf)
        bias = hf.get("attention_bias", False)
        kinds = hf.get("layer_types") or _layer_types(hf)
        ropes = _rope_configs(hf)
        plain = {key: value for key, value in hf.items() if key not in ("layer_types", *_ROPE_KEYS)}
        return cls(
            **common_decoder_fields(plain | ropes[_ALL]),
            qk_norm=True,
            qkv_bias=bias,
            attention_out_bias=bias,
            activation="gelu_tanh",
            embedding_scale=hf["hidden_size"] ** 0.5,
            score_scale=hf["query_pre_attn_scalar"] ** -0.5,
            windows=tuple(hf["sliding_window"] if kind == _WINDOW else None for kind in kinds),
            window_rope=RopeArgs.from_hf_config(plain | ropes[_WINDOW]),
            logit_softcap=hf.get("final_logit_softcapping"),
        )


def _layer_types(hf: Mapping[str, Any]) -> list[str]:
    pattern = hf["sliding_window_pattern"]
    return [_WINDOW if (i + 1) % pattern else _ALL for i in range(hf["num_hidden_layers"])]


_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq")


def _rope_configs(hf: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For each kind of layer, the rope keys as in other families' config.json."""
    given = hf.get("rope_parameters") or {}
    windowed = {"rope_theta": hf.get("rope_local_base_freq", 1e4)} | (given.get(_WINDOW) or {})
    whole = {"rope_theta": hf.get("rope_theta", 1e6)} | (hf.get("rope_scaling") or {})
    return {
        _WINDOW: {"rope_parameters": windowed},
        _ALL: {"rope_parameters": whole | (given.get(_ALL) or {})},
    }


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    activation = hf["hidden_activation"]
    if activation != "gelu_pytorch_tanh":
        raise ValueError(f"hidden_activation must be 'gelu_pytorch_tanh', got {activation!r}")
    unknown = set(hf.get("layer_types") or ()) - {_WINDOW, _ALL}
    if unknown:
        raise ValueError(f"layer_types must be {_WINDOW!r} or {_ALL!r}, got {sorted(unknown)}")
    for key in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if hf.get(key):
            raise ValueError(f"{key} is not supported: remove it from the model's config.json")


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


class Gemma3Norm(nn.RMSNorm):
    """RMS norm times 1 + weight, in float32."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, scale, self.eps).to(x.dtype)


class Gemma3Block(DecoderBlock):
    norm_class = Gemma3Norm

    def __init__(self, args: DecoderArgs, layer: int):
        super().__init__(args, layer)
        self.attention_out_norm = Gemma3Norm(args.dim, args.norm_eps)
        self.ffn_out_norm = Gemma3Norm(args.dim, args.norm_eps)

    def after(self, x_TD: torch.Tensor, out_TNH: torch.Tensor) -> torch.Tensor:
        x_TD = x_TD + self.attention_out_norm(self.attention.wo(out_TNH.flatten(1)))
        return x_TD + self.ffn_out_norm(self.feed_forward(self.ffn_norm(x_TD)))


class Gemma3Model(Decoder):
    adapter_class = Gemma3StateDictAdapter
    block_class = Gemma3Block


SPEC = ModelSpec(
    name="Gemma3",
    model_class=Gemma3Model,
    model_args_class=Gemma3ModelArgs,
    state_dict_adapter_class=Gemma3StateDictAdapter,
    supported_model_types=frozenset({"gemma3_text"}),
)
