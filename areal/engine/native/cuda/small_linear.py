"""Linear layers of 1 to 8 rows: the weight is read once, at memory bandwidth.

    small_linear    out = x W' (+ bias) (+ residual, which may be `out` itself)
    norm_linear     the same of rms_norm(x)
    small_gate_up   activation(y W1') * (y W3'), y = x or rms_norm(x), W1 above W3 in one weight

A program computes a few outputs of every row of x and loops over D. One row multiplies on the CUDA
cores, with the next tile of the weight in registers; if a tile spans D, x is read and normed once
per program, which loops over outputs instead. More rows multiply on the tensor cores, with tiles
pipelined through shared memory. Sums are float32. The norm needs no pass of its own: its root mean
square is one factor per row, accumulated in the same loop and applied to the sums. Results are
rounded where the separate layers round theirs, except the norm's. All tensors are contiguous.

If the device supports it, a kernel starts while the previous one ends (device.py); for one row it
loads its first tile of the weight before it waits for the previous kernel's results.

Shape legend: M rows of x, D and N features in and out, F features of the gate.
"""

# Launch options (num_warps, num_stages) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from areal.engine.native.cuda.block_kernels import Norm, gate, load_norm
from areal.engine.native.cuda.device import OVERLAP, Device, await_previous, device_of, overlapping

MAX_ROWS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    rows: int  # of the weight, in one program (2 make one gated output); from 16 on tensor cores
    block: int  # elements of D in one tile; at least 64 per warp, or the norm's loads get slow
    warps: int
    stages: int = 1  # tiles in flight, tensor cores only
    programs: int | None = None  # at most, where a block spans D
    overlap: bool = OVERLAP

    @property
    def uses_tensor_cores(self) -> bool:
        return self.rows >= 16


# If a tile spans D: 64 elements per thread (96 registers), or 32 (64) where D needs 8 warps.
_WHOLE_ROWS = (Plan(rows=8, block=1024, warps=4), Plan(rows=4, block=2048, warps=4))
_WHOLE_NORMED_ROWS = Plan(rows=2, block=4096, warps=8)
# Loops over D, the preferred first, with the registers per thread the compiler takes on Hopper.
_LOOPS = (
    (Plan(rows=4, block=1024, warps=4), 64),
    (Plan(rows=8, block=512, warps=4), 96),
    (Plan(rows=2, block=1024, warps=4), 48),
    (Plan(rows=4, block=1024, warps=8), 64),
)
_NORMED_LOOPS = (
    (Plan(rows=4, block=512, warps=2), 80),
    (Plan(rows=8, block=512, warps=4), 128),
    (Plan(rows=4, block=512, warps=4), 72),
)


@functools.cache
def plan_for(num_rows: int, weight_rows: int, dim: int, normed: bool, device: Device) -> Plan:
    """By how many programs there are for the slots of the device.

    A weight of a few MB is read in a few microseconds, in which programs run in one or two waves:
    a last wave that is nearly empty costs as much as a full one.
    """
    if num_rows == 1:
        return _one_row_plan(weight_rows, dim, normed, device)
    if normed:
        # The norm of x is repeated in every program, so a program has more outputs.
        return Plan(rows=32, block=128, warps=2, stages=4 if dim <= 2048 else 5)
    if weight_rows >= 256 * device.num_processors:
        return Plan(rows=64, block=128, warps=4, stages=4)
    return Plan(rows=16, block=256, warps=1, stages=4)


def _one_row_plan(weight_rows: int, dim: int, normed: bool, device: Device) -> Plan:
    for plan in _WHOLE_ROWS:
        if dim <= plan.block:
            return replace(plan, programs=device.resident(plan.warps, registers=96))
    if normed and 3072 <= dim <= 4096:
        # Twice what the device holds: the next programs start while the first ones end.
        programs = 2 * device.resident(_WHOLE_NORMED_ROWS.warps, registers=64)
        return replace(_WHOLE_NORMED_ROWS, programs=programs)
    loops = _NORMED_LOOPS if normed else _LOOPS
    best, best_use = loops[0][0], 0.0
    for plan, registers in loops:
        waves = weight_rows / plan.rows / device.resident(plan.warps, registers)
        use = waves / math.ceil(waves)  # of the program slots, until the last wave ends
        if use > 1.05 * best_use:
            best, best_use = plan, use
    return best


