"""Args of dense Qwen3: QK norm always, biases on all four projections by `attention_bias`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal.models.common.args import DecoderArgs, common_decoder_fields


@dataclass(frozen=True, kw_only=True)
class Qwen3ModelArgs(DecoderArgs):
    @classmethod
    def from_hf_config(cls, hf: Mapping[str, Any]) -> Qwen3ModelArgs:
        bias = hf.get("attention_bias", False)
        # Qwen3's own default: its heads are wider than hidden_size / num_attention_heads.
        fields = common_decoder_fields({**hf, "head_dim": hf.get("head_dim") or 128})
        return cls(**fields, qk_norm=True, qkv_bias=bias, attention_out_bias=bias)
