"""A folder of Hugging Face weights an engine writes: what lies beside them, what it cannot hold."""

from __future__ import annotations

import shutil
from pathlib import Path

from areal.api.io_struct import SaveLoadMeta


def save_beside(meta: SaveLoadMeta, model_path: str) -> None:
    """What a reader of the folder wants beside the weights."""
    generation_config = Path(meta.base_model_path or model_path) / "generation_config.json"
    if generation_config.is_file():
        shutil.copy(generation_config, meta.path)
    for part in (meta.tokenizer, meta.processor):
        if part is not None:
            part.save_pretrained(meta.path)


def refuse_optimizer(meta: SaveLoadMeta) -> None:
    if meta.with_optim:
        raise ValueError(
            "weight_format='hf' holds weights only: use weight_format='dcp' for the optimizer"
        )
