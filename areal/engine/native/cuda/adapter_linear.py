"""What the adapters of rows add to a projection: out[t] += scale * (x[t] A[e]') B[e]'.

Rows of one forward may have different adapters. They are grouped once per forward, as tokens are by
their experts (routing.py), and each projection takes two launches: `shrink` multiplies a block of
rows of one adapter with its A, a piece of the inner dim in each program; `expand` sums the pieces
in their order, multiplies with B and adds to the output in place. Shapes of launches depend on
shapes alone, so graphs capture them. An adapter that leaves a layer as it is has scale 0 there,
and is not read.

A projection of several layers side by side (queries, keys and values) has an A and a B for each of
them, its parts. Sums are float32; their product with A is rounded to the dtype of the rows, as a
matrix product of its own would be.

Shape legend: T rows, D inputs, N outputs of all parts, R rank, E adapters, P parts, S pieces of D,
B blocks of M rows.
"""

# Launch options (num_warps, num_stages) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from areal.engine.native.cuda.device import OVERLAP
from areal.engine.native.cuda.expert_linear import block_m_for
from areal.engine.native.cuda.routing import Blocks, group_by_expert

MIN_RANK = 16  # of the tensor cores
_OUTPUTS = 128  # of one program of `expand`
_PIECE = 1024  # of D, in one program of `shrink`
_BLOCK = 128


@dataclass(frozen=True, slots=True, eq=False)
class AdapterStack:
    """The matrices of all adapters for one projection."""

    a_EPRD: torch.Tensor
    b_ENR: torch.Tensor
    scale_EP: torch.Tensor  # float32
    starts: tuple[int, ...]  # the first output of each part
    tiles_3: torch.Tensor  # int32 [tiles, 3]: first output, end of its part, part

    @classmethod
    def zeros(cls, num_adapters: int, rank: int, weights: Sequence[torch.Tensor]) -> AdapterStack:
        """For a projection of these weights."""
        first, dim = weights[0], weights[0].shape[1]
        tiles, starts, start = [], [], 0
        for part, weight in enumerate(weights):
            end = start + len(weight)
            tiles += [(output, end, part) for output in range(start, end, _OUTPUTS)]
            starts.append(start)
            start = end
        return cls(
            first.new_zeros(num_adapters, len(weights), rank, dim),
            first.new_zeros(num_adapters, start, rank),
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

    @classmethod
    def of(
        cls, adapter_T: torch.Tensor, num_adapters: int, stacks: Mapping[int, AdapterStack]
    ) -> AdapterRows:
        """`adapter_T`: int32, the place of each row's adapter in the stacks."""
        block_m = block_m_for(len(adapter_T), num_adapters)
        return cls(stacks, group_by_expert(adapter_T[:, None], num_adapters, block_m))

    def add(self, projection: int, x_TD: torch.Tensor, out_TN: torch.Tensor) -> None:
        stack = self.stacks.get(projection)
        if stack is not None:
            expand(shrink(x_TD, stack, self.blocks), stack, self.blocks, out_TN)


def shrink(x_TD: torch.Tensor, stack: AdapterStack, blocks: Blocks) -> torch.Tensor:
    """x A' of each row's adapter, in pieces to be summed: float32 [S, T, P, R]."""
    assert x_TD.is_contiguous(), x_TD.stride()
    (num_rows, dim), (num_blocks, block_m) = x_TD.shape, blocks.pair_BM.shape
    _, parts, rank, _ = stack.a_EPRD.shape
    pieces = -(-dim // _PIECE)
    low_STPR = x_TD.new_empty(pieces, num_rows, parts, rank, dtype=torch.float32)
    _shrink_kernel[(pieces, parts, num_blocks)](
        x_TD, stack.a_EPRD, stack.scale_EP, blocks.pair_BM, blocks.expert_B, low_STPR,
        num_rows, dim,
        PARTS=parts,
        RANK=rank,
        BLOCK_M=block_m,
        PIECE=_PIECE,
        BLOCK=_BLOCK,
        OVERLAP=OVERLAP,
        num_warps=4,
        num_stages=3 if rank <= 64 else 2,
        launch_pdl=OVERLAP,
    )  # fmt: skip
    return low_STPR


def expand(
    low_STPR: torch.Tensor, stack: AdapterStack, blocks: Blocks, out_TN: torch.Tensor
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
        OVERLAP=OVERLAP,
        num_warps=4,
        launch_pdl=OVERLAP,
    )  # fmt: skip


@triton.jit
def _shrink_kernel(
    x_ptr, a_ptr, scale_ptr, row_ptr, block_adapter_ptr, low_ptr, T, D,
    PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, PIECE: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    piece, part, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if OVERLAP:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    adapter = tl.load(block_adapter_ptr + block)
    matrix = tl.maximum(adapter, 0) * PARTS + part
    if (adapter >= 0) & (tl.load(scale_ptr + matrix) != 0.0):
        row = tl.load(row_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
        is_row = (row < T)[:, None]
        rank, column = tl.arange(0, RANK), tl.arange(0, BLOCK)
        x_tile_ptr = x_ptr + row.to(tl.int64)[:, None] * D + column[None, :]
        a_tile_ptr = a_ptr + (matrix.to(tl.int64) * RANK + rank)[:, None] * D + column[None, :]
        sums = tl.zeros([BLOCK_M, RANK], tl.float32)
        for start in range(piece * PIECE, tl.minimum(piece * PIECE + PIECE, D), BLOCK):
            inside = (start + column < D)[None, :]
            x = tl.load(x_tile_ptr + start, is_row & inside, 0.0)
            a = tl.load(a_tile_ptr + start, inside, 0.0)
            sums = tl.dot(x, tl.trans(a), sums, input_precision="ieee")
        place = (piece * T + row.to(tl.int64)) * PARTS + part
        tl.store(low_ptr + place[:, None] * RANK + rank[None, :], sums, is_row)


@triton.jit
def _expand_kernel(
    low_ptr, b_ptr, scale_ptr, tile_ptr, row_ptr, block_adapter_ptr, out_ptr, T, N,
    PIECES: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
    OUTPUTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tile, block = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(tile_ptr + 3 * tile), tl.load(tile_ptr + 3 * tile + 1)
    part = tl.load(tile_ptr + 3 * tile + 2)
    if OVERLAP:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    adapter = tl.load(block_adapter_ptr + block)
    scale = tl.load(scale_ptr + tl.maximum(adapter, 0) * PARTS + part)
    if (adapter >= 0) & (scale != 0.0):
        row = tl.load(row_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        is_row = (row < T)[:, None]
        rank, output = tl.arange(0, RANK), first + tl.arange(0, OUTPUTS)
        inside = output < end
        b_row = adapter.to(tl.int64) * N + output
        b = tl.load(b_ptr + b_row[:, None] * RANK + rank[None, :], inside[:, None], 0.0)
        low_tile_ptr = low_ptr + (row * PARTS + part)[:, None] * RANK + rank[None, :]
        sums = tl.zeros([BLOCK_M, RANK], tl.float32)
        for piece in range(PIECES):
            sums += tl.load(low_tile_ptr + piece * (T * PARTS * RANK), is_row, 0.0)
        y = tl.dot(sums.to(dtype), tl.trans(b), input_precision="ieee") * scale
        place = out_ptr + row[:, None] * N + output[None, :]
        written = is_row & inside[None, :]
        out = tl.load(place, written, 0.0).to(tl.float32) + y
        tl.store(place, out.to(dtype), written)
