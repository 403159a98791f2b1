"""The Qwen3 decoder: RMS norm on the heads of queries and keys; dense or of experts."""

from __future__ import annotations

from areal.models.common.decoder import Decoder
from areal.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter


class Qwen3Model(Decoder):
    adapter_class = Qwen3StateDictAdapter
