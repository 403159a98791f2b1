"""Weights of a Hugging Face model by their names in a checkpoint, in and out, also when sharded.

In: tensors are streamed from safetensors, each rank keeping its own part of one at a time. Every
name and shape is checked against the files' headers before the first byte is copied. A checkpoint
whose names are not the module's (experts in one file each, older names) goes through transformers'
own conversion, which holds the whole model in the memory of the CPU.
Out: one whole tensor at a time, under the checkpoint's names; a collective when sharded, so that
all ranks iterate, and the first is given them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from areal.engine.train.weight_stream import Weights
from areal.models.hf_io import read_shapes, weight_files
from areal.models.parallelize import whole, write_own_part

_ADAPTER_MARK = ".lora_"
_WRAPPED_MARK = ".base_layer."


def hf_tensors(hf: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers by checkpoint name, as they lie; adapters are left out."""
    unsaved = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in hf.named_modules()
        for name in module._non_persistent_buffers_set
    }
    named = {**dict(hf.named_parameters()), **dict(hf.named_buffers())}
    return {
        name.replace(_WRAPPED_MARK, "."): tensor.detach()
        for name, tensor in named.items()
        if _ADAPTER_MARK not in name and name not in unsaved
    }


def load_weights(hf: PreTrainedModel, path: str | Path, *, without: Sequence[str] = ()) -> None:
    """Fill `hf` from a folder; every weight must be there but those `without`."""
    files = weight_files(Path(path))
    found = read_shapes(files)
    wanted = {name: t.shape for name, t in hf_tensors(hf).items() if name not in without}
    # What a folder holds beyond the model (a tied head, the LM head below a critic) does no harm.
    missing = [name for name in wanted if name not in found]
    misfits = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(shape) != found[name]
    ]
    if misfits or not missing:
        _refuse(misfits, hf, path)
        copy_weights(hf, _stream(files))
    else:
        copy_weights(hf, _converted(hf, path, without))


def _converted(
    hf: PreTrainedModel, path: str | Path, without: Sequence[str]
) -> Iterable[tuple[str, torch.Tensor]]:
    loaded: Any = type(hf).from_pretrained(
        path,
        config=hf.config,
        dtype=hf.dtype,
        local_files_only=True,
        use_safetensors=True,  # never a pickle beside them
        output_loading_info=True,  # makes it a pair
    )
    model, info = loaded
    absent = set(info["missing_keys"]) - set(without)
    _refuse([f"missing {name}" for name in sorted(absent)], hf, path)
    _refuse([str(fault) for fault in info["mismatched_keys"]], hf, path)
    return hf_tensors(model).items()


def _refuse(faults: list[str], hf: PreTrainedModel, path: str | Path) -> None:
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if faults[8:] else "")
        raise ValueError(f"weights of {path} do not fit this {hf.config.model_type}: {shown}")


def _stream(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is not a mapping)
                yield name, tensors.get_tensor(name)


@torch.no_grad()
def copy_weights(hf: PreTrainedModel, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy whole tensors in by name; names the model does not have are passed over."""
    own = hf_tensors(hf)
    for name, tensor in named:
        if name in own:
            write_own_part(own[name], tensor)


@torch.no_grad()
def whole_weights(
    hf: PreTrainedModel,
    dtype: torch.dtype,
    merge: Callable[[str, torch.Tensor, torch.dtype], torch.Tensor] | None,
    *,
    is_receiver: bool,
) -> Weights:
    """(checkpoint name, whole tensor); `merge` makes the tensor of a name that leaves.

    Who is not the receiver takes part in the gathers and is given nothing.
    """
    renamed = bool(get_model_conversion_mapping(hf, add_legacy=False))
    for name, tensor in hf_tensors(hf).items():
        if not tensor.is_floating_point():
            continue
        out = whole(tensor, dtype) if merge is None else merge(name, tensor, dtype)
        if is_receiver and renamed:
            yield from revert_weight_conversion(hf, {name: out}).items()
        elif is_receiver:
            yield name, out


@torch.no_grad()
def draw_weights(hf: PreTrainedModel, seed: int) -> None:
    """Fresh weights by the model's own rule: a function of config and seed, equal on all ranks."""
    # On the CPU whatever the layout: generators of devices and shards draw other numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = type(hf)._from_config(hf.config, dtype=torch.float32)
    copy_weights(hf, hf_tensors(fresh).items())


def fill_buffers(hf: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint holds (rotary tables), lost on the meta device."""
    for module in hf.modules():
        if module._non_persistent_buffers_set:
            hf._init_weights(module)
