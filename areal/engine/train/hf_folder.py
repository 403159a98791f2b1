"""A folder of Hugging Face weights an engine writes: what lies beside them, what it cannot hold."""

from __future__ import annotations

import shutil
from pathlib import Path

from areal.api.io_struct import SaveLoadMeta
from areal.utils.hub import model_folder


def save_beside(meta: SaveLoadMeta, folder: Path) -> None:
    """What a reader wants beside the weights; `folder` is the one the model came from."""
    if meta.base_model_path is not None:
        folder = model_folder(meta.base_model_path, weights=False)
    generation_config = folder / "generation_config.json"
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
