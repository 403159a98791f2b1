"""Unsharded weights under their Hugging Face names, gathered from all ranks for one receiver.

    for name, tensor in stream_weights(model, dtype, is_receiver=rank == 0): ...

Every rank iterates, because the gathers are collectives; only the receiver gets tensors. At most
one bucket of unsharded weights exists at a time; its gathers are queued on the device together.
Pipeline stages gather their own weights and send them to the receiver (`StageLink`).

`send_weights` offers such weights by a transport and has an inference engine load them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from areal.api.engine_api import InferenceEngine
from areal.api.io_struct import WeightUpdateMeta
from areal.models.common.decoder import Decoder
from areal.models.lora import LoraAdapters
from areal.models.parallelize import whole
from areal.models.stage_layout import StageLayout
from areal.weight_sync.transports import offer_weights

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
) -> Weights:
    """(Hugging Face name, tensor), rounded to `dtype`. A larger weight is a bucket of its own.

    merge: (our name, unsharded weight) -> the tensor to export, such as one with LoRA merged.
    """
    gather = merge or (lambda name, tensor, dtype: whole(tensor, dtype))
    rounded = {name for name, _ in model.named_parameters()}  # buffers keep their dtype
    for bucket in _buckets(model.state_dict(), bucket_bytes):
        gathered = {
            name: gather(name, tensor, dtype if name in rounded else tensor.dtype)
            for name, tensor in bucket.items()
        }
        if link is not None and link.reaches_receiver:
            gathered = {name: _pass_on(name, tensor, link) for name, tensor in gathered.items()}
        for name in bucket:
            tensor = gathered.pop(name)
            if is_receiver:
                yield from model.adapter.convert_single_to_hf(name, tensor)


@torch.no_grad()
def stream_adapters(
    adapters: LoraAdapters, *, is_receiver: bool, link: StageLink | None = None
) -> Weights:
    """Trained weights alone, under their names in the adapter's file."""
    pass_on = None
    if link is not None and link.reaches_receiver:
        pass_on = partial(_pass_on, link=link)
    return adapters.tensors(is_receiver=is_receiver, pass_on=pass_on)


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


def send_weights(
    engine: InferenceEngine, meta: WeightUpdateMeta, weights: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """When it returns, `engine` serves the weights as `meta.version`.

    RuntimeError if it refuses them; its old weights then stay live.
    """
    with offer_weights(meta, weights) as tensors:
        engine.update_weights(meta, tensors)
