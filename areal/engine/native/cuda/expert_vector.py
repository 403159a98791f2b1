"""Products of a few tokens with their experts, on the CUDA cores at memory bandwidth.

    vector_gate_up   hidden[s] = activation(x[t] W1[e]') * (x[t] W3[e]')
    vector_down      out[t] = residual[t] + sum over k of weight[t, k] * (hidden[s] W2[e]')

for every pair s = (t, k) of a token and one of its experts e. Few tokens rarely share an expert, so
each pair reads its weights by itself and nothing is grouped; the choices of a token are added by
the program that has its outputs. A program's loads do not depend on each other: many of them are in
flight at once. Sums are float32; results are rounded where the module rounds them.
All tensors but `experts` are contiguous.

Shape legend: T tokens, K experts per token, S = T * K pairs, D model dim, F expert dim, E experts.
"""

# Launch options (num_warps, num_stages) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from areal.engine.native.cuda.block_kernels import gate
from areal.engine.native.cuda.device import OVERLAP, await_previous, overlapping


@dataclass(frozen=True, slots=True)
class Plan:
    outputs: int  # in one program
    block: int  # elements of the inner dim in one tile; all of `vector_down`
    warps: int
    overlap: bool = OVERLAP


def gate_up_plan(dim: int) -> Plan:
    return Plan(outputs=2, block=min(1024, int(triton.next_power_of_2(dim))), warps=4)


def down_plan(hidden_dim: int, top_k: int) -> Plan:
    """A tile has all choices of a token: at most 128 elements per thread."""
    block = int(triton.next_power_of_2(hidden_dim))
    warps = 4
    while warps < 16 and block * triton.next_power_of_2(top_k) > 128 * 32 * warps:
        warps *= 2
    return Plan(outputs=1, block=block, warps=warps)


def vector_gate_up(
    x_TD: torch.Tensor,
    w1_EFD: torch.Tensor,
    w3_EFD: torch.Tensor,
    activation: str,
    experts_TK: torch.Tensor,
    out_SF: torch.Tensor,
    plan: Plan | None = None,
) -> None:
    _, hidden_dim, dim = w1_EFD.shape
    plan = plan or gate_up_plan(dim)
    _gate_up_kernel[(triton.cdiv(hidden_dim, plan.outputs), len(out_SF))](
        x_TD, w1_EFD, w3_EFD, experts_TK, out_SF, hidden_dim, experts_TK.stride(0),
        D=dim,
        ACTIVATION=activation,
        TOP_K=experts_TK.shape[1],
        OUTPUTS=plan.outputs,
        BLOCK=plan.block,
        num_warps=plan.warps,
        **overlapping(plan.overlap),
    )  # fmt: skip


def vector_down(
    hidden_SF: torch.Tensor,
    w2_EDF: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    residual_TD: torch.Tensor,
    out_TD: torch.Tensor,
    plan: Plan | None = None,
) -> None:
    """`out` may be `residual`."""
    (_, dim, hidden_dim), top_k = w2_EDF.shape, experts_TK.shape[1]
    plan = plan or down_plan(hidden_dim, top_k)
    _down_kernel[(triton.cdiv(dim, plan.outputs), len(out_TD))](
        hidden_SF, w2_EDF, weights_TK, experts_TK, residual_TD, out_TD, dim, experts_TK.stride(0),
        F=hidden_dim,
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        OUTPUTS=plan.outputs,
        BLOCK=plan.block,
        num_warps=plan.warps,
        **overlapping(plan.overlap),
    )  # fmt: skip


@triton.jit
def _gate_up_kernel(
    x_ptr, w1_ptr, w3_ptr, experts_ptr, out_ptr, F, experts_stride,
    D: tl.constexpr, ACTIVATION: tl.constexpr, TOP_K: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    pair = tl.program_id(1)
    token = pair // TOP_K
    column = tl.arange(0, BLOCK)
    await_previous(OVERLAP)
    expert = tl.load(experts_ptr + token * experts_stride + pair % TOP_K).to(tl.int64)
    # Past the end, the last row repeats: its product is not written.
    place = (expert * F + tl.minimum(output, F - 1))[:, None] * D + column[None, :]
    gate_sums = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    up_sums = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    for start in tl.static_range(0, D, BLOCK):
        inside = start + column < D
        w1 = tl.load(w1_ptr + start + place, inside[None, :], 0.0, eviction_policy="evict_first")
        w3 = tl.load(w3_ptr + start + place, inside[None, :], 0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + token * D + start + column, inside, 0.0).to(tl.float32)[None, :]
        gate_sums += w1.to(tl.float32) * x
        up_sums += w3.to(tl.float32) * x
    y = gate(tl.sum(gate_sums, axis=1), tl.sum(up_sums, axis=1), dtype, ACTIVATION)
    tl.store(out_ptr + pair * F + output, y.to(dtype), output < F)


@triton.jit
def _down_kernel(
    hidden_ptr, w2_ptr, weights_ptr, experts_ptr, residual_ptr, out_ptr, D, experts_stride,
    F: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    choice = tl.arange(0, BLOCK_K)
    is_choice = choice < TOP_K
    # The router was the kernel before the previous one, which waited for it: its choice is known,
    # and the weights are on their way while the previous kernel ends.
    expert = tl.load(experts_ptr + token * experts_stride + choice, is_choice, 0).to(tl.int64)
    # Past the end, the last row repeats: its product is not written.
    weight_row = expert[:, None] * D + tl.minimum(output, D - 1)[None, :]
    real = is_choice[:, None] & (column < F)[None, :]
    tile_ptr = w2_ptr + weight_row[:, :, None] * F + column[None, None, :]
    w2 = tl.load(tile_ptr, real[:, None, :], 0.0, eviction_policy="evict_first")
    await_previous(OVERLAP)
    hidden_place = (token * TOP_K + choice)[:, None] * F + column[None, :]
    hidden = tl.load(hidden_ptr + hidden_place, real, 0.0).to(tl.float32)
    share = tl.load(weights_ptr + token * TOP_K + choice, is_choice, 0.0).to(dtype)
    y = tl.sum(w2.to(tl.float32) * hidden[:, None, :], axis=2).to(dtype).to(tl.float32)
    y = (y * share.to(tl.float32)[:, None]).to(dtype).to(tl.float32)
    total = tl.sum(y, axis=0).to(dtype).to(tl.float32)
    written = output < D
    residual = tl.load(residual_ptr + token * D + output, written, 0.0).to(tl.float32)
    tl.store(out_ptr + token * D + output, (total + residual).to(dtype), written)
