"""Spreading a decoder over a mesh: tensor parallel first, then shards of the weights (FSDP2).

    model = build_model(config, device="meta", dtype=torch.float32)
    parallelize(model, mesh, torch.bfloat16)
    model.to_empty(device=device); load_hf(model, path)      # every rank copies its own part

Shards are float32 and are the master weights. A block's are gathered when it runs, rounded to the
compute dtype on the way, and its gradients go back in float32, summed over the ranks (a rank's loss
is its share of the whole, so a sum and not a mean).

Tensor parallel: heads, feed-forward columns and rows of the vocabulary are cut over the axis tp.
Between blocks the tokens are (sequence parallel): a rank holds T / tp rows of the residual stream,
gathers them before a matrix and scatters the partial sums after it. Experts are not cut: each rank
sends its own T / tp rows through them, and their weights are sharded over tp like over dp.

Expert parallel: each rank of the axis ep holds some of the experts, and rows travel to them
(models/expert_parallel.py). What a rank holds is sharded over the axis efsdp. With etp = tp experts
are cut over tp like a dense feed-forward, and see all T rows.

Shape legend: T tokens, D model dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from areal.models.common.moe import MoE
from areal.models.expert_parallel import SpreadExperts, WholeTokens
from areal.models.parallel_dims import ParallelMesh

if TYPE_CHECKING:
    from areal.models.common.decoder import Decoder, DecoderBlock


def parallelize(
    model: Decoder, mesh: ParallelMesh, dtype: torch.dtype, *, keep_gathered: bool = False
) -> None:
    """Cut a float32 model (or pipeline stage) on the meta device, in place.

    dtype: what it computes in. keep_gathered: blocks stay whole from their first forward pass to
    `reshard`, for those who run many micro-batches in between.
    """
    if mesh.spreads_experts:
        _spread_experts(model, mesh)
    if mesh["tp"].size() > 1:
        _cut_over_tp(model, mesh["tp"], cuts_experts=_cuts_experts(mesh))
    _shard(model, mesh, dtype, keep_gathered)
    model.write = write_own_part


def _spread_experts(model: Decoder, mesh: ParallelMesh) -> None:
    for block in model.blocks:
        if isinstance(block.feed_forward, MoE):
            with torch.device("meta"):
                block.feed_forward.experts = SpreadExperts(model.args, mesh["ep", "etp"])


def _cuts_experts(mesh: ParallelMesh) -> bool:
    return mesh.spreads_experts and mesh["etp"].size() > 1


def _cut_over_tp(model: Decoder, tp: DeviceMesh, *, cuts_experts: bool) -> None:
    sequence = SequenceParallel(sequence_dim=0, use_local_output=True)
    plan: dict[str, ParallelStyle] = {}
    if model.tok_embeddings is not None:
        plan["tok_embeddings"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    if model.norm is not None:
        plan["norm"] = SequenceParallel(sequence_dim=0)  # a DTensor comes out: see gather_tokens
    if model.output is not None:
        plan["output"] = ColwiseParallel()  # cuts its rows; the module itself is never called
    if model.score is not None:
        plan["score"] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, tp, plan)
    for block in model.blocks:
        parallelize_module(block, tp, _block_plan(block, sequence, cuts_experts))
        # Gathered once for the matrices that read it, and still a DTensor: so their partial
        # gradients are added up before they are scattered.
        gather = PrepareModuleOutput(
            output_layouts=Shard(0), desired_output_layouts=Replicate(), use_local_output=False
        )
        parallelize_module(block.attention_norm, tp, gather)


def _block_plan(
    block: DecoderBlock, sequence: SequenceParallel, cuts_experts: bool
) -> dict[str, ParallelStyle]:
    gather = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))
    heads = SequenceParallel(sequence_dim=1, use_local_output=True)
    plan: dict[str, ParallelStyle] = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(0)),
    }
    if block.attention.q_norm is not None:
        plan |= {"attention.q_norm": heads, "attention.k_norm": heads}
    if not isinstance(block.feed_forward, MoE):
        plan |= {
            "feed_forward": gather,
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(0)),
        }
    elif cuts_experts:
        plan["feed_forward"] = WholeTokens()
    norms = {name for name, child in block.named_children() if isinstance(child, nn.RMSNorm)}
    return plan | dict.fromkeys(norms, sequence)


def _shard(model: Decoder, mesh: ParallelMesh, dtype: torch.dtype, keep_gathered: bool) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    weights_mesh = mesh.in_replicas("fsdp")
    options = {"mp_policy": policy, "reshard_after_forward": not keep_gathered}
    for block in model.blocks:
        if isinstance(block.feed_forward, MoE):
            _shard_moe(block.feed_forward, mesh, **options)
        fully_shard(block, mesh=weights_mesh, **options)
    # The head is read after the forward pass has ended, so the root's weights stay whole.
    fully_shard(model, mesh=weights_mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _shard_moe(moe: MoE, mesh: ParallelMesh, **options: Any) -> None:
    experts, spread = moe.experts, None
    if isinstance(experts, SpreadExperts):
        num_shards = mesh["efsdp"].size()
        spread = fully_shard(
            experts,
            mesh=mesh.in_replicas("efsdp"),
            shard_placement_fn=lambda weight: experts.shard_placement(weight, num_shards),
            **options,
        )
    # What is left: the router, and experts that are not spread.
    sharded = fully_shard(moe, mesh=mesh.in_replicas("fsdp_tp"), **options)
    if spread is not None:
        sharded.set_modules_to_forward_prefetch([spread])


def gather_tokens(hidden_TD: DTensor, *, partial_grad: bool) -> torch.Tensor:
    """[T, D] on every rank of tp from the T / tp rows each has after the last norm.

    partial_grad: each rank's gradient of the result is a part of a sum over the ranks, as with a
    head cut over the vocabulary; else all ranks have the same whole gradient.
    """
    whole_TD = hidden_TD.redistribute(placements=[Replicate()])
    return whole_TD.to_local(grad_placements=[Partial()] if partial_grad else None)


def whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor itself in `dtype`, or gathered from all ranks, which all call."""
    tensor = tensor.detach().to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the part of it that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def write_own_part(own: torch.Tensor, whole: torch.Tensor, index: int | None = None) -> None:
    """Copy into `own`, perhaps a shard, its part of `whole`, which every rank has.

    With `index`, `whole` [1, ...] is row `index` of the parameter alone. What another pipeline
    stage holds is on the meta device here, and is passed over.
    """
    if own.is_meta:
        return
    if not isinstance(own, DTensor):
        (own if index is None else own[index : index + 1]).copy_(whole)
        return
    local = own.to_local()
    shape, offset = compute_local_shape_and_global_offset(
        own.shape, own.device_mesh, own.placements
    )
    if not local.numel():
        return
    part = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    if index is not None:
        row = index - offset[0]
        if not 0 <= row < shape[0]:
            return
        local, part = local[row : row + 1], (slice(None), *part[1:])
    local.copy_(whole[part])
