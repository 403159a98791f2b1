"""The gated delta rule of packed sequences by kernels, differentiable: `recur_packed` on a GPU.

    chunks = Chunks.of(lengths, device)                    # once per micro-batch
    out_TNV = recur_by_kernels(inputs, sizes, positions_T, chunks)

Equations in delta_rule.py, kernels in delta_chunk_kernels.py and delta_conv_kernels.py. Sequences
are cut into chunks of up to 64 tokens, none of which has tokens of two. Between kernels, tensors
have the dtype of the inputs; sums of decays, and states while they are carried on, are float32.

Shape legend: as in delta_rule.py.
"""

# Launch options (num_warps, num_stages) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from areal.models.common import delta_chunk_kernels as chunk_kernels
from areal.models.common import delta_conv_kernels as conv_kernels
from areal.models.common.args import DeltaArgs
from areal.models.common.delta_rule import CHUNK, NORM_EPS, DeltaInputs

_MIX_ROWS = 16
_MANY_PROGRAMS = 128  # about as many as a device has multiprocessors
_BACK_ROWS, _BACK_AT_ONCE = 64, 4


@dataclass(frozen=True, slots=True)
class Chunks:
    """Of M chunks, in the order of their tokens."""

    bounds_M2: torch.Tensor  # int32: first token, and the one after the last
    first_R1: torch.Tensor  # int32: the first chunk of each sequence, and the number of all

    @classmethod
    def of(cls, lengths: torch.Tensor, device: torch.device) -> Chunks:
        """`lengths` of the sequences, int64 on the CPU; those without tokens are left out."""
        used = lengths[lengths > 0].numpy()
        borders = [[length] for length in used.tolist()]
        return cls.between(
            np.cumsum(used) - used, borders, lambda array: torch.from_numpy(array).to(device)
        )

    @classmethod
    def between(
        cls,
        starts: np.ndarray,
        borders: list[list[int]],
        upload: Callable[[np.ndarray], torch.Tensor],
    ) -> Chunks:
        """Sequence r has the tokens from `starts[r]` on; it has as many as the last of its
        `borders`, and a chunk ends at each of these."""
        bounds, first = [], [0]
        for start, ends in zip(starts.tolist(), borders, strict=True):
            begin = 0
            for end in ends:
                cuts = [*range(begin, end, CHUNK), end]
                bounds += [(start + a, start + b) for a, b in zip(cuts, cuts[1:], strict=False)]
                begin = end
            first.append(len(bounds))
        return cls(upload(np.array(bounds, np.int32)), upload(np.array(first, np.int32)))


def recur_by_kernels(
    inputs: DeltaInputs, sizes: DeltaArgs, positions_T: torch.Tensor, chunks: Chunks
) -> torch.Tensor:
    """Outputs [T, N, V] of packed sequences, each from a state of zeros."""
    return _Recur.apply(
        inputs.qkv_TX, inputs.decay_TN, inputs.beta_TN, inputs.kernel_XW, sizes, positions_T, chunks
    )


class _Recur(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_TX, decay_TN, beta_TN, kernel_XW, sizes, positions_T, chunks):
        qkv_TX, kernel_XW = qkv_TX.contiguous(), kernel_XW.contiguous()
        decay_TN, beta_TN = decay_TN.contiguous(), beta_TN.contiguous()
        mixed_TX = mix(qkv_TX, kernel_XW, sizes, positions_T)
        solved = solve(mixed_TX, decay_TN, beta_TN, sizes, chunks)
        states = carry(mixed_TX, solved, sizes, chunks)
        out_TNV = read(mixed_TX, solved, states, sizes, chunks)
        ctx.save_for_backward(
            qkv_TX, kernel_XW, beta_TN, positions_T, chunks.bounds_M2, chunks.first_R1, mixed_TX,
            solved.sums_TN, solved.inverse_TNC, solved.reads_TNK, solved.writes_TNV, states,
        )  # fmt: skip
        ctx.sizes = sizes
        return out_TNV

    @staticmethod
    def backward(ctx: Any, *grads):
        qkv_TX, kernel_XW, beta_TN, positions_T, bounds, first, *rest = ctx.saved_tensors
        mixed_TX, sums, inverse, reads, writes, states = rest
        chunks, sizes = Chunks(bounds, first), ctx.sizes
        solved = Solved(sums, inverse, reads, writes)
        d_mixed_TX, d_decay_TN, d_beta_TN = _recur_back(
            mixed_TX, beta_TN, solved, states, grads[0].contiguous(), sizes, chunks
        )
        d_qkv_TX, d_kernel_XW = _mix_back(qkv_TX, kernel_XW, d_mixed_TX, sizes, positions_T)
        return d_qkv_TX, d_decay_TN, d_beta_TN, d_kernel_XW, None, None, None


@dataclass(frozen=True, slots=True)
class Solved:
    sums_TN: torch.Tensor
    inverse_TNC: torch.Tensor
    reads_TNK: torch.Tensor
    writes_TNV: torch.Tensor  # less what the states answer, once they are known


