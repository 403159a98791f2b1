"""What a block keeps of its forward pass for its backward pass; the rest is computed again.

| mode          | kept                                              | computed again               |
|---------------|---------------------------------------------------|------------------------------|
| none          | what autograd asks for                            | nothing                      |
| selective, op | results of matrix products and of attention       | norms, rotation, activations |
| selective, n  | of every n-th block its input, of the others all  | every n-th block             |
| full          | the input of each block                           | each block                   |
| memory_budget | what the compiler chooses within the given memory | the cheapest rest            |

Losses and gradients are those of `none`: the same operations on the same numbers, later.

A compiled block (models/block_compile.py) keeps what `selective, op` keeps without being told: its
compiler computes again whatever it can fuse into the backward pass. So does `memory_budget`, with
less: 1.0 is that, 0.0 as little as `full` within each of a block's two compiled halves.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

if TYPE_CHECKING:
    from areal.models.common.decoder import Decoder

_EXPENSIVE_OPS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_flash_attention_forward",
    "torch_attn::_varlen_attn",
}


def checkpoint_blocks(model: Decoder, mode: str, *, selective_option: str, compiled: bool) -> None:
    """Change what the blocks of `model` keep, in place. Parameters and their names stay."""
    for number, block in enumerate(model.blocks):
        if mode == "full" or (
            mode == "selective" and selective_option != "op" and number % int(selective_option) == 0
        ):
            block.forward = partial(_recomputed, block.forward)
        elif mode == "selective" and selective_option == "op" and not compiled:
            block.forward = partial(_recomputed, block.forward, context_fn=_keep_expensive)


def _recomputed(forward: Any, *args: Any, **context: Any) -> torch.Tensor:
    # Nothing random happens in a block, so the state of no generator needs to be kept.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **context)


def _keep_expensive() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_policy)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_expensive = op.name() in _EXPENSIVE_OPS
    return CheckpointPolicy.MUST_SAVE if is_expensive else CheckpointPolicy.PREFER_RECOMPUTE
