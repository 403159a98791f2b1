"""The Qwen3 family, dense and of experts, as the registry knows it."""

from __future__ import annotations

from areal.models.qwen3.args import Qwen3ModelArgs
from areal.models.spec import ModelSpec

QWEN3_SPEC = ModelSpec(
    name="Qwen3",
    model_class="areal.models.qwen3.model.Qwen3Model",
    model_args_class=Qwen3ModelArgs,
    state_dict_adapter_class="areal.models.qwen3.state_dict_adapter.Qwen3StateDictAdapter",
    supported_model_types=frozenset({"qwen3", "qwen3_moe"}),
)
