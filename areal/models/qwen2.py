"""Qwen2 and Qwen2.5: biases on query, key and value, none on the output; no QK norm."""

from __future__ import annotations

from areal.models.common.decoder import Decoder
from areal.models.common.state_dict_adapter import (
    DENSE_FROM_HF,
    QKV_BIAS_FROM_HF,
    StateDictAdapter,
)
from areal.models.family_args import Qwen2ModelArgs
from areal.models.spec import ModelSpec


class Qwen2StateDictAdapter(StateDictAdapter):
    from_hf_map = {**DENSE_FROM_HF, **QKV_BIAS_FROM_HF}


class Qwen2Model(Decoder):
    adapter_class = Qwen2StateDictAdapter


SPEC = ModelSpec(
    name="Qwen2",
    model_class=Qwen2Model,
    model_args_class=Qwen2ModelArgs,
    state_dict_adapter_class=Qwen2StateDictAdapter,
    supported_model_types=frozenset({"qwen2"}),
)
