"""Args of Llama 2 and 3 (and of models that keep its architecture and name, as SmolLM2 does)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal.models.common.args import DecoderArgs, common_decoder_fields


@dataclass(frozen=True, kw_only=True)
class LlamaModelArgs(DecoderArgs):
    @classmethod
    def from_hf_config(cls, hf: Mapping[str, Any]) -> LlamaModelArgs:
        bias = hf.get("attention_bias", False)
        return cls(
            **common_decoder_fields(hf),
            qkv_bias=bias,
            attention_out_bias=bias,
            mlp_bias=hf.get("mlp_bias", False),
        )
