"""The Llama family, as the registry knows it."""

from __future__ import annotations

from areal.models.llama.args import LlamaModelArgs
from areal.models.spec import ModelSpec

LLAMA_SPEC = ModelSpec(
    name="Llama",
    model_class="areal.models.llama.model.LlamaModel",
    model_args_class=LlamaModelArgs,
    state_dict_adapter_class="areal.models.llama.state_dict_adapter.LlamaStateDictAdapter",
    supported_model_types=frozenset({"llama"}),
)
