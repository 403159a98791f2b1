"""Model definitions shared by training and decoding, found by the `model_type` of a config.json.

To add a family: a folder like `qwen3/` and one row in `_FAMILIES`.
"""

from __future__ import annotations

from areal.models.gemma3.spec import GEMMA3_SPEC
from areal.models.llama.spec import LLAMA_SPEC
from areal.models.qwen2.spec import QWEN2_SPEC
from areal.models.qwen3.spec import QWEN3_SPEC
from areal.models.spec import ModelSpec

_FAMILIES: tuple[ModelSpec, ...] = (
    GEMMA3_SPEC,
    LLAMA_SPEC,
    QWEN2_SPEC,
    QWEN3_SPEC,
)

MODEL_SPECS: dict[str, ModelSpec] = {
    model_type: spec for spec in _FAMILIES for model_type in sorted(spec.supported_model_types)
}


def get_model_spec(model_type: str) -> ModelSpec:
    if model_type not in MODEL_SPECS:
        raise ValueError(
            f"model_type {model_type!r} is not supported: known types are "
            f"{', '.join(sorted(MODEL_SPECS))}"
        )
    return MODEL_SPECS[model_type]
