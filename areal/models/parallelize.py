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

Shape legend: T tokens, D model dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from areal.models.common.moe import MoE
from areal.models.parallel_dims import ParallelDims, ParallelMesh

if TYPE_CHECKING:
    from areal.models.common.args import DecoderArgs
    from areal.models.common.decoder import Decoder, DecoderBlock


def check_layout(args: DecoderArgs, dims: ParallelDims) -> None:
    """ValueError, before anything is built, when this model cannot be cut like that."""
    counts = {
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "intermediate_size": args.hidden_dim,
        "vocab_size": args.vocab_size,
    }
    for key, count in counts.items():
        if count % dims.tp:
            raise ValueError(
                f"t{dims.tp} cannot cut this model: {key} of its config.json must be a multiple "
                f"of {dims.tp}, got {count}; choose another t"
            )
    heads, kv_heads = args.n_heads // dims.tp, args.n_kv_heads // dims.tp
    if heads % dims.cp or (kv_heads % dims.cp and dims.cp % kv_heads):
        raise ValueError(
            f"c{dims.cp} cannot cut this model: context parallel ranks divide its {heads} query "
            f"and {kv_heads} key-value heads (per rank of t{dims.tp}) among them; choose another c"
        )


def parallelize(model: Decoder, mesh: ParallelMesh, dtype: torch.dtype) -> None:
    """Cut a float32 model on the meta device, in place. `dtype` is what it computes in."""
    if mesh["tp"].size() > 1:
        _cut_over_tp(model, mesh["tp"])
    _shard(model, mesh, dtype)
    model.write = write_own_part


def _cut_over_tp(model: Decoder, tp: DeviceMesh) -> None:
    sequence = SequenceParallel(sequence_dim=0, use_local_output=True)
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(sequence_dim=0),  # a DTensor comes out: see gather_tokens
    }
    if model.output is not None:
        plan["output"] = ColwiseParallel()  # cuts its rows; the module itself is never called
    if model.score is not None:
        plan["score"] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, tp, plan)
    for block in model.layers.values():
        parallelize_module(block, tp, _block_plan(block, sequence))
        # Gathered once for the matrices that read it, and still a DTensor: so their partial
        # gradients are added up before they are scattered.
        gather = PrepareModuleOutput(
            output_layouts=Shard(0), desired_output_layouts=Replicate(), use_local_output=False
        )
        parallelize_module(block.attention_norm, tp, gather)


def _block_plan(block: DecoderBlock, sequence: SequenceParallel) -> dict[str, object]:
    gather = {"input_layouts": (Shard(0),), "desired_input_layouts": (Replicate(),)}
    heads = SequenceParallel(sequence_dim=1, use_local_output=True)
    plan = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(0)),
    }
    if block.attention.q_norm is not None:
        plan |= {"attention.q_norm": heads, "attention.k_norm": heads}
    if not isinstance(block.feed_forward, MoE):
        plan |= {
            "feed_forward": PrepareModuleInput(**gather),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(0)),
        }
    norms = {name for name, child in block.named_children() if isinstance(child, nn.RMSNorm)}
    return plan | dict.fromkeys(norms, sequence)


def _shard(model: Decoder, mesh: ParallelMesh, dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    weights_mesh = mesh.in_replicas("fsdp")
    for block in model.layers.values():
        if isinstance(block.feed_forward, MoE):
            fully_shard(block.feed_forward, mesh=mesh.in_replicas("fsdp_tp"), mp_policy=policy)
        fully_shard(block, mesh=weights_mesh, mp_policy=policy)
    # The head is read after the forward pass has ended, so the root's weights stay whole.
    fully_shard(model, mesh=weights_mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def gather_tokens(hidden_TD: DTensor, *, partial_grad: bool) -> torch.Tensor:
    """[T, D] on every rank of tp from the T / tp rows each has after the last norm.

    partial_grad: each rank's gradient of the result is a part of a sum over the ranks, as with a
    head cut over the vocabulary; else all ranks have the same whole gradient.
    """
    whole_TD = hidden_TD.redistribute(placements=[Replicate()])
    return whole_TD.to_local(grad_placements=[Partial()] if partial_grad else None)


@torch.no_grad()
def write_own_part(own: torch.Tensor, whole: torch.Tensor, index: int | None = None) -> None:
    """Copy into `own`, perhaps a shard, its part of `whole`, which every rank has.

    With `index`, `whole` [1, ...] is row `index` of the parameter alone.
    """
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