def small_linear(
    x_MD: torch.Tensor,
    weight_ND: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    residual_MN: torch.Tensor | None = None,
    plan: Plan | None = None,
) -> None:
    _launch(x_MD, None, weight_ND, bias_N, residual_MN, out_MN, plan)


def norm_linear(
    x_MD: torch.Tensor,
    norm: Norm,
    weight_ND: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    plan: Plan | None = None,
) -> None:
    _launch(x_MD, norm, weight_ND, bias_N, None, out_MN, plan)


def small_gate_up(
    x_MD: torch.Tensor,
    norm: Norm | None,
    weight_2FD: torch.Tensor,
    activation: str,
    out_MF: torch.Tensor,
    plan: Plan | None = None,
) -> None:
    _launch(x_MD, norm, weight_2FD, None, None, out_MF, plan, activation)


def _launch(x_MD, norm, weight, bias_N, residual_MN, out_MN, plan, activation=None) -> None:
    (num_rows, dim), num_outputs = x_MD.shape, out_MN.shape[1]
    weight_rows, normed = len(weight), norm is not None
    plan = plan or plan_for(num_rows, weight_rows, dim, normed, device_of(x_MD.device))
    assert num_rows <= (MAX_ROWS if plan.uses_tensor_cores else 1), (num_rows, plan)
    programs = triton.cdiv(weight_rows, plan.rows)
    if plan.uses_tensor_cores:
        kernel = _few_rows_kernel
    elif plan.block >= dim:
        kernel, programs = _whole_row_kernel, min(programs, plan.programs or programs)
    else:
        kernel = _one_row_kernel
    kernel[(programs,)](
        x_MD, norm and norm.weight, weight, bias_N, residual_MN, out_MN,
        num_rows, num_outputs, dim, norm.eps if norm else 0.0,
        ROWS=plan.rows,
        BLOCK=plan.block,
        NORM=normed,
        OFFSET=norm.offset if norm else 0.0,
        BIAS=bias_N is not None,
        RESIDUAL=residual_MN is not None,
        GATED=activation is not None,
        ACTIVATION=activation,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **overlapping(plan.overlap),
    )  # fmt: skip


