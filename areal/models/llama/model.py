"""The Llama decoder: optional biases, scaled rope."""

from __future__ import annotations

from areal.models.common.decoder import Decoder
from areal.models.llama.state_dict_adapter import LlamaStateDictAdapter


class LlamaModel(Decoder):
    adapter_class = LlamaStateDictAdapter
