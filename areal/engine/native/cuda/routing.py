"""Routing of tokens to experts on the device: choice of experts, and rows grouped by expert.

    route            weights and indices of each token's experts, as `Router.forward` chooses them
    norm_route       the same of rms_norm(x), for a few tokens
    group_by_expert  the (token, choice) pairs in blocks of one expert each, for grouped products

The router's product has exact products and float32 sums. If the tiles of tokens are too few for the
device, experts are cut into parts: each writes its logits to the workspace, and the last program of
a tile chooses. For a few tokens latency is all: a program has one token and a few experts, whose
weights it loads before it waits for the previous kernel (device.py). Of equal scores the lower
index is chosen. Grouped routing (moe.py) hides the experts of other groups before the choice.

A block holds `block_m` pairs of one expert; what is left of an expert's last block is padding. How
many blocks there are is known on the device only, so the list has room for the most there can be,
and launches have a fixed shape: nothing is read back, and graphs can capture it.

Shape legend: T tokens, D model dim, E experts, K experts per token, S = T * K pairs (pair
t * K + k is choice k of token t), B blocks, M pairs of a block.
"""

# Launch options (num_warps, num_stages) are none of a kernel's own parameters.
# pyright: reportCallIssue=false

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from areal.engine.native.cuda.block_kernels import Norm, load_norm
from areal.engine.native.cuda.device import OVERLAP, Device, await_previous, device_of, overlapping
from areal.models.common.moe import Router

_MIN_TILE = 16  # of the tensor cores
_MAX_CHOICE_ELEMENTS = 8192  # (token, expert) pairs of a tile: 64 of each thread
_MAX_TILES = 256  # of tokens, where experts are cut into parts
_MAX_SORTED_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """As `MoEArgs` has them."""

    num_experts: int
    top_k: int
    norm_topk_prob: bool
    num_groups: int
    top_groups: int
    weight_scale: float

    @classmethod
    def of(cls, router: Router) -> RouterOptions:
        return cls(
            router.num_experts,
            router.top_k,
            router.norm_topk_prob,
            router.num_groups,
            router.top_groups,
            router.weight_scale,
        )

    @property
    def constants(self) -> dict[str, int | bool]:
        """Of a kernel that chooses."""
        return {
            "TOP_K": self.top_k,
            "BLOCK_K": int(triton.next_power_of_2(self.top_k)),
            "NORM_TOPK": self.norm_topk_prob,
            "GROUP_SIZE": self.num_experts // self.num_groups,
            "TOP_GROUPS": self.top_groups if self.num_groups > 1 else 0,
        }


