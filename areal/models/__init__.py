"""Model definitions shared by training and decoding, found by the `model_type` of a config.json.

To add a family: a folder like `qwen3/` and one row in `MODEL_SPECS`.
"""

from __future__ import annotations

from areal.models.llama.spec import LLAMA_SPEC
from areal.models.qwen2.spec import QWEN2_SPEC
from areal.models.qwen3.spec import QWEN3_SPEC
from areal.models.spec import ModelSpec

MODEL_SPECS: dict[str, ModelSpec] = {
    "llama": LLAMA_SPEC,
    "qwen2": QWEN2_SPEC,
    "qwen3": QWEN3_SPEC,
}


def get_model_spec(model_type: str) -> ModelSpec:
    if model_type not in MODEL_SPECS:
        raise ValueError(
            f"model_type {model_type!r} is not supported: known types are "
            f"{', '.join(sorted(MODEL_SPECS))}"
        )
    return MODEL_SPECS[model_type]
