"""How a decoder is spread over a mesh, compiled, and what it recomputes.

    model = build_model(config, device="meta", dtype=torch.float32)
    parallelize(model, mesh, torch.bfloat16)
    model.to_empty(device=device); load_hf(model, path)      # every rank copies its own shard

Activation checkpointing (`checkpoint_blocks`). Losses and gradients are those of `none`:

| mode          | kept for backward                                 | recomputed                   |
|---------------|---------------------------------------------------|------------------------------|
| none          | what autograd saves                               | nothing                      |
| selective, op | results of matrix products and of attention       | norms, rotation, activations |
| selective, n  | the input of every n-th block, all of the others  | every n-th block             |
| full          | the input of each block                           | each block                   |
| memory_budget | what the compiler chooses within the given memory | the cheapest rest            |

A compiled block does `selective, op` anyway: its compiler recomputes what it can fuse into the
backward pass. `memory_budget` keeps less: 1.0 is that, 0.0 as little as `full` within each half.

Compilation (`compile_blocks`) covers the two halves of a block: before attention (norm,
projections, rotation) and after it (projection, residual, norm, feed-forward, residual). Attention
stays outside: it is one kernel already and depends on sequence lengths. All blocks share one
program per half, for any number of tokens, compiled in the first training and inference steps; the
blocks of a vision tower share two more. The halves of blocks that are sharded over tp are compiled
with their collectives; a rank that gets a single row of tokens compiles them once more for it.
Where blocks are whole, one program computes the second half of a block and the first of the next
(`chain_blocks`): each call of a program costs the host time beside launching its kernels.

Sharding (`parallelize`): tensor parallelism first, then FSDP2.
- FSDP: shards are float32 and are the master weights. A block is gathered when it runs, rounded to
  the compute dtype; gradients are reduced in float32 and summed, since a rank's loss is its share.
- Tensor: heads, feed-forward columns and vocabulary rows are sharded over tp. Between blocks tokens
  are (sequence parallel): a rank holds T / tp rows of the residual stream, gathers them before a
  matrix and reduce-scatters after it. Experts get the local rows; FSDP shards them over tp too.
- A vision tower is sharded by FSDP alone, block by block; every rank of cp runs all of it.
- Expert: ranks of ep hold some experts each, and rows are exchanged (models/expert_parallel.py);
  they are sharded over efsdp. With etp = tp experts are sharded over tp and see all T rows.

Shape legend: T tokens, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
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
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from areal.models.common.attention import Attend, Attention
from areal.models.common.lora_layers import LoraLinear
from areal.models.common.moe import MoE
from areal.models.expert_parallel import SpreadExperts, WholeTokens
from areal.models.parallel_dims import ParallelMesh

if TYPE_CHECKING:
    from areal.models.common.decoder import Decoder, DecoderBlock


_MAX_PROGRAMS = 64  # of one function; torch's own limit is 8
_EXPENSIVE_OPS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_grouped_mm",
    "areal::fp8_times_weight",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_flash_attention_forward",
    "torch_attn::_varlen_attn",
}


def checkpoint_blocks(model: Decoder, mode: str, *, selective_option: str, compiled: bool) -> None:
    """Set what the blocks of `model` recompute, in place. Parameters and their names stay."""
    for number, block in enumerate([*model.blocks, *model.tower_blocks]):
        if mode == "full" or (
            mode == "selective" and selective_option != "op" and number % int(selective_option) == 0
        ):
            block.forward = partial(_recomputed, block.forward)
        elif mode == "selective" and selective_option == "op" and not compiled:
            block.forward = partial(_recomputed, block.forward, context_fn=_keep_expensive)


def _recomputed(forward: Any, *args: Any, **context: Any) -> torch.Tensor:
    # Blocks use no randomness, so no RNG state needs to be saved.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **context)


def _keep_expensive() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_policy)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_expensive = op.name() in _EXPENSIVE_OPS
    return CheckpointPolicy.MUST_SAVE if is_expensive else CheckpointPolicy.PREFER_RECOMPUTE


def compile_blocks(model: Decoder, memory_budget: float | None = None) -> None:
    """Compile the blocks of `model` in place, when they first run.

    memory_budget: fraction of the memory kept for the backward pass; 1 recomputes no matrix
    product; None is 1.
    """
    # Models, kinds of blocks, training and inference share the programs of a function, and one
    # program too many would end the run.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MAX_PROGRAMS)
    for block in model.blocks:
        block.before = _half(block, "before", memory_budget)
        if not isinstance(block.feed_forward, MoE):  # rows per expert depend on data
            block.after = _half(block, "after", memory_budget)
    for tower_block in model.tower_blocks:
        for name in ("before", "after"):
            setattr(tower_block, name, _half(tower_block, name, memory_budget))


def _half(block: nn.Module, name: str, memory_budget: float | None) -> Callable[..., Any]:
    run = _compiled(getattr(type(block), name))
    if memory_budget is None:

        def call(*tensors: torch.Tensor) -> Any:
            return run(block, *map(_program_input, tensors))

        return call

    from torch._functorch import config

    def call_within_budget(*tensors: torch.Tensor) -> Any:
        # Around each call, since the first one compiles, and models differ in budget.
        with config.patch(activation_memory_budget=memory_budget):
            return run(block, *map(_program_input, tensors))

    return call_within_budget


def chain_blocks(model: Decoder) -> None:
    """Let compiled blocks run in a chain. Not those with experts, or that are recomputed as a
    whole, and never while a block has forward hooks: a chain calls its halves, not the block."""
    if not any("forward" in vars(b) or isinstance(b.feed_forward, MoE) for b in model.blocks):
        model.chain = _run_chain


def _run_chain(
    blocks: Sequence[DecoderBlock],
    x_TD: torch.Tensor,
    rotations: Sequence[tuple[torch.Tensor, ...]],
    attend: Attend,
) -> torch.Tensor:
    run, last = _compiled(_after_and_before), blocks[-1]
    read = blocks[0].before(x_TD, *rotations[0])
    for block, following, cos_sin in zip(blocks, blocks[1:], rotations[1:], strict=False):
        mixed = block.mix(attend, *read)
        del read  # the program's own activations need the memory
        tensors = map(_program_input, (x_TD, *cos_sin, *mixed))
        x_TD, *read = run(block, following, *tensors)
    return last.after(x_TD, *last.mix(attend, *read))


def _after_and_before(
    block: DecoderBlock,
    following: DecoderBlock,
    x_TD: torch.Tensor,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    *mixed: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The block's output, and what the following one's `mix` reads."""
    x_TD = type(block).after(block, x_TD, *mixed)  # not the halves' programs, which blocks have
    return x_TD, *type(following).before(following, x_TD, cos_TR, sin_TR)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def _program_input(tensor: torch.Tensor) -> torch.Tensor:
    """With any number of rows, and complete: embeddings sharded over tp are still on their way,
    which would be a program of its own for the first block."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.clone()  # waits, and keeps the autograd graph, unlike its `wait`
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


def parallelize(
    model: Decoder,
    mesh: ParallelMesh,
    dtype: torch.dtype,
    *,
    reduce_dtype: torch.dtype = torch.float32,
    keep_gathered: bool = False,
) -> None:
    """Shard a float32 model (or pipeline stage) on the meta device, in place.

    dtype: compute dtype. reduce_dtype: that of sums of gradients over ranks. keep_gathered: blocks
    stay unsharded from their first forward pass to `reshard`, for callers that run many
    micro-batches in between.
    """
    if mesh.spreads_experts:
        _spread_experts(model, mesh)
    if mesh["tp"].size() > 1:
        _cut_over_tp(model, mesh["tp"], cuts_experts=_cuts_experts(mesh))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    _shard(model, mesh, policy, keep_gathered)
    model.write = write_own_part


def _spread_experts(model: Decoder, mesh: ParallelMesh) -> None:
    for block in model.blocks:
        if isinstance(block.feed_forward, MoE):
            with torch.device("meta"):
                spread = SpreadExperts(model.args, mesh["ep", "etp"])
                spread.take_adapters(block.feed_forward.experts)
                block.feed_forward.experts = spread


def _cuts_experts(mesh: ParallelMesh) -> bool:
    return mesh.spreads_experts and mesh["etp"].size() > 1


def _cut_over_tp(model: Decoder, tp: DeviceMesh, *, cuts_experts: bool) -> None:
    frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
    sequence = SequenceParallel(sequence_dim=0, use_local_output=True)
    plan: dict[str, ParallelStyle] = {}
    if model.tok_embeddings is not None:
        plan["tok_embeddings"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    if model.norm is not None:
        plan["norm"] = SequenceParallel(sequence_dim=0)  # outputs a DTensor: see gather_tokens
    if model.output is not None:
        plan["output"] = ColwiseParallel()  # shards its rows; the module itself is never called
    if model.score is not None:
        plan["score"] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, tp, plan)
    for block in model.blocks:
        parallelize_module(block, tp, _block_plan(block, sequence, cuts_experts))
        # Gathered once for the matrices that read it, and kept as a DTensor, so that their partial
        # gradients are summed before the reduce-scatter.
        gather = PrepareModuleOutput(
            output_layouts=Shard(0), desired_output_layouts=Replicate(), use_local_output=False
        )
        parallelize_module(block.attention_norm, tp, gather)
        for layer in block.modules():
            if isinstance(layer, LoraLinear):
                layer.cut_like_weight(tp)
    for name, weight in model.named_parameters():
        weight.requires_grad_(name not in frozen)  # some styles make parameters that are trained


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
    if isinstance(block.attention, Attention) and block.attention.q_norm is not None:
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


def _shard(
    model: Decoder, mesh: ParallelMesh, policy: MixedPrecisionPolicy, keep_gathered: bool
) -> None:
    weights_mesh = mesh.in_replicas("fsdp")
    options = {"mp_policy": policy, "reshard_after_forward": not keep_gathered}
    for block in model.blocks:
        if isinstance(block.feed_forward, MoE):
            _shard_moe(block.feed_forward, mesh, **options)
        fully_shard(block, mesh=weights_mesh, **options)
    for block in model.tower_blocks:
        fully_shard(block, mesh=weights_mesh, **options)
    # The head is read after the forward pass, so the root's weights stay unsharded.
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
    # The rest: the router, and experts without expert parallelism.
    sharded = fully_shard(moe, mesh=mesh.in_replicas("fsdp_tp"), **options)
    if spread is not None:
        sharded.set_modules_to_forward_prefetch([spread])


def gather_tokens(hidden_TD: DTensor, *, partial_grad: bool) -> torch.Tensor:
    """[T, D] on every rank of tp from the T / tp rows each has after the last norm.

    partial_grad: gradients of the result are summed over the ranks, as with a head sharded over
    the vocabulary; else all ranks have the same full gradient.
    """
    whole_TD = hidden_TD.redistribute(placements=[Replicate()])
    return whole_TD.to_local(grad_placements=[Partial()] if partial_grad else None)


def whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in `dtype`, gathered if sharded; all ranks call."""
    tensor = tensor.detach().to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or this rank's shard of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def write_own_part(own: torch.Tensor, whole: torch.Tensor, index: int | None = None) -> None:
    """Copy into `own`, possibly a shard, its part of `whole`, which every rank has.

    With `index`, `whole` [1, ...] is row `index` of the parameter alone. Weights of other pipeline
    stages are on the meta device, and are skipped.
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
