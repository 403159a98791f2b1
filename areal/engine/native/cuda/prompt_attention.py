"""Attention of decode rows to a prompt they share: its keys are read once for many of them.

The samples of a prompt hold the same pages. A decode row reads them alone, and while its siblings
run at the same time the device's cache serves most of that; but it is slower than not to read: 512
rows, 16 to a prompt of 2048 tokens, K = 2, H = 128, ask for 1.07 GB a layer, of which 67 MB differ.
So where enough can be saved, `prompt_attention` goes first. A program takes a bundle, up to 128 / G
rows of one prompt with the G query heads of a key/value head each, which two warpgroups multiply
with a tile of keys, and leaves (max, sum, acc) of every row. `decode_attention` goes on from there
with what a row has for itself.

The host says which rows form a bundle (`share_prompts`), the device holds it in tensors that a
captured graph reads (`SharedPrompts`). A prompt is cut into parts, so that few prompts fill the
device.

Shapes: R rows, B bundles, N query heads, K key/value heads, G = N / K, H head dim; M = (row of the
bundle, query head of the group) pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as device

from areal.engine.native.cuda.attention_tiles import attend_tiles
from areal.engine.native.cuda.launch import OVERLAP

PROMPT_TILE = 64  # keys; what is shared is a multiple of it
_PROGRAMS = 132  # one for each processor of an H100 or H200
_MAX_PARTS = 16  # a row adds them up one after the other
_MIN_SHARERS = 4  # rows of a bundle
# Of a layer. On an H200 a launch costs 17 us more, and spares 1 us for 8.5 MB.
MIN_SAVED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Heads:
    """What the kernels must know of a model's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def pairs(self) -> int:
        """Of a program: a power of two. In float32 there is no tensor-core product to feed."""
        return 128 if self.dtype.itemsize == 2 else 64

    @property
    def rows_of_bundle(self) -> int:
        return self.pairs * self.num_kv_heads // self.num_heads

    @property
    def can_share(self) -> bool:
        """Halves of what a program holds must not fall below _MIN_SHARERS."""
        return self.rows_of_bundle >= 2 * _MIN_SHARERS

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values in a layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def most_items(self) -> int:
        """(bundle, part) pairs that fill the device."""
        return max(1, _PROGRAMS // self.num_kv_heads)


@dataclass(frozen=True, slots=True)
class PromptSpace:
    """What prompts leave for decode rows: one serves all launches of a stream."""

    acc: torch.Tensor  # [X, H] float32, X: (row, key/value head, part, query head of the group)
    score_max: torch.Tensor  # [X] float32
    weight_sum: torch.Tensor  # [X] float32
    heads: Heads
    num_pairs: int  # (row, part) pairs there is room for

    @classmethod
    def make(cls, max_rows: int, heads: Heads, device: torch.device) -> PromptSpace:
        num_pairs = max(max_rows, heads.rows_of_bundle * heads.most_items)
        entries = num_pairs * heads.num_heads
        return cls(
            acc=torch.empty(entries, heads.head_dim, dtype=torch.float32, device=device),
            score_max=torch.empty(entries, dtype=torch.float32, device=device),
            weight_sum=torch.empty(entries, dtype=torch.float32, device=device),
            heads=heads,
            num_pairs=num_pairs,
        )


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    """Which rows of a step read how many tokens together; int32 on the device."""

    flat: torch.Tensor  # all of the others, for one copy
    shared_R: torch.Tensor  # leading tokens a row need not read itself, a multiple of PROMPT_TILE
    member_R: torch.Tensor  # rows, those of a bundle one after the other
    bundle_B2: torch.Tensor  # first of member_R, number of rows
    counts: torch.Tensor  # bundles, parts of a prompt
    space: PromptSpace

    @classmethod
    def make(cls, num_rows: int, space: PromptSpace) -> SharedPrompts:
        """For a step of `num_rows` rows: nobody shares anything."""
        sizes = _flat_sizes(num_rows)
        flat = torch.zeros(sum(sizes), dtype=torch.int32, device=space.acc.device)
        shared_R, member_R, bundles, counts = flat.split(sizes)
        return cls(flat, shared_R, member_R, bundles.view(-1, 2), counts, space)


def _flat_sizes(num_rows: int) -> list[int]:
    return [num_rows, num_rows, 2 * (num_rows // _MIN_SHARERS), 2]


def share_prompts(
    first_page: np.ndarray, prompt: np.ndarray, num_rows: int, space: PromptSpace
) -> np.ndarray | None:
    """What `SharedPrompts.flat` of a step of `num_rows` rows must hold; None: it would not pay.

    Of each row that is not padding: the first page of its prompt (rows with the same one have the
    same prompt), and its leading tokens in pages that others may hold as well.
    """
    heads, groups = space.heads, _groups(first_page, prompt)
    saved = sum((len(rows) - 1) * tokens for rows, tokens in groups)
    if saved * heads.token_bytes < MIN_SAVED_BYTES:
        return None
    flat = np.zeros(sum(_flat_sizes(num_rows)), np.int32)
    shared_R, member_R, bundle_2B, counts = np.split(flat, np.cumsum(_flat_sizes(num_rows))[:-1])
    bundles, end = [], 0
    for rows, tokens in groups:
        shared_R[rows] = tokens
        for bundle in np.array_split(rows, -(-len(rows) // heads.rows_of_bundle)):
            bundles.append((end, len(bundle)))
            member_R[end : end + len(bundle)] = bundle
            end += len(bundle)
    bundle_2B[: 2 * len(bundles)] = np.ravel(bundles)
    parts = min(_MAX_PARTS, heads.most_items // len(bundles), space.num_pairs // num_rows)
    counts[:] = len(bundles), max(1, parts)
    return flat


def _groups(first_page: np.ndarray, prompt: np.ndarray) -> list[tuple[np.ndarray, int]]:
    """Rows of a prompt that may read it together, and how many tokens of it."""
    order = np.argsort(first_page, kind="stable")
    edges = np.flatnonzero(np.diff(first_page[order])) + 1
    groups = ((rows, int(prompt[rows[0]])) for rows in np.split(order, edges))
    return [
        (rows, tokens // PROMPT_TILE * PROMPT_TILE)
        for rows, tokens in groups
        if len(rows) >= _MIN_SHARERS and tokens >= PROMPT_TILE
    ]


def prompt_attention(
    q_RNH: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_table_SP: torch.Tensor,
    slot_R: torch.Tensor,
    shared: SharedPrompts,
) -> None:
    """Fills `shared.space` for the rows that share; `decode_attention` reads it."""
    heads, page_size = shared.space.heads, keys.shape[2]
    is_half = q_RNH.element_size() == 2
    num_items = max(heads.most_items, len(shared.bundle_B2))
    _prompt_kernel[(heads.num_kv_heads, num_items)](
        q_RNH,
        keys,
        values,
        page_table_SP,
        slot_R,
        shared.shared_R,
        shared.member_R,
        shared.bundle_B2,
        shared.counts,
        shared.space.acc,
        shared.space.score_max,
        shared.space.weight_sum,
        q_RNH.stride(0),
        page_table_SP.stride(0),
        keys.stride(0),
        heads.head_dim**-0.5 * math.log2(math.e),
        GROUP=heads.num_heads // heads.num_kv_heads,
        HEAD_DIM=heads.head_dim,
        PAGE_SIZE=page_size,
        PAIRS=heads.pairs,
        TILE=PROMPT_TILE,
        OVERLAP=OVERLAP,
        num_warps=8 if is_half else 4,
        num_stages=3 if is_half else 1,
        launch_pdl=OVERLAP,
    )


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["slots", "shared_tokens", "members", "bundles", "counts"],
)
def _prompt_kernel(
    q,
    keys,
    values,
    page_table,
    slots,
    shared_tokens,
    members,
    bundles,
    counts,
    prompt_acc,
    prompt_max,
    prompt_sum,
    q_stride,
    table_stride,
    page_stride,
    scale_log2e,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        device.gdc_wait()
        device.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    num_bundles, parts = tl.load(counts), tl.load(counts + 1)
    # The parts of a prompt start together, and its first page is in the device's cache.
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
    dim_H = tl.arange(0, HEAD_DIM)
    real_M = pair_M < num_rows * GROUP
    row_M = tl.load(members + first + pair_M // GROUP, mask=real_M, other=0).to(tl.int64)
    head_M = kv_head * GROUP + pair_M % GROUP
    q_MH = tl.load(
        q + row_M[:, None] * q_stride + head_M[:, None] * HEAD_DIM + dim_H[None, :],
        mask=real_M[:, None],
        other=0.0,
    )
    max_M, sum_M, acc_MH = attend_tiles(
        q_MH,
        row_M,  # no position: all keys are visible to all rows
        tl.full([PAIRS], float("-inf"), tl.float32),
        tl.zeros([PAIRS], tl.float32),
        tl.zeros([PAIRS, HEAD_DIM], tl.float32),
        keys + kv_head * PAGE_SIZE * HEAD_DIM,
        values + kv_head * PAGE_SIZE * HEAD_DIM,
        page_table + tl.load(slots + leader).to(tl.int64) * table_stride,
        begin,
        tl.minimum(begin + span, shared),
        shared - 1,
        page_stride,
        scale_log2e,
        PAGE_SIZE,
        TILE,
        MASKED=False,
    )
    entry_M = ((row_M * tl.num_programs(0) + kv_head) * parts + part) * GROUP + pair_M % GROUP
    tl.store(prompt_max + entry_M, max_M, mask=real_M)
    tl.store(prompt_sum + entry_M, sum_M, mask=real_M)
    tl.store(
        prompt_acc + entry_M[:, None] * HEAD_DIM + dim_H[None, :], acc_MH, mask=real_M[:, None]
    )


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
):
    """Add what the parts of the row's prompt left to (max, sum, acc)."""
    head_M = tl.arange(0, max_M.shape[0])
    dim_H = tl.arange(0, acc_MH.shape[1])
    real_M = head_M < GROUP
    for part in range(num_parts):
        entry_M = first_entry + part * GROUP + head_M
        part_max_M = tl.load(prompt_max + entry_M, mask=real_M, other=0.0)
        part_sum_M = tl.load(prompt_sum + entry_M, mask=real_M, other=0.0)
        part_acc_MH = tl.load(
            prompt_acc + entry_M[:, None] * acc_MH.shape[1] + dim_H[None, :],
            mask=real_M[:, None],
            other=0.0,
        )
        new_max_M = tl.maximum(max_M, part_max_M)
        shrink_M = tl.exp2(max_M - new_max_M)
        weight_M = tl.exp2(part_max_M - new_max_M)
        sum_M = sum_M * shrink_M + part_sum_M * weight_M
        acc_MH = acc_MH * shrink_M[:, None] + part_acc_MH * weight_M[:, None]
        max_M = new_max_M
    return max_M, sum_M, acc_MH
