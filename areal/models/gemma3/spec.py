"""The Gemma 3 family, text only, as the registry knows it."""

from __future__ import annotations

from areal.models.gemma3.args import Gemma3ModelArgs
from areal.models.spec import ModelSpec

GEMMA3_SPEC = ModelSpec(
    name="Gemma3",
    model_class="areal.models.gemma3.model.Gemma3Model",
    model_args_class=Gemma3ModelArgs,
    state_dict_adapter_class="areal.models.gemma3.state_dict_adapter.Gemma3StateDictAdapter",
    supported_model_types=frozenset({"gemma3_text"}),
)
