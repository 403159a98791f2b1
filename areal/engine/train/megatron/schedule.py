"""Micro-batches through megatron-core's schedules: one stage, or a pipeline of them.

Every rank of a pipeline is given the same micro-batches; the last stage alone sees what the model
says of the tokens, and the others are told the outputs afterwards. Ranks with several stages each
interleave them. That schedule takes whole rounds of the ranks and one length: micro-batches are
repeated for nothing to fill the last round, and padded to the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn

from areal.engine.train.base import MicroBatch, OutputFn
from areal.engine.train.megatron.layout import Layout


def run_micro_batches(
    models: Sequence[nn.Module],
    mbs: list[MicroBatch],
    output_fn: OutputFn,
    layout: Layout,
    *,
    forward_only: bool,
) -> list[torch.Tensor]:
    """`output_fn` of each micro-batch, detached; unless `forward_only`, the gradients of `models`,
    this rank's stages, are those of their sum over micro-batches and ranks."""
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
            # The number of tokens divides nothing: the shares of the weight are in the loss.
            return output, torch.zeros((), dtype=torch.int, device=device), output.detach()

        return stage(mb.data, longest if is_interleaved else 0), take_outputs

    schedule = get_forward_backward_func(layout.pp.size(), len(models) if is_interleaved else None)
    with torch.set_grad_enabled(not forward_only):
        outputs = schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(enumerate(filled)) for _ in models],
            model=list(models),
            num_microbatches=num_mbs,
            seq_length=longest,  # unless interleaved, stages tell the real one
            micro_batch_size=1,
            forward_only=forward_only,
        )
    # A copy: the schedule may write into the loss that an output shares its memory with.
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
