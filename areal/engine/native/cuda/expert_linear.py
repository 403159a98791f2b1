"""Products of many tokens with their experts, on tensor cores.

    expert_gate_up   hidden[s] = activation(x[t] W1[e]') * (x[t] W3[e]')
    expert_down      out[s] = weight[s] * (hidden[s] W2[e]')

for every pair s of a token t and one of its experts e. A program multiplies a tile of an expert's
weights with one block of its pairs (routing.py), so that an expert nobody chose is not read. As in
skinny_linear.py the weight is the left operand, whose tiles have at least 64 rows, and the block's
rows the right one, which is only as wide as the rows of an expert need. Programs of one block are
neighbours: they share its rows in the L2 cache, and blocks of one expert its weights.

Each pair has its own row of the result, so nothing is added across programs; `add_rms_norm` sums a
token's choices in their order. A row's bits do not depend on its place in a block. Sums are
float32; results are rounded where the module rounds them. All tensors are contiguous.

Shape legend: T tokens, K experts per token, S = T * K pairs, D model dim, F expert dim, E experts,
B blocks of M pairs.
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
from areal.engine.native.cuda.device import OVERLAP, Device, await_previous, overlapping
from areal.engine.native.cuda.routing import Blocks

_MIN_BLOCK_M, _MAX_BLOCK_M = 16, 128


@dataclass(frozen=True, slots=True)
class Plan:
    block_m: int  # pairs in one program
    rows: int  # of the weights, in one program (2 make one gated output)
    block: int  # elements of the inner dim in one tile
    warps: int
    stages: int  # tiles in flight or in use
    overlap: bool = OVERLAP


@functools.cache
def block_m_for(num_pairs: int, num_experts: int) -> int:
    """A little more than an expert's share of the pairs, so that most experts are read once."""
    wanted = int(triton.next_power_of_2(-(-3 * num_pairs // (2 * num_experts))))
    return min(max(wanted, _MIN_BLOCK_M), _MAX_BLOCK_M)


@functools.cache
def plan_for(block_m: int, dim: int, element_bytes: int, device: Device) -> Plan:
    """Narrow blocks are bound by reading weights: two programs of a multiprocessor keep many bytes
    in flight. Wide ones are bound by the L2 cache or by arithmetic, and want large tiles."""
    if element_bytes > 2:  # not the tensor cores' types
        return Plan(block_m, rows=32, block=32, warps=4, stages=2)
    rows, warps, resident = (128, 4, 2) if block_m <= 32 else (256, 8, 1)
    room = device.shared_bytes // resident - 1024
    column_bytes = element_bytes * (rows + block_m)
    is_narrow = block_m <= 32 and 3 * 128 * column_bytes <= room
    block = 128 if is_narrow and dim % 128 == 0 else 64
    stages = min(room // (block * column_bytes), 5)
    if block_m == _MAX_BLOCK_M:
        # Filling the stages takes as long as emptying them: not worth it for a few tiles.
        stages = min(stages, max(3, dim // block // 4))
    return Plan(block_m, rows, block, warps, max(stages, 2))


def expert_gate_up(
    x_TD: torch.Tensor,
    w1_EFD: torch.Tensor,
    w3_EFD: torch.Tensor,
    activation: str,
    blocks: Blocks,
    top_k: int,
    out_SF: torch.Tensor,
    plan: Plan,
) -> None:
    _launch(x_TD, w1_EFD, w3_EFD, activation, None, blocks, top_k, out_SF, plan)


def expert_down(
    hidden_SF: torch.Tensor,
    w2_EDF: torch.Tensor,
    weights_TK: torch.Tensor,
    blocks: Blocks,
    out_SD: torch.Tensor,
    plan: Plan,
) -> None:
    _launch(hidden_SF, w2_EDF, None, None, weights_TK, blocks, 1, out_SD, plan)


def _launch(
    x, weight_END, up_END, activation, weights_TK, blocks, rows_per_x, out_SN, plan
) -> None:
    (num_blocks, block_m), (_, num_outputs, dim) = blocks.pair_BM.shape, weight_END.shape
    gated = up_END is not None
    outputs = plan.rows // 2 if gated else plan.rows
    assert block_m == plan.block_m, (block_m, plan)
    _expert_kernel[(triton.cdiv(num_outputs, outputs), num_blocks)](
        x, weight_END, up_END, weights_TK, blocks.pair_BM, blocks.expert_B, out_SN,
        len(out_SN), num_outputs, dim,
        ROWS_PER_X=rows_per_x,
        BLOCK_M=block_m,
        OUTPUTS=outputs,
        BLOCK=plan.block,
        GATED=gated,
        ACTIVATION=activation,
        WHOLE=dim % plan.block == 0,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **overlapping(plan.overlap),
    )  # fmt: skip


@triton.jit
def _expert_kernel(
    x_ptr, weight_ptr, up_ptr, weights_ptr, pair_ptr, block_expert_ptr, out_ptr, S, N, D,
    ROWS_PER_X: tl.constexpr, BLOCK_M: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, WHOLE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tile, block = tl.program_id(0), tl.program_id(1)
    await_previous(OVERLAP)
    expert = tl.load(block_expert_ptr + block)
    if expert >= 0:
        pair = tl.load(pair_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
        is_pair = pair < S
        output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        column = tl.arange(0, BLOCK)
        x_row = (pair // ROWS_PER_X).to(tl.int64)
        x_tile_ptr = x_ptr + x_row[:, None] * D + column[None, :]
        # Past the end, the last row repeats: its product is not written.
        weight_row = expert.to(tl.int64) * N + tl.minimum(output, N - 1)
        place = weight_row[:, None] * D + column[None, :]
        sums = tl.zeros([OUTPUTS, BLOCK_M], tl.float32)
        up_sums = tl.zeros([OUTPUTS, BLOCK_M], tl.float32)
        for start in range(0, D, BLOCK):
            inside = (start + column < D)[None, :]
            # Padding is not read: one row in most programs would be a hot spot of the L2 cache.
            is_read = is_pair[:, None] if WHOLE else is_pair[:, None] & inside
            x = tl.trans(tl.load(x_tile_ptr + start, is_read, 0.0))
            weight = _load_tile(weight_ptr + start + place, inside, WHOLE)
            sums = tl.dot(weight, x, sums, input_precision="ieee")
            if GATED:
                up = _load_tile(up_ptr + start + place, inside, WHOLE)
                up_sums = tl.dot(up, x, up_sums, input_precision="ieee")
        if GATED:
            y = gate(sums, up_sums, dtype, ACTIVATION)
        else:
            share = tl.load(weights_ptr + pair, is_pair, 0.0)
            y = sums.to(dtype).to(tl.float32) * share.to(dtype).to(tl.float32)[None, :]
        written = (output < N)[:, None] & is_pair[None, :]
        out_place = pair.to(tl.int64)[None, :] * N + output[:, None]
        tl.store(out_ptr + out_place, y.to(dtype), written)


@triton.jit
def _load_tile(tile_ptr, inside, WHOLE: tl.constexpr):
    return tl.load(tile_ptr) if WHOLE else tl.load(tile_ptr, inside, 0.0)
