"""What a model family supplies to be built, loaded and saved: one `ModelSpec` per family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from areal.models.common.args import DecoderArgs

if TYPE_CHECKING:
    from areal.models.common.decoder import Decoder
    from areal.models.common.state_dict_adapter import StateDictAdapter


@dataclass(frozen=True)
class ModelSpec:
    """One family of models."""

    name: str
    model_class: type[Decoder]
    model_args_class: type[DecoderArgs]
    state_dict_adapter_class: type[StateDictAdapter]
    supported_model_types: frozenset[str]  # values of `model_type` in config.json
