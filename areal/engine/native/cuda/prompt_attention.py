"""Attention of decode rows to a shared prompt, whose keys are read once for many rows.

A program takes a part of a prompt and a bundle of its rows (shared_prompts.py), each with the G
query heads of a key/value head: up to 128 queries, which two warpgroups multiply with a tile of
keys. It writes (max, sum, acc) of every row; `decode_attention` folds the parts (`fold_prompt`) and
continues with the row's own tokens.

Shapes: R rows, B bundles, N query heads, K key/value heads, G = N / K, H head dim; M = (row of the
bundle, query head of the group) pairs.
"""

# Launch options (num_warps, num_stages) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from areal.engine.native.cuda.attention_tiles import attend_tiles, padded, scale_log2e
from areal.engine.native.cuda.device import OVERLAP, await_previous, device_of, overlapping
from areal.engine.native.cuda.fp8_tensors import CacheScales
from areal.engine.native.cuda.shared_prompts import PROMPT_TILE, SharedPrompts


def prompt_attention(
    q_RNH: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table_SP: torch.Tensor,
    slot_R: torch.Tensor,
    shared: SharedPrompts,
    *,
    scale: float | None = None,
    scales: CacheScales | None = None,
) -> None:
    """Fills `shared.space` for the rows that share; `decode_attention` reads it.

    `scale` of the scores; None: H ** -0.5.
    `scales` of a cache in FP8.
    """
    heads, page_size = shared.space.heads, keys.shape[2]
    is_half = q_RNH.element_size() == 2
    width = padded(heads.head_dim, fp8=scales is not None)
    row_bytes = width * q_RNH.element_size()
    stages = device_of(q_RNH.device).stages(heads.pairs * row_bytes, 2 * PROMPT_TILE * row_bytes, 3)
    num_items = max(shared.space.most_items, len(shared.bundle_B2))
    _prompt_kernel[(heads.num_kv_heads, num_items)](
        q_RNH, keys, values, scales and scales.keys, scales and scales.values, page_table_SP,
        slot_R, shared.shared_R, shared.member_R, shared.bundle_B2, shared.counts,
        shared.space.acc, shared.space.score_max, shared.space.weight_sum, q_RNH.stride(0),
        page_table_SP.stride(0), keys.stride(0), scale_log2e(scale, heads.head_dim),
        GROUP=heads.num_heads // heads.num_kv_heads,
        HEAD_DIM=heads.head_dim,
        PADDED=width,
        PAGE_SIZE=page_size,
        PAIRS=heads.pairs,
        TILE=PROMPT_TILE,
        num_warps=8 if is_half else 4,
        num_stages=stages if is_half else 1,
        **overlapping(OVERLAP),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["slots", "shared_tokens", "members", "bundles", "counts"],
)
def _prompt_kernel(
    q, keys, values, key_scales, value_scales, page_table, slots, shared_tokens, members, bundles,
    counts, prompt_acc, prompt_max, prompt_sum, q_stride, table_stride, page_stride, scale_log2e,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAIRS: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_previous(OVERLAP)
    kv_head = tl.program_id(0)
    num_bundles, parts = tl.load(counts), tl.load(counts + 1)
    # The parts of a prompt are adjacent programs, so they start together.
    bundle = tl.program_id(1) // tl.maximum(parts, 1)
    part = tl.program_id(1) % tl.maximum(parts, 1)
    if bundle >= num_bundles:
        return
    first = tl.load(bundles + 2 * bundle)
    num_rows = tl.load(bundles + 2 * bundle + 1)
    leader = tl.load(members + first)
    shared = tl.load(shared_tokens + leader)
    span = prompt_span(shared, parts, TILE)
    begin = part * span
    if begin >= shared:
        return

    pair_M = tl.arange(0, PAIRS)
    dim_H = tl.arange(0, PADDED)
    real_M = pair_M < num_rows * GROUP
    real_MH = real_M[:, None] & (dim_H < HEAD_DIM)[None, :]
    row_M = tl.load(members + first + pair_M // GROUP, mask=real_M, other=0).to(tl.int64)
    head_M = kv_head * GROUP + pair_M % GROUP
    q_MH = tl.load(
        q + row_M[:, None] * q_stride + head_M[:, None] * HEAD_DIM + dim_H[None, :],
        mask=real_MH,
        other=0.0,
    )
    max_M, sum_M, acc_MH = attend_tiles(
        q_MH,
        row_M,  # no position: all keys are visible to all rows
        tl.full([PAIRS], float("-inf"), tl.float32),
        tl.zeros([PAIRS], tl.float32),
        tl.zeros([PAIRS, PADDED], tl.float32),
        keys + kv_head * PAGE_SIZE * HEAD_DIM,
        values + kv_head * PAGE_SIZE * HEAD_DIM,
        None if key_scales is None else key_scales + kv_head * PAGE_SIZE,
        None if key_scales is None else value_scales + kv_head * PAGE_SIZE,
        page_table + tl.load(slots + leader).to(tl.int64) * table_stride,
        begin, tl.minimum(begin + span, shared), shared - 1, page_stride, scale_log2e, 0,
        HEAD_DIM, PAGE_SIZE, TILE,
        MASKED=False, WINDOWED=False,
    )  # fmt: skip
    entry_M = ((row_M * tl.num_programs(0) + kv_head) * parts + part) * GROUP + pair_M % GROUP
    tl.store(prompt_max + entry_M, max_M, mask=real_M)
    tl.store(prompt_sum + entry_M, sum_M, mask=real_M)
    tl.store(prompt_acc + entry_M[:, None] * HEAD_DIM + dim_H[None, :], acc_MH, mask=real_MH)


@triton.jit
def prompt_span(shared, parts, TILE: tl.constexpr):
    """Tokens of a part: whole tiles; the last parts of a short prompt are empty."""
    return tl.cdiv(tl.cdiv(shared, tl.maximum(parts, 1)), TILE) * TILE


@triton.jit
def fold_prompt(
    max_M,
    sum_M,
    acc_MH,
    prompt_acc,
    prompt_max,
    prompt_sum,
    first_entry,  # of the (row, key/value head)
    num_parts,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Fold the partial results of the row's prompt into (max, sum, acc)."""
    head_M = tl.arange(0, max_M.shape[0])
    dim_H = tl.arange(0, acc_MH.shape[1])
    real_M = head_M < GROUP
    real_MH = real_M[:, None] & (dim_H < HEAD_DIM)[None, :]
    for part in range(num_parts):
        entry_M = first_entry + part * GROUP + head_M
        part_max_M = tl.load(prompt_max + entry_M, mask=real_M, other=0.0)
        part_sum_M = tl.load(prompt_sum + entry_M, mask=real_M, other=0.0)
        part_acc_MH = tl.load(
            prompt_acc + entry_M[:, None] * HEAD_DIM + dim_H[None, :],
            mask=real_MH,
            other=0.0,
        )
        new_max_M = tl.maximum(max_M, part_max_M)
        shrink_M = tl.exp2(max_M - new_max_M)
        weight_M = tl.exp2(part_max_M - new_max_M)
        sum_M = sum_M * shrink_M + part_sum_M * weight_M
        acc_MH = acc_MH * shrink_M[:, None] + part_acc_MH * weight_M[:, None]
        max_M = new_max_M
    return max_M, sum_M, acc_MH
