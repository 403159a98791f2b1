"""Linear layers of up to 128 rows: more than small_linear.py handles, too few to be compute-bound.

    skinny_linear    out = x W' (+ bias)
    skinny_gate_up   activation(x W1') * (x W3'), W1 above W3 in one weight

The weight may be FP8 with its scales (`Fp8Weight`); x is quantized beforehand then (`Fp8Rows`).

A program computes a tile of outputs for all rows of x. The weight is the left operand, whose tiles
have at least 64 rows, and x the right operand, whose tile is only as wide as its rows need. The
weight is read from memory once; x is read from the L2 cache once per tile of outputs. L2 bandwidth
is the second limit, so a tile has more outputs than x has rows if possible.

If the tiles of outputs are too few for the device, D is cut into parts: each writes float32 sums to
the workspace, and the last program of a tile adds them in the order of the parts: one launch, and
the same bits at every replay. If the device supports it, a kernel starts while the previous one
ends (device.py) and prefetches its first columns of the weight into the L2 cache. Sums are float32;
results are rounded where the separate layers round theirs. All tensors are contiguous.

Shape legend: M rows of x, D and N features in and out, F features of the gate.
"""

# Launch options (num_warps, num_stages) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from areal.engine.native.cuda.block_kernels import gate
from areal.engine.native.cuda.device import OVERLAP, Device, await_previous, device_of, overlapping
from areal.engine.native.cuda.fp8_tensors import Fp8Rows, Fp8Weight
from areal.models.common.fp8 import GROUP

MAX_ROWS = 128
_MAX_RESIDENT = 3  # programs of a multiprocessor
_MAX_SPLIT_TILES = 512
_MAX_PARTIAL_SUMS = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Plan:
    rows: int  # of the weight, in one program (2 make one gated output); from 64 on wgmma
    block: int  # elements of D in one tile
    warps: int
    stages: int  # tiles in flight or in use
    parts: int = 1  # of D
    ahead: int = 256  # columns of a part prefetched into the L2 cache
    overlap: bool = OVERLAP


@dataclass(frozen=True, slots=True)
class SkinnyWorkspace:
    """Partial sums of parts. One workspace serves all launches of a stream, in order."""

    sums: torch.Tensor  # float32, per (tile of outputs, part): [rows of the weight, rows of x]
    arrived: torch.Tensor  # [tiles] int32, 0 between launches

    @classmethod
    def make(cls, device: torch.device) -> SkinnyWorkspace:
        return cls(
            sums=torch.empty(_MAX_PARTIAL_SUMS, dtype=torch.float32, device=device),
            arrived=torch.zeros(_MAX_SPLIT_TILES, dtype=torch.int32, device=device),
        )


def padded_rows(num_rows: int) -> int:
    """Rows of x in the kernel, rounded up so that few plans and binaries exist."""
    return max(16, int(triton.next_power_of_2(num_rows)))


