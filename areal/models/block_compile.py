"""torch.compile for the two halves of each block: one kernel between two matrix products.

Before attention: norm, projections, rotation. After it: projection, residual, norm, feed-forward,
residual. Attention itself stays outside: it is a kernel of its own already, and what it does
depends on the lengths of the sequences. All blocks share one compiled program per half, for any
number of tokens; the first training step and the first pass without gradients wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from areal.models.common.moe import MoE

if TYPE_CHECKING:
    from areal.models.common.decoder import Decoder, DecoderBlock


def compile_blocks(model: Decoder, memory_budget: float | None = None) -> None:
    """Compile the blocks of `model` in place, when they first run.

    memory_budget: the share of the memory kept for the backward pass, 1 being what costs no matrix
    product twice; None is 1.
    """
    for block in model.blocks:
        block.before = _half(block, "before", memory_budget)
        if not isinstance(block.feed_forward, MoE):  # how many rows an expert gets is data
            block.after = _half(block, "after", memory_budget)


def _half(block: DecoderBlock, name: str, memory_budget: float | None) -> Callable[..., Any]:
    run = _compiled(getattr(type(block), name))
    if memory_budget is None:

        def call(*tensors: torch.Tensor) -> Any:
            _any_number_of_tokens(tensors)
            return run(block, *tensors)

        return call

    from torch._functorch import config

    def call_within_budget(*tensors: torch.Tensor) -> Any:
        _any_number_of_tokens(tensors)
        # Around each call, since the first one compiles, and other models have other budgets.
        with config.patch(activation_memory_budget=memory_budget):
            return run(block, *tensors)

    return call_within_budget


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


def _any_number_of_tokens(tensors: tuple[torch.Tensor, ...]) -> None:
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
