"""The files of an adapter, in peft's format with Hugging Face names; peft itself is not needed.

Apart from lora.py, which trains: servers and clients read and write adapters, and need none of
torch's sharding, whose import takes them a second.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from areal.utils.hub import hub_name
from areal.utils.model_files import read_json

ADAPTER_FILE = "adapter_model.safetensors"
_CONFIG_FILE = "adapter_config.json"
FILE_PREFIX = "base_model.model."
# Keys of a config that change what an adapter computes, with the values that do not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}


def read_peft(folder: str | Path) -> tuple[dict[str, torch.Tensor], float]:
    """Tensors by their names in the file, and alpha, of a folder that peft or areal wrote.

    ValueError for what is more than A, B and a factor.
    """
    file, config_file = Path(folder) / ADAPTER_FILE, Path(folder) / _CONFIG_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{file} not found: expected the folder of a PEFT adapter")
    config = read_json(config_file)
    for key, plain in _PLAIN.items():
        if config.get(key, plain[0]) not in plain:
            raise ValueError(f"{config_file}: {key} is {config[key]!r}, expected {plain[0]!r}")
    alpha = config.get("lora_alpha")
    if (
        not isinstance(alpha, int | float)
        or isinstance(alpha, bool)
        or not 0 < alpha <= sys.float_info.max
    ):
        raise ValueError(f"{config_file}: lora_alpha is {alpha!r}, expected a number above 0")
    try:
        return load_file(file), float(alpha)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error


def write_peft(
    tensors: Mapping[str, torch.Tensor], folder: Path, *, alpha: float, base_model: str
) -> None:
    """A folder as lora.py's `save` makes it, of a policy's A and B under their names in the
    file; what its config says of them is read from them."""
    save_file(dict(tensors), folder / ADAPTER_FILE, metadata={"format": "pt"})
    layers = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
    rank = next(len(tensor) for name, tensor in tensors.items() if ".lora_A" in name)
    shape = {"r": rank, "lora_alpha": alpha, "target_modules": sorted(layers)}
    write_peft_config(folder, {**base_model_keys(base_model), **shape}, is_critic=False)


def write_peft_config(folder: Path, own: Mapping[str, Any], *, is_critic: bool) -> None:
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_critic else "CAUSAL_LM",
        **own,
        "lora_dropout": 0.0,
        "bias": "none",
        "modules_to_save": ["score"] if is_critic else None,
        "inference_mode": True,
    }
    (folder / _CONFIG_FILE).write_text(json.dumps(config, indent=2), encoding="utf-8")


def base_model_keys(base_model: str) -> dict[str, str]:
    """A folder, or a hub name with its revision."""
    name = hub_name(base_model)
    if name is None:
        return {"base_model_name_or_path": base_model}
    revision = {} if name.revision is None else {"revision": name.revision}
    return {"base_model_name_or_path": name.repo, **revision}
