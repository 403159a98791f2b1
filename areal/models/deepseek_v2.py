"""DeepSeek-V2 and V2-Lite: multi-head latent attention, experts beside shared ones in all layers
but the first few, routed greedily or within groups of experts.
"""

from __future__ import annotations

from areal.models.common.decoder import Decoder
from areal.models.common.state_dict_adapter import (
    DENSE_FROM_HF,
    EXPERTS_FROM_HF,
    LATENT_FROM_HF,
    SHARED_EXPERTS_FROM_HF,
    StateDictAdapter,
)
from areal.models.family_args import DeepseekV2ModelArgs
from areal.models.spec import ModelSpec


class DeepseekV2StateDictAdapter(StateDictAdapter):
    from_hf_map = {
        **DENSE_FROM_HF,
        **LATENT_FROM_HF,
        **EXPERTS_FROM_HF,
        **SHARED_EXPERTS_FROM_HF,
    }


class DeepseekV2Model(Decoder):
    adapter_class = DeepseekV2StateDictAdapter


SPEC = ModelSpec(
    name="DeepSeek-V2",
    model_class=DeepseekV2Model,
    model_args_class=DeepseekV2ModelArgs,
    state_dict_adapter_class=DeepseekV2StateDictAdapter,
    supported_model_types=frozenset({"deepseek_v2"}),
)
