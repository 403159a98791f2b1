"""Mistral 7B and models that keep its architecture: no biases, and a sliding window in every layer
where config.json names one (version 0.1; later ones see all tokens).
"""

from __future__ import annotations

from areal.models.common.decoder import Decoder
from areal.models.common.state_dict_adapter import DENSE_FROM_HF, StateDictAdapter
from areal.models.family_args import MistralModelArgs
from areal.models.spec import ModelSpec


class MistralStateDictAdapter(StateDictAdapter):
    from_hf_map = {**DENSE_FROM_HF}


class MistralModel(Decoder):
    adapter_class = MistralStateDictAdapter


SPEC = ModelSpec(
    name="Mistral",
    model_class=MistralModel,
    model_args_class=MistralModelArgs,
    state_dict_adapter_class=MistralStateDictAdapter,
    supported_model_types=frozenset({"mistral"}),
)
