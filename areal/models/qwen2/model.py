"""The Qwen2 decoder: biases on query, key and value; no QK norm."""

from __future__ import annotations

from areal.models.common.decoder import Decoder
from areal.models.qwen2.state_dict_adapter import Qwen2StateDictAdapter


class Qwen2Model(Decoder):
    adapter_class = Qwen2StateDictAdapter
