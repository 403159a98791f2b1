"""What the adapters of rows add to a projection: out[t] += scale * (x[t] A[e]') B[e]'.

Rows of one forward may have different adapters. They are grouped once per forward, as tokens are by
their experts (routing.py), and each projection takes two launches after the product with its
weight: `shrink` multiplies a block of rows of one adapter with its A, a piece of the inner dim in
each program; `expand` sums the pieces in their order, multiplies with B and adds to the output in
place. `expand_gate` does that for gates and ups, and applies the activation: the widest outputs are
not read and written once more. Shapes of launches depend on shapes alone, so graphs capture them.
An adapter that leaves a layer as it is has scale 0 there, and nothing is added.

Both kernels start while the previous one ends (device.py): the rows that `shrink` reads and the
outputs that `expand` adds to were written before that one.

A projection of several layers side by side (queries, keys and values) has an A and a B for each of
them, its parts. Sums are float32; their product with A is rounded to the dtype of the rows, as a
matrix product of its own would be.

Shape legend: T rows, D inputs, N outputs of all parts, R rank, E adapters, P parts, S pieces of D,
B blocks of M rows.
"""

# Launch options (num_warps, num_stages) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from areal.engine.native.cuda.block_kernels import gate
from areal.engine.native.cuda.device import OVERLAP, await_previous, overlapping
from areal.engine.native.cuda.routing import Blocks, group_by_expert

MIN_RANK = 16  # of the tensor cores
_OUTPUTS = 128  # of one program of `expand`
_BLOCK = 128  # of D, in one tile
_MANY_ROWS = 4096
_MIN_PIECE, _WHOLE = 1024, 1 << 30  # of D
_MAX_LOW_ELEMENTS = 8192


