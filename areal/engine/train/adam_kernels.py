"""AdamW of one weight in one pass over its numbers, on a GPU.

Reads the gradient as backward left it, clips and updates, and rounds the result into the model:
torch's fused AdamW needs a float32 gradient, and a pass each to make it, to clip it and to round.
"""

# A kernel's launch has other parameters than the kernel.
# pyright: reportCallIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_BLOCK = 2048


@dataclass(frozen=True, slots=True)
class AdamState:
    """Of one weight, all float32 but the gradient and the model's weight, all contiguous."""

    master: torch.Tensor
    weight: torch.Tensor | None  # the rounded copy in the model; None where that is the master
    grad: torch.Tensor
    step: torch.Tensor  # number of updates, this one included
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


def update(
    state: AdamState,
    norm: torch.Tensor,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    max_norm: float,
) -> None:
    """`norm` of all gradients together, on the device: if it is not finite, nothing changes."""
    tensors = (state.master, state.weight, state.exp_avg, state.exp_avg_sq, state.grad)
    assert all(x is None or x.is_contiguous() for x in tensors)
    size = state.master.numel()
    if not size:
        return
    logs = [math.log(beta) if beta else -math.inf for beta in betas]
    _adamw_kernel[(triton.cdiv(size, _BLOCK),)](
        *tensors, norm, state.step, size, lr, lr * weight_decay, 1.0 - betas[0], betas[1],
        1.0 - betas[1], *logs, eps, max_norm, BLOCK=_BLOCK,
    )  # fmt: skip


@triton.jit
def _adamw_kernel(
    master_ptr, weight_ptr, mean_ptr, square_ptr, grad_ptr, norm_ptr, step_ptr, size,
    lr, decay, share1, beta2, share2, log_beta1, log_beta2, eps, max_norm, BLOCK: tl.constexpr,
):  # fmt: skip
    norm = tl.load(norm_ptr)
    if tl.abs(norm) < float("inf"):
        place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = place < size
        grad = tl.load(grad_ptr + place, inside, 0.0).to(tl.float32)
        grad *= tl.minimum(max_norm / (norm + 1e-6), 1.0)
        mean = tl.load(mean_ptr + place, inside, 0.0)
        mean += (grad - mean) * share1
        square = tl.load(square_ptr + place, inside, 0.0) * beta2 + grad * grad * share2
        # 1 - beta^step would lose half of its digits in float32.
        steps = tl.load(step_ptr).to(tl.float64)
        step = lr / (1.0 - tl.exp(steps * log_beta1)).to(tl.float32)
        correction = (1.0 - tl.exp(steps * log_beta2)).to(tl.float32)
        spread = tl.sqrt(square) / tl.sqrt(correction) + eps
        master = tl.load(master_ptr + place, inside, 0.0)
        master -= master * decay
        master -= step * mean / spread
        tl.store(mean_ptr + place, mean, inside)
        tl.store(square_ptr + place, square, inside)
        tl.store(master_ptr + place, master, inside)
        if weight_ptr is not None:
            tl.store(weight_ptr + place, master.to(weight_ptr.dtype.element_ty), inside)
