"""How a model is spread over ranks: the mesh, FSDP2 by block, recomputation, empty memory.

FSDP keeps each rank's part of the float32 weights; a block is gathered in the compute dtype when
it runs, forward and backward, and its gradients are summed over ranks in float32. One rank without
offload needs none of it and stays a plain module.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from areal.engine.train.fsdp.model import PackedModel
from areal.engine.train.fsdp.weights import fill_buffers
from areal.engine.train.process_group import join_alone
from areal.models.parallel_dims import ParallelDims, ParallelMesh


def one_rank_mesh(device: torch.device) -> ParallelMesh:
    """A mesh of this process alone, for what FSDP does also there: offload."""
    join_alone(device)
    return ParallelDims().build_mesh(device.type)


def recompute_blocks(model: PackedModel) -> None:
    """Keep only the inputs of each block and run it again in the backward pass."""
    for block in model.blocks():
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )


def shard_model(
    model: PackedModel, mesh: ParallelMesh, *, compute_dtype: torch.dtype, offload: bool
) -> None:
    """Make the weights sharded ones, still on the meta device."""
    options = {
        "mesh": mesh["dp_replicate", "fsdp"] if mesh["dp_replicate"].size() > 1 else mesh["fsdp"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32),
    }
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for block in model.blocks():
        fully_shard(block, **options)
    fully_shard(model, **options)
    # The loss of a rank is its share of the whole one: gradients are summed, not averaged.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def materialise(model: PackedModel, device: torch.device, *, offload: bool) -> None:
    """Give the model memory, undefined but for the buffers that are computed."""
    model.to_empty(device="cpu" if offload else device)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    fill_buffers(model.hf)
