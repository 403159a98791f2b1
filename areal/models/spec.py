"""What a model family must supply to be built, loaded and saved: one `ModelSpec` per family."""

from __future__ import annotations

from dataclasses import dataclass

from areal.models.common.args import DecoderArgs
from areal.models.common.decoder import Decoder
from areal.models.common.state_dict_adapter import StateDictAdapter


@dataclass(frozen=True)
class ModelSpec:
    name: str
    model_class: type[Decoder]
    model_args_class: type[DecoderArgs]  # has `from_hf_config(dict)`
    state_dict_adapter_class: type[StateDictAdapter]
    supported_model_types: frozenset[str]  # values of `model_type` in config.json
