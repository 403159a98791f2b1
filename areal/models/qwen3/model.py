"""The Qwen3 (dense) decoder: RMS norm on the heads of queries and keys."""

from __future__ import annotations

from areal.models.common.decoder import Decoder
from areal.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter


class Qwen3Model(Decoder):
    adapter_class = Qwen3StateDictAdapter
