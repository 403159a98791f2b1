"""Whole weights under their Hugging Face names, from a model whose ranks hold shards.

    for name, tensor in stream_weights(model, dtype, is_receiver=rank == 0): ...

Every rank iterates, because the gathers are collectives; only the receiver is given tensors. At
most one bucket of whole weights exists at a time; its gathers are queued on the device together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from areal.engine.process_group import any_rank
from areal.models.common.decoder import Decoder

BUCKET_BYTES = 256 << 20

Weights = Iterator[tuple[str, torch.Tensor]]  # Hugging Face names


@torch.no_grad()
def stream_weights(
    model: Decoder,
    dtype: torch.dtype,
    *,
    is_receiver: bool,
    merge: Callable[[str, torch.Tensor, torch.dtype], torch.Tensor] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor), rounded to `dtype`. A larger weight is a bucket of its own.

    merge: makes the whole tensor of our name that leaves, where it is not the weight itself.
    """
    gather = merge or _gather
    for bucket in _buckets(model.state_dict(), bucket_bytes):
        whole = {name: gather(name, tensor, dtype) for name, tensor in bucket.items()}
        for name in bucket:
            tensor = whole.pop(name)
            if is_receiver:
                yield from model.adapter.convert_single_to_hf(name, tensor)


def _gather(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor  # a buffer, the same on every rank
    return tensor.detach().to(dtype).full_tensor()


def _buckets(state: dict[str, torch.Tensor], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in state.items():
        num_bytes = tensor.numel() * tensor.element_size()  # of the whole, not of the shard
        if bucket and size + num_bytes > max_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += num_bytes
    if bucket:
        yield bucket


def hand_over(
    weights: Weights,
    consume: Callable[[Weights], None],
    ranks: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """The first rank gives the weights to `consume`; what it raises there ends the call on all."""
    if ranks is None:
        return consume(weights)
    failure: Exception | None = None
    if ranks.rank() == 0:
        try:
            consume(weights)
        except Exception as error:
            failure = error  # raised below: the others still wait for this rank's gathers
    for _ in weights:
        pass
    if any_rank(failure is not None, ranks, device):
        raise failure or RuntimeError("rank 0 could not pass the weights on: see its error")
