"""Unsharded weights under their Hugging Face names, gathered from all ranks for one receiver.

    for name, tensor in stream_weights(model, dtype, is_receiver=rank == 0): ...

Every rank iterates, because the gathers are collectives; only the receiver gets tensors. At most
one bucket of unsharded weights exists at a time; its gathers are queued on the device together.
Pipeline stages gather their own weights and send them to the receiver (`StageLink`).

`hand_over` passes the stream to a consumer, such as a `sender`; `save_beside` adds other files.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import SaveLoadMeta, WeightUpdateMeta
from areal.engine.train.process_group import any_rank
from areal.models.common.decoder import Decoder
from areal.models.stage_layout import StageLayout
from areal.utils.hub import model_folder
from areal.weight_sync.transports import send_weights

BUCKET_BYTES = 256 << 20

Weights = Iterator[tuple[str, torch.Tensor]]  # Hugging Face names


@dataclass(frozen=True, slots=True)
class StageLink:
    """Path of a pipeline stage's weights to the receiver, which is the first rank."""

    layout: StageLayout
    group: dist.ProcessGroup  # this rank and those with the other stages
    reaches_receiver: bool  # whether the receiver is in the group
    device: torch.device


@torch.no_grad()
def stream_weights(
    model: Decoder,
    dtype: torch.dtype,
    *,
    is_receiver: bool,
    merge: Callable[[str, torch.Tensor, torch.dtype], torch.Tensor] | None = None,
    link: StageLink | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor), rounded to `dtype`. A larger weight is a bucket of its own.

    merge: (our name, unsharded weight) -> the tensor to export, such as one with LoRA merged.
    """
    gather = merge or _gather
    rounded = {name for name, _ in model.named_parameters()}  # buffers keep their dtype
    for bucket in _buckets(model.state_dict(), bucket_bytes):
        whole = {
            name: gather(name, tensor, dtype if name in rounded else tensor.dtype)
            for name, tensor in bucket.items()
        }
        if link is not None and link.reaches_receiver:
            whole = {name: _pass_on(name, tensor, link) for name, tensor in whole.items()}
        for name in bucket:
            tensor = whole.pop(name)
            if is_receiver:
                yield from model.adapter.convert_single_to_hf(name, tensor)


def _gather(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    tensor = tensor.detach().to(dtype)
    # A buffer is equal on every rank; weights of other stages are on the meta device.
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _pass_on(name: str, tensor: torch.Tensor, link: StageLink) -> torch.Tensor:
    """On the first rank, the tensor sent by its owner; every rank of the pipeline calls."""
    owner, rank = link.layout.owner_of(name), link.group.rank()
    if owner == 0:
        return tensor
    if rank == owner:
        dist.send(tensor.contiguous(), group=link.group, group_dst=0)
    elif rank == 0:
        tensor = torch.empty_like(tensor, device=link.device)
        dist.recv(tensor, group=link.group, group_src=owner)
    return tensor


def _buckets(state: dict[str, torch.Tensor], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in state.items():
        num_bytes = tensor.numel() * tensor.element_size()  # unsharded size
        if bucket and size + num_bytes > max_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += num_bytes
    if bucket:
        yield bucket


def sender(
    receiver: tuple[InferenceEngine, WeightUpdateMeta] | None,
    version: int | WeightUpdateMeta,
    *,
    are_copies: bool,
) -> Callable[[Weights], None]:
    """A function that sends weights to the connected engine as `version`; RuntimeError without one.

    `are_copies`: the tensors were gathered or merged, so they are not the model's own.
    """
    if receiver is None:
        raise RuntimeError("no inference engine is connected: call connect_engine() first")
    engine, meta = receiver
    if isinstance(version, WeightUpdateMeta):
        version = version.version

    def send(weights: Weights) -> None:
        if meta.type == "ipc" and are_copies:
            # The receiver maps this memory, so the copies must stay alive.
            held = list(weights)
            weights = iter(held)
        send_weights(engine, meta.with_version(version), weights)

    return send


def hand_over(
    weights: Weights,
    consume: Callable[[Weights], None],
    ranks: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """The first rank passes the weights to `consume`; an error of it is raised on all ranks."""
    if ranks is None:
        return consume(weights)
    failure: Exception | None = None
    if ranks.rank() == 0:
        try:
            consume(weights)
        except Exception as error:
            failure = error  # raised below: the other ranks still need this one's gathers
    for _ in weights:
        pass
    if any_rank(failure is not None, ranks, device):
        raise failure or RuntimeError("rank 0 could not pass the weights on: see its error")


def save_beside(meta: SaveLoadMeta, folder: Path) -> None:
    """Write tokenizer and generation config; `folder` is the one the model was loaded from."""
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
