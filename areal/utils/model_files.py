"""The files of a Hugging Face model folder: its config, and which safetensors are its weights.

No torch: `areal check` and `areal.utils.hub` read them before anything is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# A tokenizer needs at least one of these.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# Keys of a multi-modal config that apply to its language model unless that overrides them.
_SHARED_WITH_TEXT = (
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
)


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """The parsed config.json of a model folder."""
    file = Path(path) / CONFIG_FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} not found: a model is a folder with {CONFIG_FILE} and safetensors, "
            "or a hub name like org/name"
        )
    config = read_json(file)
    if "model_type" not in config:
        raise ValueError(f"{file} has no 'model_type': it is not the config of a model")
    return config


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multi-modal config; otherwise `config` itself."""
    if "text_config" not in config:
        return config
    architectures = [
        name.replace("ForConditionalGeneration", "ForCausalLM")
        for name in config.get("architectures") or ()
    ]
    shared = {key: config[key] for key in _SHARED_WITH_TEXT if key in config}
    default = {"model_type": f"{config['model_type']}_text", "architectures": architectures}
    return {**default, **shared, **config["text_config"]}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a model folder: one file, or the shards in its index."""
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise FileNotFoundError(
            f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}: "
            "convert its weights to safetensors"
        )
    names = shard_names(folder / INDEX_FILE)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder / INDEX_FILE} names missing files: {', '.join(missing)}")
    return [folder / name for name in names]


def shard_names(index: Path) -> list[str]:
    """The files of an index, all of them safetensors beside it."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map: expected weight name -> file")
    names = {str(name) for name in weight_map.values()}
    odd = sorted(name for name in names if "/" in name or not name.endswith(".safetensors"))
    if odd:
        raise ValueError(f"{index} names {odd[0]!r}: expected *.safetensors files beside it")
    return sorted(names)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    return parse_object(file, file.read_bytes())


def parse_object(file: Path, data: bytes) -> dict[str, Any]:
    """The JSON object in `data`, which was read from `file`."""
    try:
        content = json.loads(data)
    except ValueError as error:  # bad JSON or bad UTF-8
        raise ValueError(f"{file} is damaged: it is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is damaged: expected a JSON object, found {content!r:.40}")
    return content
