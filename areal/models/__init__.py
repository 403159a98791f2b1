"""Model definitions shared by training and decoding, found by the `model_type` of a config.json.

To add a family: its args in `family_args.py`, a file like `qwen3.py`, and a row in `_FAMILIES`; or
from outside `register_model_spec`. Torch is loaded with the file of a family, when one of its
models is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from areal.models.common.args import DecoderArgs
from areal.models.family_args import (
    DeepseekV2ModelArgs,
    Gemma3ModelArgs,
    LlamaModelArgs,
    MistralModelArgs,
    Qwen2_5VLModelArgs,
    Qwen2ModelArgs,
    Qwen3ModelArgs,
    Qwen3VLModelArgs,
    Qwen35ModelArgs,
    Qwen35VLModelArgs,
)
from areal.models.spec import ModelSpec
from areal.models.vision.args import VisionArgs
from areal.utils.model_files import language_config

# model_type -> (args, the module that has its SPEC)
_FAMILIES: dict[str, tuple[type[DecoderArgs], str]] = {
    "deepseek_v2": (DeepseekV2ModelArgs, "areal.models.deepseek_v2"),
    "gemma3": (Gemma3ModelArgs, "areal.models.gemma3_vl"),
    "gemma3_text": (Gemma3ModelArgs, "areal.models.gemma3"),
    "llama": (LlamaModelArgs, "areal.models.llama"),
    "mistral": (MistralModelArgs, "areal.models.mistral"),
    "qwen2": (Qwen2ModelArgs, "areal.models.qwen2"),
    "qwen2_5_vl": (Qwen2_5VLModelArgs, "areal.models.qwen2_5_vl"),
    "qwen3": (Qwen3ModelArgs, "areal.models.qwen3"),
    "qwen3_5": (Qwen35VLModelArgs, "areal.models.qwen3_5_vl"),
    "qwen3_5_moe": (Qwen35VLModelArgs, "areal.models.qwen3_5_vl"),
    "qwen3_5_moe_text": (Qwen35ModelArgs, "areal.models.qwen3_5"),
    "qwen3_5_text": (Qwen35ModelArgs, "areal.models.qwen3_5"),
    "qwen3_moe": (Qwen3ModelArgs, "areal.models.qwen3"),
    "qwen3_vl": (Qwen3VLModelArgs, "areal.models.qwen3_vl"),
}
_registered: dict[str, ModelSpec] = {}


def register_model_spec(spec: ModelSpec) -> None:
    """Register a family by its model types; it takes precedence over a built-in one."""
    for model_type in spec.supported_model_types:
        _registered[model_type] = spec


def known_model_types() -> list[str]:
    return sorted({*_FAMILIES, *_registered})


def get_model_spec(model_type: str) -> ModelSpec:
    _check_known(model_type)
    if model_type in _registered:
        return _registered[model_type]
    return importlib.import_module(_FAMILIES[model_type][1]).SPEC


def own_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json that our model of a folder is built from and saved with: the whole one if
    the family has its vision tower here and the folder has one, else that of the language model."""
    model_type, known = hf_config["model_type"], {*_registered, *_FAMILIES}
    is_text = f"{model_type}_text" in known and "vision_config" not in hf_config
    return hf_config if model_type in known and not is_text else language_config(hf_config)


def decoder_args(hf_config: Mapping[str, Any], *, is_critic: bool = False) -> DecoderArgs:
    """Shape and options of the model of a config.json; ValueError for what areal's own models do
    not compute."""
    config = own_config(hf_config)
    model_type = config["model_type"]
    _check_known(model_type)
    known = _registered.get(model_type)
    args_class = _FAMILIES[model_type][0] if known is None else known.model_args_class
    return replace(args_class.from_hf_config(config), is_critic=is_critic)


def vision_args(hf_config: Mapping[str, Any]) -> VisionArgs | None:
    """The tower of areal's own model of a config.json; None for one that reads text only."""
    has_tower = "vision_config" in hf_config and hf_config["model_type"] in known_model_types()
    return decoder_args(hf_config).vision if has_tower else None


def _check_known(model_type: str) -> None:
    if model_type not in _registered and model_type not in _FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not supported: known types are "
            f"{', '.join(known_model_types())}; others are trained by backend fsdp and served by "
            "vllm or sglang"
        )
