"""Model definitions shared by training and decoding, found by the `model_type` of a config.json.

To add a family: a folder like `qwen3/` and one row in `_FAMILIES`. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from areal.models.common.args import DecoderArgs
from areal.models.gemma3.spec import GEMMA3_SPEC
from areal.models.llama.spec import LLAMA_SPEC
from areal.models.qwen2.spec import QWEN2_SPEC
from areal.models.qwen3.spec import QWEN3_SPEC
from areal.models.spec import ModelSpec
from areal.utils.model_files import language_config

_FAMILIES: tuple[ModelSpec, ...] = (
    GEMMA3_SPEC,
    LLAMA_SPEC,
    QWEN2_SPEC,
    QWEN3_SPEC,
)

MODEL_SPECS: dict[str, ModelSpec] = {
    model_type: spec for spec in _FAMILIES for model_type in sorted(spec.supported_model_types)
}


def decoder_args(hf_config: Mapping[str, Any], *, is_critic: bool = False) -> DecoderArgs:
    """Shape and options of the language model of a config.json; ValueError for what areal's own
    models do not compute."""
    config = language_config(hf_config)
    args = get_model_spec(config["model_type"]).model_args_class.from_hf_config(config)
    return replace(args, is_critic=is_critic)


def get_model_spec(model_type: str) -> ModelSpec:
    if model_type not in MODEL_SPECS:
        raise ValueError(
            f"model_type {model_type!r} is not supported: known types are "
            f"{', '.join(sorted(MODEL_SPECS))}; others are trained by backend fsdp and served by "
            "vllm or sglang"
        )
    return MODEL_SPECS[model_type]
