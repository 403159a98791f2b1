"""Args of Qwen2 and Qwen2.5: query, key and value always have a bias, the output never."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal.models.common.args import DecoderArgs, common_decoder_fields


@dataclass(frozen=True, kw_only=True)
class Qwen2ModelArgs(DecoderArgs):
    @classmethod
    def from_hf_config(cls, hf: Mapping[str, Any]) -> Qwen2ModelArgs:
        return cls(**common_decoder_fields(hf), qkv_bias=True)
