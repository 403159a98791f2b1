"""Model definitions shared by training and decoding, found by the `model_type` of a config.json.

To add a family: a file like `qwen3.py` and its rows in `_FAMILIES`, or from outside
`register_model_spec`. A family, and torch with it, is imported when a model of it is requested.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from areal.models.common.args import DecoderArgs
from areal.models.spec import ModelSpec
from areal.utils.model_files import language_config

# model_type -> the module with its SPEC
_FAMILIES = {
    "gemma3_text": "areal.models.gemma3",
    "llama": "areal.models.llama",
    "qwen2": "areal.models.qwen2",
    "qwen3": "areal.models.qwen3",
    "qwen3_moe": "areal.models.qwen3",
}
_registered: dict[str, ModelSpec] = {}


def register_model_spec(spec: ModelSpec) -> None:
    """Register a family by its model types; it takes precedence over a built-in one."""
    for model_type in spec.supported_model_types:
        _registered[model_type] = spec


def known_model_types() -> list[str]:
    return sorted({*_FAMILIES, *_registered})


def get_model_spec(model_type: str) -> ModelSpec:
    if model_type in _registered:
        return _registered[model_type]
    if model_type not in _FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not supported: known types are "
            f"{', '.join(known_model_types())}; others are trained by backend fsdp and served by "
            "vllm or sglang"
        )
    return importlib.import_module(_FAMILIES[model_type]).SPEC


def decoder_args(hf_config: Mapping[str, Any], *, is_critic: bool = False) -> DecoderArgs:
    """Shape and options of the language model of a config.json; ValueError for features that
    areal's own models lack."""
    config = language_config(hf_config)
    args = get_model_spec(config["model_type"]).model_args_class.from_hf_config(config)
    return replace(args, is_critic=is_critic)
