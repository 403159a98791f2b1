"""The Qwen2 family, as the registry knows it."""

from __future__ import annotations

from areal.models.qwen2.args import Qwen2ModelArgs
from areal.models.spec import ModelSpec

QWEN2_SPEC = ModelSpec(
    name="Qwen2",
    model_class="areal.models.qwen2.model.Qwen2Model",
    model_args_class=Qwen2ModelArgs,
    state_dict_adapter_class="areal.models.qwen2.state_dict_adapter.Qwen2StateDictAdapter",
    supported_model_types=frozenset({"qwen2"}),
)