def mix(
    qkv_TX: torch.Tensor,
    kernel_XW: torch.Tensor,
    sizes: DeltaArgs,
    positions_T: torch.Tensor,
    before: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Queries, keys and values [T, X] after the convolution, the first two of length 1, queries
    scaled. Rows of `qkv_TX` may be apart.

    `before`: a cache of the rows before the first token of a sequence [S, W - 1, X], the number
    of those of each sequence [R], and the sequence of each token [T]."""
    out_TX = qkv_TX.new_empty(qkv_TX.shape)
    for grid, first, plan in _parts(qkv_TX, sizes):
        conv_kernels.mix_kernel[grid](
            qkv_TX, kernel_XW, positions_T, *(before or (None, None, None)), out_TX,
            *qkv_TX.shape, qkv_TX.stride(0), first, sizes.num_key_heads, sizes.key_dim**-0.5,
            NORM_EPS, W=sizes.conv_size, ROWS=_MIX_ROWS, num_warps=4, **plan,
        )  # fmt: skip
    return out_TX


def _parts(qkv_TX: torch.Tensor, sizes: DeltaArgs):
    """Grid, first column and constants of the queries and keys, and of the values."""
    num_tiles, both = triton.cdiv(len(qkv_TX), _MIX_ROWS), 2 * sizes.num_key_heads
    yield (num_tiles, both), 0, {"DIM": sizes.key_dim, "NORM": True}
    value_part = {"DIM": sizes.value_dim, "NORM": False}
    yield (num_tiles, sizes.num_value_heads), both * sizes.key_dim, value_part


def _constants(x: torch.Tensor, sizes: DeltaArgs) -> dict[str, Any]:
    # Three products of halves are as good as one of float32. Of 16 bits only the inverse of a chunk
    # is float32, and rounded to 16 bits after it. Heads of 16 have two warps: with four,
    # products of 16 bits with 16 columns were garbage on an H200 (torch 2.11).
    is_narrow = min(sizes.key_dim, sizes.value_dim) < 32
    return {
        "num_warps": 2 if is_narrow else 4,
        "N": sizes.num_value_heads,
        "H": sizes.num_key_heads,
        "K": sizes.key_dim,
        "V": sizes.value_dim,
        "C": CHUNK,
        "PRECISION": "tf32x3" if x.dtype == torch.float32 else "tf32",
    }


def _value_block(sizes: DeltaArgs, chunks: Chunks) -> int:
    """Value dims of a program that goes from chunk to chunk: fewer where there are few programs."""
    wide = min(sizes.value_dim, 64)
    num_sequences = len(chunks.first_R1) - 1
    num_programs = sizes.value_dim // wide * sizes.num_value_heads * num_sequences
    return wide if num_programs >= _MANY_PROGRAMS else min(sizes.value_dim, 32)


def solve(
    mixed_TX: torch.Tensor,
    decay_TN: torch.Tensor,
    beta_TN: torch.Tensor,
    sizes: DeltaArgs,
    chunks: Chunks,
) -> Solved:
    num_tokens, heads = decay_TN.shape
    new = mixed_TX.new_empty
    solved = Solved(
        torch.empty_like(decay_TN),
        new(num_tokens, heads, CHUNK),
        new(num_tokens, heads, sizes.key_dim),
        new(num_tokens, heads, sizes.value_dim),
    )
    chunk_kernels.solve_kernel[(len(chunks.bounds_M2), heads)](
        mixed_TX, decay_TN, beta_TN, chunks.bounds_M2, solved.sums_TN, solved.inverse_TNC,
        solved.reads_TNK, solved.writes_TNV, mixed_TX.shape[1],
        **_constants(mixed_TX, sizes), num_stages=1,
    )  # fmt: skip
    return solved


def carry(
    mixed_TX: torch.Tensor,
    solved: Solved,
    sizes: DeltaArgs,
    chunks: Chunks,
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """States [M, N, K, V] before each chunk; completes the writes.

    `cache`: states [S, N, K, V], the number of that before each sequence [R], and up to two that
    the state after each chunk is kept as [M, 2] (-1: none)."""
    heads, num_chunks = sizes.num_value_heads, len(chunks.bounds_M2)
    states = mixed_TX.new_empty(num_chunks, heads, sizes.key_dim, sizes.value_dim)
    block = _value_block(sizes, chunks)
    # Two tiles of float32 in flight would not fit into shared memory.
    stages = 2 if mixed_TX.element_size() == 2 else 1
    grid = (sizes.value_dim // block, heads, len(chunks.first_R1) - 1)
    chunk_kernels.states_kernel[grid](
        mixed_TX, solved.sums_TN, solved.reads_TNK, solved.writes_TNV, states, chunks.bounds_M2,
        chunks.first_R1, *(cache or (None, None, None)), mixed_TX.shape[1],
        BV=block, **_constants(mixed_TX, sizes), num_stages=stages,
    )  # fmt: skip
    return states


def read(
    mixed_TX: torch.Tensor,
    solved: Solved,
    states: torch.Tensor,
    sizes: DeltaArgs,
    chunks: Chunks,
) -> torch.Tensor:
    out_TNV, block = torch.empty_like(solved.writes_TNV), min(sizes.value_dim, 64)
    grid = (len(chunks.bounds_M2), sizes.num_value_heads, sizes.value_dim // block)
    chunk_kernels.outputs_kernel[grid](
        mixed_TX, solved.sums_TN, solved.writes_TNV, states, chunks.bounds_M2, out_TNV,
        mixed_TX.shape[1], BV=block, **_constants(mixed_TX, sizes), num_stages=1,
    )  # fmt: skip
    return out_TNV


def _recur_back(
    mixed_TX: torch.Tensor,
    beta_TN: torch.Tensor,
    solved: Solved,
    states: torch.Tensor,
    d_out_TNV: torch.Tensor,
    sizes: DeltaArgs,
    chunks: Chunks,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `mixed_TX`, of the decays and of beta."""
    bounds, stride = chunks.bounds_M2, mixed_TX.shape[1]
    num_chunks, heads, key_dim, value_dim = states.shape
    num_tokens, constants = len(mixed_TX), _constants(mixed_TX, sizes)
    d_writes, d_states = torch.empty_like(solved.writes_TNV), torch.empty_like(states)
    block = min(value_dim, 64)
    chunk_kernels.values_back_kernel[(num_chunks, heads, value_dim // block)](
        mixed_TX, solved.sums_TN, bounds, d_out_TNV, d_writes, stride,
        BV=block, **constants, num_stages=1,
    )  # fmt: skip
    block = _value_block(sizes, chunks)
    chunk_kernels.states_back_kernel[(value_dim // block, heads, len(chunks.first_R1) - 1)](
        mixed_TX, solved.sums_TN, solved.reads_TNK, bounds, chunks.first_R1, d_out_TNV, d_writes,
        d_states, stride, BV=block, **constants, num_stages=1,
    )  # fmt: skip
    blocks = {"BK": min(key_dim, 64), "BV": min(value_dim, 64)}
    num_blocks = key_dim // blocks["BK"]
    d_sums = solved.sums_TN.new_empty(num_blocks, num_tokens, heads)
    d_mixed = mixed_TX.new_empty(num_tokens, heads * (2 * key_dim + value_dim))
    d_reads = torch.empty_like(solved.reads_TNK)
    chunk_kernels.chunk_back_kernel[(num_chunks, heads, num_blocks)](
        mixed_TX, solved.sums_TN, solved.writes_TNV, states, bounds, d_out_TNV, d_writes, d_states,
        d_mixed, d_reads, d_sums, stride, num_tokens * heads,
        **blocks, **constants, num_stages=1,
    )  # fmt: skip
    d_decay_TN, d_beta_TN = torch.empty_like(solved.sums_TN), torch.empty_like(beta_TN)
    chunk_kernels.solve_back_kernel[(num_chunks, heads)](
        mixed_TX, beta_TN, solved.sums_TN, solved.inverse_TNC, bounds, d_writes, d_reads, d_sums,
        d_mixed, d_decay_TN, d_beta_TN, stride, num_tokens * heads,
        BLOCKS=num_blocks, **constants, num_stages=1,
    )  # fmt: skip
    return _of_key_heads(d_mixed, sizes), d_decay_TN, d_beta_TN


def _of_key_heads(d_mixed: torch.Tensor, sizes: DeltaArgs) -> torch.Tensor:
    """[T, X]: value heads that share a query and a key add up."""
    group = sizes.num_value_heads // sizes.num_key_heads
    if group == 1:
        return d_mixed
    width = 2 * sizes.num_value_heads * sizes.key_dim
    shared = d_mixed[:, :width].unflatten(1, (-1, group, sizes.key_dim)).float().sum(2)
    return torch.cat([shared.flatten(1).to(d_mixed.dtype), d_mixed[:, width:]], dim=1)


def _mix_back(
    qkv_TX: torch.Tensor,
    kernel_XW: torch.Tensor,
    d_mixed_TX: torch.Tensor,
    sizes: DeltaArgs,
    positions_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, width = qkv_TX.shape
    num_parts = -(-num_tokens // (_BACK_ROWS - sizes.conv_size + 1))
    d_qkv_TX = torch.empty_like(qkv_TX)
    shape = (num_parts, sizes.conv_size, width)
    d_kernel = torch.empty(shape, dtype=torch.float32, device=qkv_TX.device)
    for (_, heads), first, plan in _parts(qkv_TX, sizes):
        conv_kernels.mix_back_kernel[(num_parts, heads)](
            qkv_TX, kernel_XW, positions_T, d_mixed_TX, d_qkv_TX, d_kernel, num_tokens, width,
            first, sizes.num_key_heads, sizes.key_dim**-0.5, NORM_EPS,
            W=sizes.conv_size, ROWS=_BACK_ROWS, AT_ONCE=_BACK_AT_ONCE, num_warps=1, **plan,
        )  # fmt: skip
    return d_qkv_TX, d_kernel.sum(0).T.to(kernel_XW.dtype).contiguous()
