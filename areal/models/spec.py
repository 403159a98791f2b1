"""What a model family must supply to be built, loaded and saved: one `ModelSpec` per family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from areal.models.common.args import DecoderArgs
from areal.utils import import_path

if TYPE_CHECKING:
    from areal.models.common.decoder import Decoder
    from areal.models.common.state_dict_adapter import StateDictAdapter


@dataclass(frozen=True)
class ModelSpec:
    """A class that needs torch may be given by its import path: who only asks whether a model is
    known, as `areal check` does, then does not load it."""

    name: str
    model_class: type[Decoder] | str
    model_args_class: type[DecoderArgs]
    state_dict_adapter_class: type[StateDictAdapter] | str
    supported_model_types: frozenset[str]  # values of `model_type` in config.json

    def load_model_class(self) -> type[Decoder]:
        if isinstance(self.model_class, str):
            return import_path.load(self.model_class, key=self.name)
        return self.model_class
