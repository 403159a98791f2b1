"""Weights of a Hugging Face model: loading, gathering, tensor parallelism.

Load: tensors are streamed from safetensors, one at a time, and each rank keeps its shard. Every
name and shape is checked against the files' headers before the first byte is copied. A checkpoint
whose names differ from the module's (one tensor per expert, older names) goes through transformers'
own conversion, which holds the whole model in CPU memory.
Gather: one unsharded tensor at a time, under the checkpoint's names. Gathers are collectives: all
ranks iterate, and only the first gets tensors.

Tensor parallelism by DTensor follows `base_model_tp_plan` of the model's config, which names the
column-wise and row-wise matrices; the residual stream is replicated. Embedding and LM head are
sharded by vocabulary rows, so each rank has the logits of its own part (engine/train/logprobs.py).
Weights not in the plan are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from areal.engine.train.export import Weights
from areal.models.hf_io import read_shapes, weight_files
from areal.models.parallel_dims import ParallelDims, check_heads
from areal.models.parallelize import whole, write_own_part

_ADAPTER_MARK = ".lora_"
_WRAPPED_MARK = ".base_layer."


def hf_tensors(hf: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers by checkpoint name, not copied; adapters are left out."""
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
    """Fill `hf` from a folder; every weight must be present except those in `without`."""
    files = weight_files(Path(path))
    found = read_shapes(files)
    wanted = {name: t.shape for name, t in hf_tensors(hf).items() if name not in without}
    # Extra tensors (a tied head, the LM head below a critic) are ignored.
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
        use_safetensors=True,  # never a pickle
        output_loading_info=True,  # returns a pair
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
    """Copy unsharded tensors in by name; unknown names are skipped."""
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
    """(checkpoint name, unsharded tensor), each passed through `merge`.

    Ranks other than the receiver take part in the gathers and get nothing.
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
    # Always on the CPU: device generators and shards would draw other numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = type(hf)._from_config(hf.config, dtype=torch.float32)
    copy_weights(hf, hf_tensors(fresh).items())


def fill_buffers(hf: PreTrainedModel) -> None:
    """Recompute buffers that no checkpoint holds (rotary tables), lost on the meta device."""
    # The innermost model around a module knows it: a vision tower may be of another family.
    owner_of: dict[nn.Module, PreTrainedModel] = {}
    for model in hf.modules():
        if isinstance(model, PreTrainedModel):
            owner_of |= dict.fromkeys(model.modules(), model)
    with _kept(hf):
        for module, owner in owner_of.items():
            if module._non_persistent_buffers_set:
                owner._init_weights(module)


@contextmanager
def _kept(hf: PreTrainedModel) -> Iterator[None]:
    """Parameters are not drawn by transformers' initialization, which honours this mark."""
    mark = "_is_hf_initialized"
    for parameter in hf.parameters():
        setattr(parameter, mark, True)
    yield
    for parameter in hf.parameters():
        delattr(parameter, mark)


def check_layout(hf: PreTrainedModel, dims: ParallelDims) -> None:
    """ValueError, before memory is allocated, if the model does not fit these dims."""
    config = hf.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    check_heads(heads, kv_heads, dims)


def cut_over_tp(hf: PreTrainedModel, tp: DeviceMesh) -> None:
    """Make the plan's weights DTensors over `tp`, in place, on the meta device."""
    plan = hf.config.get_text_config().base_model_tp_plan or {}
    if not plan:
        raise ValueError(
            f"{type(hf).__name__} has no base_model_tp_plan, so t{tp.size()} cannot cut it: use "
            "d or c instead"
        )
    parallelize_module(hf.base_model, tp, {name: _style(hf, plan[name]) for name in plan})
    _cut_vocabulary(hf, tp)


def _style(hf: PreTrainedModel, name: str) -> ParallelStyle:
    if name == "colwise":
        return ColwiseParallel()
    if name == "rowwise":
        return RowwiseParallel()
    if name == "replicated_with_grad_allreduce":
        # A norm per head [1, T, heads, H]: heads are sharded, so its gradient is a sum over ranks.
        return SequenceParallel(sequence_dim=2, use_local_output=True)
    raise ValueError(
        f"the tensor parallel plan of {type(hf).__name__} asks for {name!r}, which is not known "
        "here: use d or c instead"
    )


def _cut_vocabulary(hf: PreTrainedModel, tp: DeviceMesh) -> None:
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    # An embedding that does more than look up stays replicated, and so does a head tied to it.
    if type(embedding) is not nn.Embedding or embedding.num_embeddings % tp.size():
        return
    parallelize_module(embedding, tp, RowwiseParallel(input_layouts=Replicate()))
    if isinstance(head, nn.Linear):
        parallelize_module(head, tp, ColwiseParallel(output_layouts=Replicate()))


def with_partial_gradient(hidden_TD: torch.Tensor, tp: DeviceMesh) -> torch.Tensor:
    """The same tensor on every rank; its gradient is summed over the ranks."""
    whole = DTensor.from_local(hidden_TD, tp, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])