@dataclass(frozen=True, slots=True)
class RouterPlan:
    tokens: int  # in one tile
    experts: int  # in one program
    block: int  # elements of D in one tile
    stages: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Pairs grouped by expert."""

    pair_BM: torch.Tensor  # int32, S: padding
    expert_B: torch.Tensor  # int32, -1: past the last block


def router_arrivals(device: torch.device) -> torch.Tensor:
    """The counters of `route`, 0 between launches; they serve all launches of a stream."""
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


@functools.cache
def router_plan(num_tokens: int, num_experts: int, dim: int, device: Device) -> RouterPlan:
    """Few tokens: parts of the experts fill the device. Many: tiles of tokens do."""
    block_e = _padded(num_experts)
    block = min(128, _padded(dim))
    tiles = triton.cdiv(num_tokens, _MIN_TILE)
    if tiles <= min(device.num_processors, _MAX_TILES):
        most = max(1, device.num_processors // tiles)
        experts = _MIN_TILE
        while triton.cdiv(block_e, experts) > most:
            experts *= 2
        return RouterPlan(_MIN_TILE, experts, block, stages=4)
    tokens = min(64, max(_MIN_TILE, _MAX_CHOICE_ELEMENTS // block_e))
    return RouterPlan(tokens, block_e, min(block, 64), stages=3)


def route(
    x_TD: torch.Tensor,
    weight_ED: torch.Tensor,
    bias_E: torch.Tensor | None,
    options: RouterOptions,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    arrived: torch.Tensor,
) -> None:
    """Writes `weights` (float32) and `experts` (int32, whose rows may be apart)."""
    (num_tokens, dim), num_experts = x_TD.shape, len(weight_ED)
    plan = router_plan(num_tokens, num_experts, dim, device_of(x_TD.device))
    block_e = _padded(num_experts)
    parts, tiles = block_e // plan.experts, triton.cdiv(num_tokens, plan.tokens)
    assert parts == 1 or tiles <= len(arrived), plan
    logits_TE = x_TD.new_empty(
        (num_tokens, num_experts) if parts > 1 else (0,), dtype=torch.float32
    )
    _router_kernel[(tiles, parts)](
        x_TD, weight_ED, bias_E, logits_TE, arrived, weights_TK, experts_TK,
        num_tokens, num_experts, dim, experts_TK.stride(0), options.weight_scale,
        **options.constants,
        TOKENS=plan.tokens,
        EXPERTS=plan.experts,
        BLOCK_E=block_e,
        BLOCK=plan.block,
        BIAS=bias_E is not None,
        num_warps=4,
        num_stages=plan.stages,
        **overlapping(OVERLAP),
    )  # fmt: skip


def norm_route(
    x_TD: torch.Tensor,
    norm: Norm,
    weight_ED: torch.Tensor,
    bias_E: torch.Tensor | None,
    options: RouterOptions,
    normed_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    arrived: torch.Tensor,
) -> None:
    """As `route`, of rms_norm(x), which it writes to `normed`."""
    (num_tokens, dim), num_experts = x_TD.shape, len(weight_ED)
    block = int(triton.next_power_of_2(dim))
    experts = max(1, _MAX_CHOICE_ELEMENTS // block)
    assert num_tokens <= len(arrived), num_tokens
    logits_TE = x_TD.new_empty(num_tokens, num_experts, dtype=torch.float32)
    _norm_router_kernel[(num_tokens, triton.cdiv(num_experts, experts))](
        x_TD, norm.weight, normed_TD, weight_ED, bias_E, logits_TE, arrived, weights_TK, experts_TK,
        num_tokens, num_experts, dim, norm.eps, experts_TK.stride(0), options.weight_scale,
        **options.constants,
        EXPERTS=experts,
        BLOCK_E=_padded(num_experts),
        BLOCK=block,
        OFFSET=norm.offset,
        BIAS=bias_E is not None,
        num_warps=4,
        **overlapping(OVERLAP),
    )  # fmt: skip


def max_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Most blocks: as many experts as possible have one pair more than whole blocks."""
    used = min(num_pairs, num_experts)
    return used + (num_pairs - used) // block_m


def group_by_expert(experts_TK: torch.Tensor, num_experts: int, block_m: int) -> Blocks:
    num_tokens, top_k = experts_TK.shape
    num_pairs = num_tokens * top_k
    most = max_blocks(num_pairs, num_experts, block_m)
    blocks = Blocks(experts_TK.new_empty(most, block_m), experts_TK.new_empty(most))
    chunk = min(_MAX_SORTED_AT_ONCE, max(128, triton.next_power_of_2(num_pairs)))
    _group_kernel[(num_experts,)](
        experts_TK, blocks.pair_BM, blocks.expert_B,
        num_pairs, experts_TK.stride(0), most,
        TOP_K=top_k,
        BLOCK_M=block_m,
        BLOCK_E=_padded(num_experts),
        CHUNK=chunk,
        num_warps=8 if chunk > 1024 else 4,
        **overlapping(OVERLAP),
    )  # fmt: skip
    return blocks


def _padded(size: int) -> int:
    return max(_MIN_TILE, int(triton.next_power_of_2(size)))