@dataclass(frozen=True, slots=True)
class Plan:
    """Few rows: narrow blocks fill the device. Many: wide ones read less."""

    block_m: int
    outputs: int  # of one program of `expand_gate`
    piece: int  # of D in one program of `shrink`, at least

    @classmethod
    def of(cls, num_rows: int) -> Plan:
        if num_rows < _MANY_ROWS:
            return cls(block_m=16, outputs=128, piece=_MIN_PIECE)
        return cls(block_m=64, outputs=64, piece=_WHOLE)

    def piece_of(self, dim: int, rank: int) -> int:
        """So many pieces at most that a program of `expand` can hold its rows of them."""
        most = max(1, _MAX_LOW_ELEMENTS // (self.block_m * rank))
        return min(dim, max(self.piece, int(triton.next_power_of_2(triton.cdiv(dim, most)))))


@dataclass(frozen=True, slots=True, eq=False)
class AdapterStack:
    """The matrices of all adapters for one projection."""

    a_EPRD: torch.Tensor
    b_ENR: torch.Tensor
    scale_EP: torch.Tensor  # float32
    starts: tuple[int, ...]  # the first output of each part, and the end
    tiles_3: torch.Tensor  # int32 [tiles, 3]: first output, end of its part, part

    @classmethod
    def zeros(cls, num_adapters: int, rank: int, weights: Sequence[torch.Tensor]) -> AdapterStack:
        """For a projection of these weights."""
        first, dim = weights[0], weights[0].shape[1]
        starts = [0, *itertools.accumulate(map(len, weights))]
        tiles = [
            (output, end, part)
            for part, (start, end) in enumerate(itertools.pairwise(starts))
            for output in range(start, end, _OUTPUTS)
        ]
        return cls(
            first.new_zeros(num_adapters, len(weights), rank, dim),
            first.new_zeros(num_adapters, starts[-1], rank),
            first.new_zeros(num_adapters, len(weights), dtype=torch.float32),
            tuple(starts),
            torch.tensor(tiles, dtype=torch.int32, device=first.device),
        )

    def write(
        self, adapter: int, part: int, a_RD: torch.Tensor, b_NR: torch.Tensor, scale: float
    ) -> None:
        """Of a rank that is smaller than the stack's, the rest is 0."""
        rank, start = len(a_RD), self.starts[part]
        rows = self.b_ENR[adapter, start : start + len(b_NR)]
        self.a_EPRD[adapter, part, :rank].copy_(a_RD)
        self.a_EPRD[adapter, part, rank:].zero_()
        rows[:, :rank].copy_(b_NR)
        rows[:, rank:].zero_()
        self.scale_EP[adapter, part] = scale


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of one forward by their adapters."""

    stacks: Mapping[int, AdapterStack]  # by projection; without those that no adapter changes
    blocks: Blocks
    plan: Plan

    @classmethod
    def of(
        cls, adapter_T: torch.Tensor, num_adapters: int, stacks: Mapping[int, AdapterStack]
    ) -> AdapterRows:
        """`adapter_T`: int32, the place of each row's adapter in the stacks."""
        plan = Plan.of(len(adapter_T))
        return cls(stacks, group_by_expert(adapter_T[:, None], num_adapters, plan.block_m), plan)

    def add(self, projection: int, x_TD: torch.Tensor, out_TN: torch.Tensor) -> None:
        stack = self.stacks.get(projection)
        if stack is not None:
            expand(shrink(x_TD, stack, self.blocks, self.plan), stack, self.blocks, out_TN)

    def add_and_gate(
        self, projection: int, x_TD: torch.Tensor, gate_up_T2F: torch.Tensor, activation: str
    ) -> torch.Tensor:
        """activation(gate) * up after what adapters add, of a projection that some change."""
        stack = self.stacks[projection]
        low_STPR = shrink(x_TD, stack, self.blocks, self.plan)
        return expand_gate(low_STPR, stack, self.blocks, self.plan, gate_up_T2F, activation)


def shrink(x_TD: torch.Tensor, stack: AdapterStack, blocks: Blocks, plan: Plan) -> torch.Tensor:
    """x A' of each row's adapter, in pieces to be summed: float32 [S, T, P, R]."""
    assert x_TD.is_contiguous(), x_TD.stride()
    (num_rows, dim), (num_blocks, block_m) = x_TD.shape, blocks.pair_BM.shape
    _, parts, rank, _ = stack.a_EPRD.shape
    piece = plan.piece_of(dim, rank)
    pieces = int(triton.cdiv(dim, piece))
    low_STPR = x_TD.new_empty(pieces, num_rows, parts, rank, dtype=torch.float32)
    _shrink_kernel[(pieces, parts, num_blocks)](
        x_TD, stack.a_EPRD, blocks.pair_BM, blocks.expert_B, low_STPR, num_rows, dim,
        PARTS=parts,
        RANK=rank,
        BLOCK_M=block_m,
        PIECE=piece,
        BLOCK=_BLOCK,
        num_warps=4,
        num_stages=4 if rank * x_TD.element_size() <= 128 else 2,  # what shared memory holds
        **overlapping(OVERLAP),
    )  # fmt: skip
    return low_STPR


def expand(
    low_STPR: torch.Tensor,
    stack: AdapterStack,
    blocks: Blocks,
    out_TN: torch.Tensor,
) -> None:
    assert out_TN.is_contiguous(), out_TN.stride()
    (pieces, num_rows, parts, rank), num_outputs = low_STPR.shape, out_TN.shape[1]
    num_blocks, block_m = blocks.pair_BM.shape
    _expand_kernel[(len(stack.tiles_3), num_blocks)](
        low_STPR, stack.b_ENR, stack.scale_EP, stack.tiles_3, blocks.pair_BM, blocks.expert_B,
        out_TN, num_rows, num_outputs,
        PIECES=pieces,
        PARTS=parts,
        RANK=rank,
        BLOCK_M=block_m,
        OUTPUTS=_OUTPUTS,
        ALIGNED=math.gcd(16, *stack.starts),
        num_warps=4,
        **overlapping(OVERLAP),
    )  # fmt: skip


def expand_gate(
    low_STPR: torch.Tensor,
    stack: AdapterStack,
    blocks: Blocks,
    plan: Plan,
    gate_up_T2F: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    assert gate_up_T2F.is_contiguous(), gate_up_T2F.stride()
    (pieces, num_rows, parts, rank), width = low_STPR.shape, gate_up_T2F.shape[1] // 2
    assert parts == 2, parts
    num_blocks, block_m = blocks.pair_BM.shape
    out_TF = gate_up_T2F.new_empty(num_rows, width)
    _expand_gate_kernel[(triton.cdiv(width, plan.outputs), num_blocks)](
        low_STPR, stack.b_ENR, stack.scale_EP, blocks.pair_BM, blocks.expert_B,
        gate_up_T2F, out_TF, num_rows, width,
        PIECES=pieces,
        RANK=rank,
        BLOCK_M=block_m,
        OUTPUTS=plan.outputs,
        ACTIVATION=activation,
        num_warps=4,
        **overlapping(OVERLAP),
    )  # fmt: skip
    return out_TF


@triton.jit
def _shrink_kernel(
    x_ptr, a_ptr, row_ptr, block_adapter_ptr, low_ptr, T, D,
    PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, PIECE: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    piece, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    adapter = tl.load(block_adapter_ptr + block)
    row = tl.load(row_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    is_row = (row < T)[:, None] & (adapter >= 0)
    rank, column = tl.arange(0, RANK), tl.arange(0, BLOCK)
    x_tile_ptr = x_ptr + row.to(tl.int64)[:, None] * D + column[None, :]
    matrix = tl.maximum(adapter, 0).to(tl.int64) * PARTS + part
    a_tile_ptr = a_ptr + (matrix * RANK + rank)[:, None] * D + column[None, :]
    sums = tl.zeros([BLOCK_M, RANK], tl.float32)
    first = piece * PIECE
    end = tl.where(adapter >= 0, tl.minimum(first + PIECE, D), first)
    for start in range(first, end, BLOCK):
        inside = (start + column < D)[None, :]
        x = tl.load(x_tile_ptr + start, is_row & inside, 0.0)
        a = tl.load(a_tile_ptr + start, inside, 0.0)
        sums = tl.dot(x, tl.trans(a), sums, input_precision="ieee")
    await_previous(OVERLAP)
    place = (piece * T + row.to(tl.int64)) * PARTS + part
    tl.store(low_ptr + place[:, None] * RANK + rank[None, :], sums, is_row)


@triton.jit
def _expand_kernel(
    low_ptr, b_ptr, scale_ptr, tile_ptr, row_ptr, block_adapter_ptr, out_ptr, T, N,
    PIECES: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
    OUTPUTS: tl.constexpr, ALIGNED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tile, block = tl.program_id(0), tl.program_id(1)
    first = tl.multiple_of(tl.load(tile_ptr + 3 * tile), ALIGNED)
    end = tl.multiple_of(tl.load(tile_ptr + 3 * tile + 1), ALIGNED)
    part = tl.load(tile_ptr + 3 * tile + 2)
    adapter = tl.load(block_adapter_ptr + block)
    row = tl.load(row_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_row = (row < T)[:, None] & (adapter >= 0)
    scale = tl.load(scale_ptr + tl.maximum(adapter, 0) * PARTS + part)
    output = first + tl.arange(0, OUTPUTS)
    is_output = output < end
    b = _load_b(b_ptr, adapter, output, is_output, N, RANK)
    place = out_ptr + row[:, None] * N + output[None, :]
    out = tl.load(place, is_row & is_output[None, :], 0.0)
    await_previous(OVERLAP)
    if (adapter >= 0) & (scale != 0.0):
        low = _load_low(low_ptr, row, is_row, part, T, PIECES, PARTS, RANK, BLOCK_M)
        y = tl.dot(low.to(dtype), tl.trans(b), input_precision="ieee") * scale
        tl.store(place, (out.to(tl.float32) + y).to(dtype), is_row & is_output[None, :])


@triton.jit
def _expand_gate_kernel(
    low_ptr, b_ptr, scale_ptr, row_ptr, block_adapter_ptr, gate_up_ptr, out_ptr, T, F,
    PIECES: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, OUTPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tile, block = tl.program_id(0), tl.program_id(1)
    adapter = tl.load(block_adapter_ptr + block)
    row = tl.load(row_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_row = (row < T)[:, None] & (adapter >= 0)
    scale_ptr += 2 * tl.maximum(adapter, 0)
    gate_scale, up_scale = tl.load(scale_ptr), tl.load(scale_ptr + 1)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = (output < F) & (adapter >= 0)
    gate_b = _load_b(b_ptr, adapter, output, is_output, 2 * F, RANK)
    up_b = _load_b(b_ptr, adapter, F + output, is_output, 2 * F, RANK)
    written = is_row & is_output[None, :]
    gate_up_ptr += row[:, None] * 2 * F + output[None, :]
    x, up = tl.load(gate_up_ptr, written, 0.0), tl.load(gate_up_ptr + F, written, 0.0)
    await_previous(OVERLAP)
    if adapter >= 0:
        x_new = _added(x, low_ptr, row, is_row, 0, T, gate_b, gate_scale, PIECES, RANK, BLOCK_M)
        up_new = _added(up, low_ptr, row, is_row, 1, T, up_b, up_scale, PIECES, RANK, BLOCK_M)
        y = gate(x_new, up_new, dtype, ACTIVATION)
        tl.store(out_ptr + row[:, None] * F + output[None, :], y.to(dtype), written)


@triton.jit
def _added(
    x, low_ptr, row, is_row, part, T, b, scale,
    PIECES: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """x and what the adapter adds, float32; of a scale of 0 nothing, whatever B is."""
    low = _load_low(low_ptr, row, is_row, part, T, PIECES, 2, RANK, BLOCK_M)
    y = tl.dot(low.to(b.dtype), tl.trans(b), input_precision="ieee") * scale
    return x.to(tl.float32) + tl.where(scale != 0.0, y, 0.0)


@triton.jit
def _load_b(b_ptr, adapter, output, is_read, N, RANK: tl.constexpr):
    """[outputs, RANK]"""
    rank = tl.arange(0, RANK)[None, :]
    b_row = tl.maximum(adapter, 0).to(tl.int64) * N + output
    return tl.load(b_ptr + b_row[:, None] * RANK + rank, is_read[:, None], 0.0)


@triton.jit
def _load_low(
    low_ptr, row, is_row, part, T,
    PIECES: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The sum of the pieces, [BLOCK_M, RANK]."""
    low_ptr += (row * PARTS + part)[:, None] * RANK + tl.arange(0, RANK)[None, :]
    if PIECES == 1:
        return tl.load(low_ptr, is_row, 0.0)
    # All at once, not one after the other.
    piece = tl.arange(0, triton.next_power_of_2(PIECES))[:, None, None]
    is_piece = is_row[None, :, :] & (piece < PIECES)
    return tl.sum(tl.load(low_ptr[None, :, :] + piece * (T * PARTS * RANK), is_piece, 0.0), axis=0)