@functools.cache
def plan_for(
    num_rows: int, weight_rows: int, dim: int, device: Device, element_bytes: int = 2
) -> Plan:
    """All programs resident at once, in a single wave, with as many stages as fit then.

    One program adds the sums of all parts, so there are only as many parts as fill the device.
    """
    padded, processors = padded_rows(num_rows), device.num_processors
    if element_bytes == 1:
        return _fp8_plan(padded, weight_rows, dim, processors)
    rows = 64 if weight_rows <= 64 * _MAX_RESIDENT * processors else 128
    tiles = -(-weight_rows // rows)
    parts = _parts(processors // tiles, dim)
    if 3 * tiles * parts < 2 * processors and (more := 2 * processors // tiles) * 4096 <= dim:
        parts = more  # a third of the multiprocessors would be idle for long
    resident = min(-(-tiles * parts // processors), _MAX_RESIDENT)
    room = device.shared_bytes // resident - 1024
    column_bytes = 2 * (rows + padded)
    block = 128 if dim % 128 == 0 and 3 * 128 * column_bytes <= room else 64
    # Alone on its multiprocessor a program leaves space for the next kernel to start early.
    wanted = int(room * (0.58 if resident == 1 else 0.9)) // (block * column_bytes)
    stages = min(max(wanted, 3), 8, -(-dim // parts // block) + 1)
    return Plan(rows, block, warps=8 if rows == padded == 128 else 4, stages=stages, parts=parts)


def _fp8_plan(padded: int, weight_rows: int, dim: int, processors: int) -> Plan:
    """Tiles of 128 columns, which share a scale. A program waits for each product to scale it, so
    there are two programs or more per multiprocessor, with few stages each."""
    rows = 128 if padded == 16 and weight_rows >= 128 * processors else 64
    tiles = -(-weight_rows // rows)
    parts = 1
    if tiles <= 1.5 * processors:
        parts = max(1, min(round(2.2 * processors / tiles), dim // 512, 8))
    return Plan(rows, GROUP, warps=4, stages=4 if padded == 16 else 3, parts=parts)


def _parts(wanted: int, dim: int) -> int:
    """Adding the sums of parts takes as long as reading 1024 columns."""
    parts = max(1, min(wanted, dim // 256))
    return parts if dim - dim // parts >= 1024 else 1


def skinny_linear(
    x_MD: torch.Tensor | Fp8Rows,
    weight_ND: torch.Tensor | Fp8Weight,
    bias_N: torch.Tensor | None,
    out_MN: torch.Tensor,
    workspace: SkinnyWorkspace,
    plan: Plan | None = None,
) -> None:
    _launch(x_MD, weight_ND, bias_N, out_MN, workspace, plan, activation=None)


def skinny_gate_up(
    x_MD: torch.Tensor | Fp8Rows,
    weight_2FD: torch.Tensor | Fp8Weight,
    activation: str,
    out_MF: torch.Tensor,
    workspace: SkinnyWorkspace,
    plan: Plan | None = None,
) -> None:
    _launch(x_MD, weight_2FD, None, out_MF, workspace, plan, activation)


def _launch(x_MD, weight, bias_N, out_MN, workspace, plan, activation) -> None:
    x_scale_MG = weight_scale_BG = None
    block_rows = 1
    if isinstance(weight, Fp8Weight):
        block_rows = weight.block_rows
        weight, weight_scale_BG = weight.q_ND, weight.scale_BG
        x_MD, x_scale_MG = x_MD.q_MD, x_MD.scale_MG
    (num_rows, dim), weight_rows, padded = x_MD.shape, len(weight), padded_rows(len(x_MD))
    assert num_rows <= MAX_ROWS, num_rows
    device, size = device_of(x_MD.device), x_MD.element_size()
    plan = plan or plan_for(num_rows, weight_rows, dim, device, size)
    assert size > 1 or plan.block == GROUP, plan
    tiles = triton.cdiv(weight_rows, plan.rows)
    # Whole tiles of D in every part; the last part may be shorter.
    span = triton.cdiv(triton.cdiv(dim, plan.parts), plan.block) * plan.block
    parts = triton.cdiv(dim, span)
    if parts > 1:
        assert tiles * parts * plan.rows * padded <= workspace.sums.numel(), plan
        assert tiles <= workspace.arrived.numel(), plan
    _skinny_kernel[(tiles, parts)](
        x_MD, x_scale_MG, weight, weight_scale_BG, bias_N, out_MN,
        workspace.sums, workspace.arrived, num_rows, out_MN.shape[1], dim, span,
        0 if x_scale_MG is None else x_scale_MG.stride(1),
        BLOCK_ROWS=block_rows,
        BLOCK_M=padded,
        ROWS=plan.rows,
        BLOCK=plan.block,
        PARTS=parts,
        BIAS=bias_N is not None,
        GATED=activation is not None,
        ACTIVATION=activation,
        WHOLE=dim % plan.block == 0,
        AHEAD=plan.ahead,
        LANES=max(plan.rows, 32 * plan.warps),
        num_warps=plan.warps,
        num_stages=plan.stages,
        **overlapping(plan.overlap),
    )  # fmt: skip


@triton.jit
def _weight_rows(index, N, ROWS: tl.constexpr, GATED: tl.constexpr):
    """int64: the gates of a program's outputs, then their ups; past the end, the last repeats."""
    first = tl.program_id(0) * ROWS
    if GATED:
        HALF: tl.constexpr = ROWS // 2
        rows = tl.minimum(first // 2 + index % HALF, N - 1) + index // HALF * N
    else:
        rows = tl.minimum(first + index, N - 1)
    return rows.to(tl.int64)


@triton.jit
def _call_ahead(
    weight_ptr, N, D, begin, end,
    ROWS: tl.constexpr, GATED: tl.constexpr, AHEAD: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Prefetch the first AHEAD columns of the program's part into the L2 cache, a row a thread."""
    lane = tl.arange(0, LANES)
    row = _weight_rows(lane % ROWS, N, ROWS, GATED)
    address = (weight_ptr + row * D + begin).to(tl.int64, bitcast=True)
    num_bytes = tl.minimum(end - begin, AHEAD) * (
        weight_ptr.dtype.element_ty.primitive_bitwidth // 8
    )
    tl.inline_asm_elementwise(
        """{
            .reg .pred some;
            setp.gt.s32 some, $2, 0;
            @some cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address, tl.where(lane < ROWS, num_bytes, 0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _skinny_kernel(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, bias_ptr, out_ptr, sums_ptr, arrived_ptr,
    M, N, D, span, x_scale_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, WHOLE: tl.constexpr,
    AHEAD: tl.constexpr, LANES: tl.constexpr, ACTIVATION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    begin = part * span
    end = tl.minimum(begin + span, D)
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK)
    weight_row = _weight_rows(tl.arange(0, ROWS), N, ROWS, GATED)
    if OVERLAP and WHOLE and AHEAD > 0:
        _call_ahead(weight_ptr, N, D, begin, end, ROWS, GATED, AHEAD, LANES)
    await_previous(OVERLAP)
    weight_tile_ptr = weight_ptr + weight_row[:, None] * D + column[None, :]
    x_tile_ptr = x_ptr + tl.minimum(row, M - 1)[:, None] * D + column[None, :]
    if weight_scale_ptr is not None:  # the scales of a group of columns: [B], and [M] adjacent
        weight_scale_ptr += weight_row // BLOCK_ROWS * tl.cdiv(D, BLOCK)
        x_scale_ptr += tl.minimum(row, M - 1)
        weight_scale = tl.load(weight_scale_ptr + begin // BLOCK)
        x_scale = tl.load(x_scale_ptr + begin // BLOCK * x_scale_stride)
    sums = tl.zeros([ROWS, BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK):
        if WHOLE:
            weight = tl.load(weight_tile_ptr + start, eviction_policy="evict_first")
            x = tl.load(x_tile_ptr + start)
        else:
            inside = (start + column < D)[None, :]
            weight = tl.load(weight_tile_ptr + start, inside, 0.0, eviction_policy="evict_first")
            x = tl.load(x_tile_ptr + start, inside, 0.0)
        if weight_scale_ptr is None:
            sums = tl.dot(weight, tl.trans(x), sums, input_precision="ieee")
        else:
            # The next scales are on their way while these are used.
            ahead = tl.minimum(start // BLOCK + 1, tl.cdiv(D, BLOCK) - 1)
            next_weight_scale = tl.load(weight_scale_ptr + ahead)
            next_x_scale = tl.load(x_scale_ptr + ahead * x_scale_stride)
            sums += tl.dot(weight, tl.trans(x)) * (weight_scale[:, None] * x_scale[None, :])
            weight_scale, x_scale = next_weight_scale, next_x_scale
    if PARTS == 1:
        _write(sums, bias_ptr, out_ptr, M, N, BLOCK_M, ROWS, BIAS, GATED, ACTIVATION)
    else:
        place = tl.arange(0, ROWS)[:, None] * BLOCK_M + row[None, :]
        real = (row < M)[None, :]
        sums_ptr += tile * PARTS * ROWS * BLOCK_M
        tl.store(sums_ptr + part * ROWS * BLOCK_M + place, sums, real)
        # Orders the stores of all threads before one thread's release of the counter.
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == PARTS - 1:
            tl.store(arrived_ptr + tile, 0)
            total = tl.zeros([ROWS, BLOCK_M], tl.float32)
            for other in tl.static_range(PARTS):
                # ".cg" reads from the L2 cache, which has the other programs' stores.
                other_ptr = sums_ptr + other * ROWS * BLOCK_M + place
                total += tl.load(other_ptr, real, 0.0, cache_modifier=".cg")
            _write(total, bias_ptr, out_ptr, M, N, BLOCK_M, ROWS, BIAS, GATED, ACTIVATION)


@triton.jit
def _write(
    y, bias_ptr, out_ptr, M, N,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    row = tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    if GATED:
        # A gate and its up are half a tile apart, in registers of one thread.
        x, up = tl.split(tl.permute(tl.reshape(y, [2, OUTPUTS, BLOCK_M]), [1, 2, 0]))
        y = gate(x, up, dtype, ACTIVATION)
    if BIAS:
        y += tl.load(bias_ptr + output, output < N, 0.0).to(tl.float32)[:, None]
    written = (output < N)[:, None] & (row < M)[None, :]
    tl.store(out_ptr + row[None, :].to(tl.int64) * N + output[:, None], y.to(dtype), written)