@triton.jit
def _router_kernel(
    x_ptr, weight_ptr, bias_ptr, logits_ptr, arrived_ptr, weights_ptr, experts_ptr,
    T, E, D, experts_stride, weight_scale,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, NORM_TOPK: tl.constexpr,
    GROUP_SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = BLOCK_E // EXPERTS
    tile, part = tl.program_id(0), tl.program_id(1)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    is_token = token < T
    expert = part * EXPERTS + tl.arange(0, EXPERTS)
    column = tl.arange(0, BLOCK)
    weight_ptr += tl.minimum(expert, E - 1)[:, None] * D + column[None, :]
    place = token.to(tl.int64)[:, None] * D + column[None, :]
    await_previous(OVERLAP)
    sums = tl.zeros([EXPERTS, TOKENS], tl.float32)
    for start in range(0, D, BLOCK):
        inside = start + column < D
        real = is_token[:, None] & inside[None, :]
        weight = tl.load(weight_ptr + start, inside[None, :], 0.0)
        x = tl.load(x_ptr + start + place, real, 0.0)
        sums = tl.dot(weight, tl.trans(x), sums, input_precision="ieee")
    if PARTS == 1:
        _choose(
            tl.trans(sums), bias_ptr, weights_ptr, experts_ptr, token, T, E, experts_stride,
            weight_scale, TOP_K, BLOCK_K, TOKENS, BLOCK_E, BIAS, NORM_TOPK,
            GROUP_SIZE, TOP_GROUPS,
        )  # fmt: skip
    else:
        written = is_token[None, :] & (expert < E)[:, None]
        tl.store(logits_ptr + token.to(tl.int64)[None, :] * E + expert[:, None], sums, written)
        # Orders the stores of all threads before one thread's release of the counter.
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == PARTS - 1:
            tl.store(arrived_ptr + tile, 0)
            every = tl.arange(0, BLOCK_E)
            is_logit = is_token[:, None] & (every < E)[None, :]
            logits_place = token.to(tl.int64)[:, None] * E + every[None, :]
            # ".cg" reads from the L2 cache, which has the other programs' stores.
            logits = tl.load(logits_ptr + logits_place, is_logit, 0.0, cache_modifier=".cg")
            _choose(
                logits, bias_ptr, weights_ptr, experts_ptr, token, T, E, experts_stride,
                weight_scale, TOP_K, BLOCK_K, TOKENS, BLOCK_E, BIAS, NORM_TOPK,
                GROUP_SIZE, TOP_GROUPS,
            )  # fmt: skip


@triton.jit
def _norm_router_kernel(
    x_ptr, norm_ptr, normed_ptr, weight_ptr, bias_ptr, logits_ptr, arrived_ptr,
    weights_ptr, experts_ptr, T, E, D, eps, experts_stride, weight_scale,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr, OFFSET: tl.constexpr, BIAS: tl.constexpr, NORM_TOPK: tl.constexpr,
    GROUP_SIZE: tl.constexpr, TOP_GROUPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0), tl.program_id(1)
    expert = part * EXPERTS + tl.arange(0, EXPERTS)
    column = tl.arange(0, BLOCK)
    inside = column < D
    tile_ptr = weight_ptr + tl.minimum(expert, E - 1)[:, None] * D + column[None, :]
    weight = tl.load(tile_ptr, inside[None, :], 0.0)
    norm = load_norm(norm_ptr + column, inside, OFFSET)
    await_previous(OVERLAP)
    x = tl.load(x_ptr + token * D + column, inside, 0.0).to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x) / D + eps) * norm).to(normed_ptr.dtype.element_ty)
    if part == 0:
        tl.store(normed_ptr + token * D + column, x, inside)
    logits = tl.sum(weight.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
    tl.store(logits_ptr + token * E + expert, logits, expert < E)
    # Orders the stores of all threads before one thread's release of the counter.
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + token, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.store(arrived_ptr + token, 0)
        every = tl.arange(0, BLOCK_E)[None, :]
        # ".cg" reads from the L2 cache, which has the other programs' stores.
        all_ptr = logits_ptr + token * E + every
        _choose(
            tl.load(all_ptr, every < E, 0.0, cache_modifier=".cg"), bias_ptr, weights_ptr,
            experts_ptr, token + tl.arange(0, 1), T, E, experts_stride,
            weight_scale, TOP_K, BLOCK_K, 1, BLOCK_E, BIAS, NORM_TOPK,
            GROUP_SIZE, TOP_GROUPS,
        )  # fmt: skip


@triton.jit
def _choose(
    logits, bias_ptr, weights_ptr, experts_ptr, token, T, E, experts_stride, weight_scale,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_E: tl.constexpr,
    BIAS: tl.constexpr, NORM_TOPK: tl.constexpr, GROUP_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
):  # fmt: skip
    """Softmax of logits [TOKENS, BLOCK_E]; then the best expert TOP_K times, with TOP_GROUPS among
    those of as many groups of GROUP_SIZE, the groups of the best experts."""
    expert = tl.arange(0, BLOCK_E)[None, :]
    logits = tl.where(expert < E, logits, float("-inf"))
    probs = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    probs = probs / tl.sum(probs, axis=1)[:, None]
    scores = probs
    if BIAS:
        scores += tl.load(bias_ptr + expert, expert < E, 0.0)
    scores = tl.where(expert < E, scores, float("-inf"))
    if TOP_GROUPS > 0:
        others = scores
        for _ in tl.static_range(TOP_GROUPS):
            group = _best_expert(others, expert, E) // GROUP_SIZE
            others = tl.where(expert // GROUP_SIZE == group, float("-inf"), others)
        scores = tl.where(others == float("-inf"), scores, float("-inf"))
    choice = tl.arange(0, BLOCK_K)[None, :]
    weights = tl.zeros([TOKENS, BLOCK_K], tl.float32)
    chosen = tl.zeros([TOKENS, BLOCK_K], tl.int32)
    for k in tl.static_range(TOP_K):
        best = _best_expert(scores, expert, E)
        weight = tl.sum(tl.where(expert == best, probs, 0.0), axis=1)[:, None]
        scores = tl.where(expert == best, float("-inf"), scores)
        weights = tl.where(choice == k, weight, weights)
        chosen = tl.where(choice == k, best, chosen)
    if NORM_TOPK:
        weights = weights / tl.sum(weights, axis=1)[:, None]
    weights *= weight_scale
    written = (token < T)[:, None] & (choice < TOP_K)
    row = token.to(tl.int64)[:, None]
    tl.store(weights_ptr + row * TOP_K + choice, weights, written)
    tl.store(experts_ptr + row * experts_stride + choice, chosen, written)


@triton.jit
def _best_expert(scores, expert, E):
    """[TOKENS, 1]"""
    is_best = scores == tl.max(scores, axis=1)[:, None]
    # The last expert where no score is a number: an index past the end would be read from.
    return tl.min(tl.where(is_best, expert, E - 1), axis=1)[:, None]


@triton.jit
def _group_kernel(
    experts_ptr, pair_ptr, block_expert_ptr, S, experts_stride, max_blocks,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program per expert: all count all pairs, and each writes the blocks of its own."""
    own = tl.program_id(0)
    await_previous(OVERLAP)
    lane = tl.arange(0, CHUNK)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, S, CHUNK):
        expert = _expert_of(experts_ptr, start + lane, S, experts_stride, TOP_K)
        counts += tl.histogram(expert, BLOCK_E, mask=start + lane < S)
    index = tl.arange(0, BLOCK_E)
    blocks = tl.cdiv(counts, BLOCK_M)
    first = tl.sum(tl.where(index < own, blocks, 0))
    end = first + tl.sum(tl.where(index == own, blocks, 0))
    pair_ptr += first.to(tl.int64) * BLOCK_M
    num_written = 0
    for start in range(0, S, CHUNK):
        pair = start + lane
        expert = _expert_of(experts_ptr, pair, S, experts_stride, TOP_K)
        is_own = (expert == own) & (pair < S)
        rank = tl.cumsum(is_own.to(tl.int32), axis=0)
        tl.store(pair_ptr + num_written + rank - 1, pair, is_own)
        num_written += tl.max(rank)
    padding = num_written + tl.arange(0, BLOCK_M)
    tl.store(pair_ptr + padding, S, padding < (end - first) * BLOCK_M)
    block = tl.arange(0, BLOCK_E)
    for start in range(first, end, BLOCK_E):
        tl.store(block_expert_ptr + start + block, own, start + block < end)
    if own == tl.num_programs(0) - 1:
        for start in range(end, max_blocks, BLOCK_E):
            tl.store(block_expert_ptr + start + block, -1, start + block < max_blocks)


@triton.jit
def _expert_of(experts_ptr, pair, S, experts_stride, TOP_K: tl.constexpr):
    place = (pair // TOP_K).to(tl.int64) * experts_stride + pair % TOP_K
    return tl.load(experts_ptr + place, pair < S, 0)
