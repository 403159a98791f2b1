"""Weights as a folder that every Hugging Face loader reads: links to them, not copies.

    weight_update_v7/hf/
      model-00001-of-00002.safetensors -> ../bucket_00000.safetensors ...
      model.safetensors.index.json     which weight is in which file
      config.json, tokenizer.json ...  copies: a server's machine may lack the model's own folder
      lm_head.safetensors              with_lm_head, where the weights have none

For inference servers that load a Hugging Face path. A separate head, a copy of the embedding, is
for servers that cannot update a head tied to the embedding.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from areal.utils.fs import atomic_folder
from areal.utils.model_files import weight_files
from areal.weight_sync.publication import Publication
from areal.weight_sync.tied_head import LM_HEAD, embedding_for_head

_FOLDER = "hf"
_INDEX = "model.safetensors.index.json"
_LM_HEAD_FILE = "lm_head.safetensors"
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".gguf")


def hf_folder_of(
    publication: Publication, model_folder: str | Path, *, with_lm_head: bool = False
) -> Path:
    """The folder inside a publication, removed with it, created if absent.

    Files other than weights are those of `model_folder`.
    """
    made = find_hf_folder(publication.folder)
    if made is not None:
        return made
    source = publication.folder.absolute()
    files = [source / bucket.file for bucket in publication.manifest.buckets]
    _write(source / _FOLDER, files, Path(model_folder), with_lm_head)
    return source / _FOLDER


def find_hf_folder(publication: str | Path) -> Path | None:
    """What `hf_folder_of` has made in the folder of a publication, which was then verified."""
    made = Path(publication).absolute() / _FOLDER
    return made if made.is_dir() else None


def folder_with_lm_head(model_folder: str | Path, target: Path) -> Path:
    """`model_folder` if its weights have a head, else `target`, filled with the same plus one."""
    model_folder = Path(model_folder)
    files = weight_files(model_folder.absolute())
    if any(LM_HEAD in _names(file) for file in files):
        return model_folder
    _write(target, files, model_folder, with_lm_head=True)
    return target


def _write(target: Path, files: Sequence[Path], model_folder: Path, with_lm_head: bool) -> None:
    weight_map: dict[str, str] = {}
    with atomic_folder(target, durable=False) as folder:
        for number, file in enumerate(files, start=1):
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            (folder / name).symlink_to(file)
            weight_map |= dict.fromkeys(_names(file), name)
        if with_lm_head and LM_HEAD not in weight_map:
            _copy_embedding(folder, weight_map)
            weight_map[LM_HEAD] = _LM_HEAD_FILE
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        for file in sorted(model_folder.absolute().iterdir()):
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copyfile(file, folder / file.name)


def _copy_embedding(folder: Path, weight_map: dict[str, str]) -> None:
    name = embedding_for_head(weight_map, where=str(folder))
    with safe_open(folder / weight_map[name], framework="pt") as tensors:
        embedding = tensors.get_tensor(name)
    save_file({LM_HEAD: embedding}, folder / _LM_HEAD_FILE, metadata={"format": "pt"})


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as tensors:
        return list(tensors.keys())