@triton.jit
def _weight_rows(group, N, ROWS: tl.constexpr, GATED: tl.constexpr):
    """int64 [ROWS]: gate and up of one output side by side; past the end, the last repeats."""
    index = group * ROWS + tl.arange(0, ROWS)
    rows = tl.minimum(index // 2, N - 1) + index % 2 * N if GATED else tl.minimum(index, N - 1)
    return rows.to(tl.int64)


@triton.jit
def _one_row_kernel(
    x_ptr, norm_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, M, N, D, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    tile_ptr = (
        weight_ptr + _weight_rows(tl.program_id(0), N, ROWS, GATED)[:, None] * D + column[None, :]
    )
    tile = tl.load(tile_ptr, column[None, :] < D, 0.0, eviction_policy="evict_first")
    await_previous(OVERLAP)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        # The next tile is on its way while this one is multiplied.
        tile_ptr += BLOCK
        ahead = start + BLOCK + column[None, :] < D
        next_tile = tl.load(tile_ptr, ahead, 0.0, eviction_policy="evict_first")
        inside = start + column < D
        x = tl.load(x_ptr + start + column, inside, 0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x *= load_norm(norm_ptr + start + column, inside, OFFSET)
        sums += tile.to(tl.float32) * x[None, :]
        tile = next_tile
    y = tl.sum(sums, axis=1)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares) / D + eps)
    _write_row(
        y, tl.program_id(0), bias_ptr, residual_ptr, out_ptr, N,
        ROWS, BIAS, RESIDUAL, GATED, ACTIVATION,
    )  # fmt: skip


@triton.jit
def _whole_row_kernel(
    x_ptr, norm_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, M, N, D, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    num_groups = tl.cdiv(2 * N if GATED else N, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < D
    first = tl.program_id(0)
    weight_ptr += column[None, :]
    tile_ptr = weight_ptr + _weight_rows(first, N, ROWS, GATED)[:, None] * D
    tile = tl.load(tile_ptr, inside[None, :], 0.0, eviction_policy="evict_first")
    if NORM:
        norm = load_norm(norm_ptr + column, inside, OFFSET)
    await_previous(OVERLAP)
    x = tl.load(x_ptr + column, inside, 0.0).to(tl.float32)
    if NORM:
        x *= norm * tl.rsqrt(tl.sum(x * x) / D + eps)
    for group in range(first, num_groups, tl.num_programs(0)):
        # The next tile is on its way while this one is multiplied.
        ahead = group + tl.num_programs(0)
        tile_ptr = weight_ptr + _weight_rows(ahead, N, ROWS, GATED)[:, None] * D
        loaded = inside[None, :] & (ahead < num_groups)
        next_tile = tl.load(tile_ptr, loaded, 0.0, eviction_policy="evict_first")
        y = tl.sum(tile.to(tl.float32) * x[None, :], axis=1)
        _write_row(
            y, group, bias_ptr, residual_ptr, out_ptr, N, ROWS, BIAS, RESIDUAL, GATED, ACTIVATION
        )
        tile = next_tile


@triton.jit
def _write_row(
    y, group, bias_ptr, residual_ptr, out_ptr, N,
    ROWS: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    if GATED:
        x, up = tl.split(tl.reshape(y, [OUTPUTS, 2]))
        y = gate(x, up, dtype, ACTIVATION)
    output = group * OUTPUTS + tl.arange(0, OUTPUTS)
    written = output < N
    if BIAS:
        y += tl.load(bias_ptr + output, written).to(tl.float32)
    if RESIDUAL:
        y = y.to(dtype).to(tl.float32) + tl.load(residual_ptr + output, written).to(tl.float32)
    tl.store(out_ptr + output, y.to(dtype), written)


@triton.jit
def _few_rows_kernel(
    x_ptr, norm_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, M, N, D, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    # The narrowest tile of the tensor cores.
    PADDED: tl.constexpr = 8  # pyright: ignore[reportAssignmentType]  # Triton's notation
    row = tl.arange(0, PADDED)
    column = tl.arange(0, BLOCK)
    tile_ptr = (
        weight_ptr + _weight_rows(tl.program_id(0), N, ROWS, GATED)[:, None] * D + column[None, :]
    )
    x_ptr += row[:, None] * D + column[None, :]
    await_previous(OVERLAP)
    sums = tl.zeros([ROWS, PADDED], tl.float32)
    squares = tl.zeros([PADDED, BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        inside = start + column < D
        tile = tl.load(tile_ptr + start, inside[None, :], 0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + start, (row < M)[:, None] & inside[None, :], 0.0)
        if NORM:
            x = x.to(tl.float32)
            squares += x * x
            norm = load_norm(norm_ptr + start + column, inside, OFFSET)
            x = (x * norm[None, :]).to(tile.dtype)
        sums = tl.dot(tile, tl.trans(x), sums, input_precision="ieee")
    y = sums
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, axis=1) / D + eps)[None, :]
    if GATED:
        x, up = tl.split(tl.permute(tl.reshape(y, [OUTPUTS, 2, PADDED]), [0, 2, 1]))
        y = gate(x, up, dtype, ACTIVATION)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    if BIAS:
        y += tl.load(bias_ptr + output, output < N, 0.0).to(tl.float32)[:, None]
    written = (output < N)[:, None] & (row < M)[None, :]
    place = row[None, :] * N + output[:, None]
    if RESIDUAL:
        y = y.to(dtype).to(tl.float32) + tl.load(residual_ptr + place, written).to(tl.float32)
    tl.store(out_ptr + place, y.to(dtype), written)
