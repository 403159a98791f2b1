"""Parallel layout of megatron-core, and micro-batches through its schedules.

    layout = enter_layout(ModelAllocation.from_str("megatron:d2t2").parallel, device)

Layout: megatron-core keeps its process groups in globals (`megatron.core.parallel_state`), so there
is one layout per process. The first engine creates it; further ones (a reference model beside the
actor) must have the same. Axes from the fastest to the slowest: tensor, context, data, pipeline.

Schedules (`run_micro_batches`): all ranks of a pipeline get the same micro-batches; only the last
stage sees the model's outputs and broadcasts the results. Ranks with several stages interleave
them. That schedule needs a multiple of the pipeline ranks and one length: micro-batches are
repeated to fill the last round (results unused), and padded to the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import nn

from areal.api.alloc_mode import ParallelStrategy
from areal.engine.train.micro_batches import MicroBatch, OutputFn
from areal.engine.train.process_group import join_alone


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the whole layout, and this rank's groups."""

    strategy: ParallelStrategy
    tp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup  # ranks with other rows of the batch
    pp: dist.ProcessGroup
    ep: dist.ProcessGroup
    expert_tp: dist.ProcessGroup

    @property
    def has_first_stage(self) -> bool:
        return self.pp.rank() == 0

    @property
    def has_last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    @property
    def token_multiple(self) -> int:
        """Ranks that the tokens of a micro-batch are sharded over."""
        return self.cp.size() * self.tp.size()

    @property
    def is_head(self) -> bool:
        """Whether this is the first rank of the last stage among those with the same rows."""
        return self.has_last_stage and self.tp.rank() == self.cp.rank() == 0


def enter_layout(strategy: ParallelStrategy, device: torch.device) -> Layout:
    """Every rank of torch.distributed calls this; without torch.distributed, world size is 1."""
    join_alone(device)
    if dist.get_world_size() != strategy.world_size:
        raise ValueError(
            f"the layout megatron:{strategy} needs {strategy.world_size} ranks, but "
            f"{dist.get_world_size()} processes were started: start as many, or change the "
            "backend string"
        )
    sizes: dict[str, Any] = {
        "tensor_model_parallel_size": strategy.tensor_parallel_size,
        "pipeline_model_parallel_size": strategy.pipeline_parallel_size,
        "context_parallel_size": strategy.context_parallel_size,
        "expert_model_parallel_size": strategy.expert_parallel_size,
        "expert_tensor_parallel_size": strategy.expert_tensor_parallel_size,
    }
    if parallel_state.model_parallel_is_initialized():
        _check_same(strategy, sizes)
    else:
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        if device.type == "cuda":
            # Its modules require these generators even if nothing is drawn.
            model_parallel_cuda_manual_seed(1)
    groups: dict[str, Any] = {  # never None: this rank is in one of each kind
        "tp": parallel_state.get_tensor_model_parallel_group(),
        "cp": parallel_state.get_context_parallel_group(),
        "dp": parallel_state.get_data_parallel_group(),
        "pp": parallel_state.get_pipeline_model_parallel_group(),
        "ep": parallel_state.get_expert_model_parallel_group(),
        "expert_tp": parallel_state.get_expert_tensor_parallel_group(),
    }
    return Layout(strategy, **groups)


def _check_same(strategy: ParallelStrategy, sizes: Mapping[str, int]) -> None:
    found = {
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }
    if found != sizes:
        others = ", ".join(f"{key}={size}" for key, size in found.items())
        raise ValueError(
            f"megatron-core has one layout per process, and another engine has chosen {others}: "
            f"give every megatron engine of the process the same backend, not megatron:{strategy}"
        )


def run_micro_batches(
    models: Sequence[nn.Module],
    mbs: list[MicroBatch],
    output_fn: OutputFn,
    layout: Layout,
    *,
    forward_only: bool,
) -> list[torch.Tensor]:
    """`output_fn` of each micro-batch, detached; unless `forward_only`, `models` (this rank's
    stages) get the gradients of the sum over micro-batches and ranks."""
    device = next(models[0].parameters()).device
    is_interleaved = len(models) > 1
    longest = _rounded_up(max(len(mb.data["input_ids"]) for mb in mbs), layout.token_multiple)
    num_mbs = _rounded_up(len(mbs), layout.pp.size() if is_interleaved else 1)
    filled = mbs + mbs[:1] * (num_mbs - len(mbs))

    def forward_step(
        numbered: Iterator[tuple[int, MicroBatch]], stage: nn.Module
    ) -> tuple[Any, Callable]:
        index, mb = next(numbered)

        def take_outputs(outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            is_filler = index >= len(mbs)
            output = outputs[0].sum() * 0.0 if is_filler else output_fn(index, *outputs)
            # A token count of 0: no division by tokens, since the loss is already weighted.
            return output, torch.zeros((), dtype=torch.int, device=device), output.detach()

        return stage(mb.data, longest if is_interleaved else 0), take_outputs

    schedule = get_forward_backward_func(layout.pp.size(), len(models) if is_interleaved else None)
    with torch.set_grad_enabled(not forward_only):
        outputs = schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(enumerate(filled)) for _ in models],
            model=list(models),
            num_microbatches=num_mbs,
            seq_length=longest,  # unless interleaved, stages exchange the real lengths
            micro_batch_size=1,
            forward_only=forward_only,
        )
    # Copied because the schedule may write into the loss, which shares memory with an output.
    outputs = [output.clone() for output in outputs[: len(mbs)]]
    return outputs if layout.pp.size() == 1 else _tell_stages(outputs, layout, device)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _tell_stages(
    outputs: list[torch.Tensor], layout: Layout, device: torch.device
) -> list[torch.Tensor]:
    last = layout.pp.size() - 1
    shapes = [[tuple(output.shape) for output in outputs]]
    dist.broadcast_object_list(shapes, group=layout.pp, group_src=last, device=device)
    sizes = [torch.Size(shape).numel() for shape in shapes[0]]
    if layout.has_last_stage:
        flat = torch.cat([output.float().flatten() for output in outputs])
    else:
        flat = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    dist.broadcast(flat, group=layout.pp, group_src=last)
    return [part.view(s) for part, s in zip(flat.split(sizes), shapes[0], strict=True)]
