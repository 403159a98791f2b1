"""Makes a whole model of an adapter and the model it was trained for.

    merge_adapter("run/model", "base", out)       # folders; `out` is then one of Hugging Face

Weights are summed in float32 and have the base's dtype. One weight is in memory at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from areal.models.hf_io import critic_config, read_shapes, save_hf
from areal.models.lora_files import FILE_PREFIX, read_peft
from areal.utils.model_files import read_hf_config, weight_files

_COPIED = (".json", ".jinja", ".txt", ".model")  # tokenizer, chat template, generation config


def merge_adapter(adapter: Path, base: Path, out: Path) -> None:
    """Fill the folder `out`. ValueError if the adapter has weights that the base lacks."""
    tensors, alpha = read_peft(adapter)
    shapes = read_shapes(weight_files(base))
    pending = {_file_name(name, shapes): tensor for name, tensor in tensors.items()}
    is_critic = "score.weight" in pending
    layers = {name.rpartition(".lora_")[0] for name in pending if ".lora_" in name}
    if missing := sorted(layer for layer in layers if f"{layer}.weight" not in shapes):
        raise ValueError(f"{adapter} was not trained for {base}, which has no {missing[0]}")
    config = read_hf_config(base)
    out.mkdir(parents=True, exist_ok=True)
    _copy_texts(base, out)
    _copy_texts(adapter, out)
    whole = {name: tensor for name, tensor in pending.items() if ".lora_" not in name}
    weights = _merged(base, layers, pending, alpha, whole)
    save_hf(weights, critic_config(config) if is_critic else config, out)


def _file_name(name: str, shapes: Mapping[str, Any]) -> str:
    """Name of an adapter's tensor after that of its layer in the files of `base`.

    Adapters have the names of modules, where some vision models nest the decoder deeper."""
    name = name.removeprefix(FILE_PREFIX)
    if f"{name.rpartition('.lora_')[0]}.weight" in shapes:
        return name
    return name.replace("model.language_model.", "model.", 1)


def _merged(
    base: Path,
    layers: set[str],
    tensors: dict[str, torch.Tensor],
    alpha: float,
    whole: dict[str, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor]]:
    """`whole`: weights that were trained in full, such as a critic's head."""
    for file in weight_files(base):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (safe_open is not a mapping)
                if name in whole:
                    continue
                weight, layer = weights.get_tensor(name), name.removesuffix(".weight")
                if layer in layers:
                    a_RD, b_NR = (tensors[f"{layer}.lora_{matrix}.weight"] for matrix in "AB")
                    yield name, merged_weight(weight, a_RD, b_NR, alpha)
                else:
                    yield name, weight
    yield from whole.items()


def merged_weight(
    weight: torch.Tensor, a_RD: torch.Tensor, b_NR: torch.Tensor, alpha: float
) -> torch.Tensor:
    """Summed in float32 on the device of `a_RD`; in the weight's dtype."""
    a_RD, b_NR = a_RD.float(), b_NR.float()
    return (weight.to(a_RD) + alpha / len(a_RD) * (b_NR @ a_RD)).to(weight.dtype)


def _copy_texts(source: Path, target: Path) -> None:
    for file in source.iterdir():
        is_weights = file.name.endswith(".index.json") or file.name.startswith("adapter_")
        if file.suffix in _COPIED and not is_weights and file.is_file():
            shutil.copy(file, target)
