"""Draw one token per row on the device, and its log-probability, without the host.

Semantics are those of `areal/engine/native/sampler.py`, whose text says what bias, penalties, bans
and cuts do to a distribution, and in which order. The arithmetic is float32, accurate to 1e-5 in a
log-probability. A seed fixes the draw whatever else is in the batch, but not to the CPU sampler's
token: the hash is per token, so that parts of the vocabulary are independent.

`cut_kernel`, one program per row, applies bias and penalties, bans tokens (their logits become
-inf), and finds the min-p, top-k and top-p cut in the order (logit descending, token ascending), as
a logit `threshold` and, among the tokens of exactly that logit, the `last` token kept. Rows without
such options return at once. A row with a cut is read about a dozen times, mostly from the L2 cache.

`race_kernel`, one program per (row, part of the vocabulary), reads the logits once. Token v gets an
exponential variable E(v), a hash of (seed, index, v), and the smallest E(v) / exp(x(v)) wins: the
winner is distributed as softmax(x), and depends on its own row alone. It also computes the maximum
and the sum of exp. `finish_kernel` races the winners of a row's parts.

A logit that is not finite makes the sum, and so the log-probability, NaN. Comparisons are written
so that NaN is never dropped, and no loop depends on it to end.

Shapes: R rows, S slots, V vocabulary, W parts (`splits`) of the vocabulary, M = MAX_STOP_IDS stop
tokens of a slot, N = MAX_BIASED tokens with a bias, C tokens of history, B = ceil(V / 32) words of
bits. A name without a suffix is a scalar, or a tile of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from areal.engine.native.cuda.device import OVERLAP, await_previous, overlapping
from areal.engine.native.sampler import MAX_BIASED, MAX_STOP_IDS

# Loops and calls inside kernels are compiled; Triton types them as raising in plain Python.
# pyright: reportGeneralTypeIssues=false


_LOG2E = tl.constexpr(1.4426950408889634)
_INF = tl.constexpr(float("inf"))
# exp(-40) of 2**18 tokens is below 2**-24, a float32 sum's resolution: top-p never cuts deeper.
_DEPTH = tl.constexpr(40.0)
# Enough to narrow a bracket of any float32 values (2**277 subnormals) by quarters; usually a dozen.
_MAX_PASSES = tl.constexpr(140)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def cut_kernel(
    logits_RV, row_stride, slot_R, temperature_S, top_k_S, top_p_S, greedy_S, num_output_S,
    min_output_S, frequency_penalty_S, stop_ids_SM, history_SC, history_size, constrained_S,
    allowed_SB, num_words, adjusted_S, presence_penalty_S, repetition_penalty_S, min_p_S,
    biased_SN, bias_SN, drawn_SB, prompt_SB, threshold_R, last_R, vocab_size,
    MAX_STOP_IDS: tl.constexpr, MAX_BIASED: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    await_previous(OVERLAP)
    slot = tl.load(slot_R + row).to(tl.int64)
    logits = logits_RV + row.to(tl.int64) * row_stride
    num_output = tl.load(num_output_S + slot)
    history = history_SC + slot * history_size
    min_p = tl.full((), 0.0, tl.float32)
    if tl.load(adjusted_S + slot) != 0:
        min_p = tl.load(min_p_S + slot)
        drawn = drawn_SB + slot * num_words
        if (num_output > 0) & (num_output <= history_size):
            newest = tl.load(history + num_output - 1)
            tl.atomic_or(drawn + newest // 32, 1 << (newest % 32), sem="relaxed")
        place = slot * MAX_BIASED + tl.arange(0, MAX_BIASED)
        biased = tl.load(biased_SN + place)
        x = tl.load(logits + biased, mask=biased >= 0, other=0.0)
        tl.store(logits + biased, x + tl.load(bias_SN + place), mask=biased >= 0)
        tl.debug_barrier()
        _adjust_seen(
            logits, vocab_size, tl.load(presence_penalty_S + slot),
            tl.load(repetition_penalty_S + slot), drawn, prompt_SB + slot * num_words, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()
    penalty = tl.load(frequency_penalty_S + slot)
    if penalty != 0:
        _penalise(logits, vocab_size, penalty, history, tl.minimum(num_output, history_size))
    if num_output < tl.load(min_output_S + slot):
        ids = tl.load(stop_ids_SM + slot * MAX_STOP_IDS + tl.arange(0, MAX_STOP_IDS))
        tl.store(logits + ids, -_INF, mask=(ids >= 0) & (ids < vocab_size))
    if tl.load(constrained_S + slot) != 0:
        _ban_others(logits, vocab_size, allowed_SB + slot * num_words, BLOCK)

    top_k = tl.load(top_k_S + slot)
    top_p = tl.load(top_p_S + slot)
    threshold = tl.full((), -_INF, tl.float32)
    last = tl.full((), 0, tl.int32) + vocab_size
    is_cut = (top_k < vocab_size) | (top_p < 1) | (min_p > 0)
    if is_cut & (tl.load(greedy_S + slot) == 0):
        tl.debug_barrier()  # other threads of this program have changed logits
        temperature = tl.load(temperature_S + slot)
        threshold, last = _find_cut(
            logits, vocab_size, temperature, min_p, top_k, top_p, threshold, last, BLOCK, STAGES
        )
    tl.store(threshold_R + row, threshold)
    tl.store(last_R + row, last)


@triton.jit
def race_kernel(
    logits_RV, row_stride, slot_R, temperature_S, greedy_S, seed_S, num_output_S, threshold_R,
    last_R, highest_RW, sum_RW, token_RW, vocab_size, num_splits,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    split, row = tl.program_id(0), tl.program_id(1)
    await_previous(OVERLAP)
    slot = tl.load(slot_R + row).to(tl.int64)
    token = split * BLOCK + tl.arange(0, BLOCK)
    logits = logits_RV + row.to(tl.int64) * row_stride
    x = tl.load(logits + token, mask=token < vocab_size, other=-_INF)
    threshold = tl.load(threshold_R + row)
    if threshold > -_INF:
        dropped = (x < threshold) | ((x == threshold) & (token > tl.load(last_R + row)))
        x = tl.where(dropped, -_INF, x)
    highest = tl.max(x, 0)
    # Avoids -inf - -inf = NaN if no token is left.
    base = tl.where(highest == -_INF, 0.0, highest)
    log2_weight = (x - base) * (_LOG2E / tl.load(temperature_S + slot))
    if tl.load(greedy_S + slot) != 0:
        winner = tl.min(tl.where(x == highest, tl.arange(0, BLOCK), BLOCK), 0)
    else:
        key_0, key_1 = draw_keys(tl.load(seed_S + slot), tl.load(num_output_S + slot))
        winner = _race(log2_weight, uniforms(key_0, key_1, token), BLOCK)
    part = row * num_splits + split
    tl.store(highest_RW + part, highest)
    tl.store(sum_RW + part, tl.sum(tl.exp2(log2_weight), 0))
    tl.store(token_RW + part, split * BLOCK + winner)


@triton.jit
def finish_kernel(
    logits_RV, row_stride, slot_R, temperature_S, greedy_S, seed_S, num_output_S, highest_RW,
    sum_RW, token_RW, token_R, logprob_R, vocab_size, num_splits,
    SPLITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    await_previous(OVERLAP)
    slot = tl.load(slot_R + row).to(tl.int64)
    logits = logits_RV + row.to(tl.int64) * row_stride
    scale = _LOG2E / tl.load(temperature_S + slot)
    split = tl.arange(0, SPLITS)
    part, exists = row * num_splits + split, split < num_splits
    highest_W = tl.load(highest_RW + part, mask=exists, other=-_INF)
    highest = tl.max(highest_W, 0)
    sum_W = tl.load(sum_RW + part, mask=exists, other=0.0)
    total = tl.sum(sum_W * tl.exp2((highest_W - highest) * scale), 0)

    # With NaN the winner may be no token; any valid one will do.
    token_W = tl.load(token_RW + part, mask=exists, other=0)
    token_W = tl.maximum(tl.minimum(token_W, vocab_size - 1), 0)
    if tl.load(greedy_S + slot) != 0:
        score_W = highest_W
    else:
        key_0, key_1 = draw_keys(tl.load(seed_S + slot), tl.load(num_output_S + slot))
        weight_W = tl.exp2((tl.load(logits + token_W) - highest) * scale)
        score_W = weight_W / exponentials(uniforms(key_0, key_1, token_W))
        score_W = tl.where(highest_W > -_INF, score_W, 0.0)  # a part without a token left
    winner = tl.argmax(score_W, 0)
    token = tl.sum(tl.where(split == winner, token_W, 0), 0)
    x = tl.load(logits + token)
    tl.store(token_R + row, token)
    tl.store(logprob_R + row, ((x - highest) * scale - tl.log2(total)) / _LOG2E)


@triton.jit
def _race(log2_weight, w, BLOCK: tl.constexpr):
    """The index of the smallest exponentials(w) / weight; weights are at most 1.

    The logarithm is half of the work, and rarely needed: E = -log(1 - w) is between w and
    w / (1 - w). So with t = w / weight, of which `first` is the smallest, E / weight is at most
    first / (1 - first) for that token and at least t for another.
    """
    index = tl.arange(0, BLOCK)
    t = w * tl.exp2(-log2_weight)
    first = tl.min(t, 0)
    reach = tl.where(first < 1.0, first / (1.0 - first), _INF)
    # One sum encodes how many are in reach (BLOCK each) and, if it is one, its index.
    rivals = tl.sum(tl.where(t <= reach, BLOCK + index, 0), 0)
    winner = rivals - BLOCK
    if rivals >= 2 * BLOCK:
        winner = tl.argmin(exponentials(w) * tl.exp2(-log2_weight), 0)
    return winner


@triton.jit
def draw_keys(seed, index):
    """Two uint32 keys of a draw: splitmix64's mixer, twice, like the CPU sampler's u."""
    state = _mix64(seed.to(tl.uint64) + _GOLDEN) + index.to(tl.uint64) * _GOLDEN
    key = _mix64(state)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def uniforms(key_0, key_1, token):
    """w in [2**-33, 1], each a hash of the keys and its token."""
    x = token.to(tl.uint32) * 0x9E3779B1 + key_0
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13) ^ key_1) * 0xC2B2AE35
    x = x ^ (x >> 16)
    return x.to(tl.float32) * 2.0**-32 + 2.0**-33


@triton.jit
def exponentials(w):
    """-log(1 - w): variables of mean 1 where w is uniform.

    In a large vocabulary tiny values win. 1 - w would round them away, so they use the series.
    """
    series = w * (1.0 + w * (0.5 + w * (1.0 / 3.0)))
    rest = tl.maximum(1.0 - w, 2.0**-25)  # the largest integers round up to w = 1
    return tl.where(w < 1.0 / 64.0, series, -tl.log(rest))


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _penalise(logits, vocab_size, penalty, history, num_tokens):
    """Subtract `penalty` once per occurrence. The terms are equal, so order changes no bit."""
    for start in range(0, num_tokens, 512):
        place = start + tl.arange(0, 512)
        token = tl.load(history + place, mask=place < num_tokens, other=-1)
        exists = (token >= 0) & (token < vocab_size)
        tl.atomic_add(logits + token, tl.zeros_like(token) - penalty, mask=exists, sem="relaxed")


@triton.jit
def _adjust_seen(logits, vocab_size, presence, repetition, drawn, prompt, BLOCK: tl.constexpr):
    """Penalties of tokens that were drawn, or drawn or in the prompt."""
    if (presence != 0) | (repetition != 1):
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            exists = token < vocab_size
            word = tl.load(drawn + token // 32, mask=exists, other=0)
            is_drawn = ((word >> (token % 32)) & 1) != 0
            word |= tl.load(prompt + token // 32, mask=exists, other=0)
            is_seen = ((word >> (token % 32)) & 1) != 0
            x = tl.load(logits + token, mask=exists & is_seen, other=0.0)
            x = tl.where(x > 0, x / repetition, x * repetition)
            x -= tl.where(is_drawn, presence, 0.0)
            tl.store(logits + token, x, mask=exists & is_seen)


@triton.jit
def _ban_others(logits, vocab_size, allowed, BLOCK: tl.constexpr):
    """All but the tokens whose bits are set."""
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        exists = token < vocab_size
        word = tl.load(allowed + token // 32, mask=exists, other=0)
        tl.store(logits + token, -_INF, mask=exists & (((word >> (token % 32)) & 1) == 0))


@triton.jit
def _find_cut(
    logits, vocab_size, temperature, min_p, top_k, top_p, threshold, last, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """(threshold, last) after min-p, then top-k of what it left, then top-p of what that left."""
    scale = _LOG2E / temperature
    lowest, highest = _finite_range(logits, vocab_size, BLOCK, STAGES)
    if min_p > 0:
        threshold = highest + temperature * tl.log(min_p)
        lowest = tl.maximum(lowest, threshold)
    if top_k < vocab_size:
        threshold, last = _search(
            logits, vocab_size, highest, scale, threshold, last, lowest, top_k.to(tl.float32),
            True, BLOCK, STAGES,
        )  # fmt: skip
    if top_p < 1:
        total = _mass(logits, vocab_size, highest, scale, threshold, last, BLOCK, STAGES)
        start = tl.maximum(tl.maximum(lowest, threshold), highest - _DEPTH * temperature)
        threshold, last = _search(
            logits, vocab_size, highest, scale, threshold, last, start, top_p * total,
            False, BLOCK, STAGES,
        )  # fmt: skip
    return threshold, last


@triton.jit
def _search(
    logits, vocab_size, highest, scale, threshold, last, low, target,
    BY_COUNT: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The cut (threshold, last) of the fewest first tokens whose weights reach `target`.

    Inside the cut it is given, a token weighs 1 or (not BY_COUNT) exp(x - highest). The bracket
    [low, high) holds the new threshold: what lies from `low` up reaches the target, what lies from
    `high` up, of weight `above`, does not. A pass over the logits quarters it. The end is a pass
    that finds one value in the bracket.
    """
    high = highest + tl.maximum(tl.abs(highest) * 1e-6, 1e-30)
    above = tl.full((), 0.0, tl.float32)
    smallest, largest = low, highest
    num_passes = 0
    while (smallest < largest) & (highest < _INF) & (num_passes < _MAX_PASSES):
        pivot_2 = 0.5 * low + 0.5 * high
        pivot_1, pivot_3 = 0.5 * low + 0.5 * pivot_2, 0.5 * pivot_2 + 0.5 * high
        sum_1 = tl.zeros((BLOCK,), tl.float32)
        sum_2 = tl.zeros((BLOCK,), tl.float32)
        sum_3 = tl.zeros((BLOCK,), tl.float32)
        smallest_seen = tl.full((BLOCK,), _INF, tl.float32)
        largest_seen = tl.full((BLOCK,), -_INF, tl.float32)
        for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(logits + token, mask=token < vocab_size, other=-_INF)
            # The given cut needs no check: a pivot is above its threshold, or at `low`.
            weight = 1.0 if BY_COUNT else tl.exp2((x - highest) * scale)
            sum_1 += tl.where(x >= pivot_1, weight, 0.0)
            sum_2 += tl.where(x >= pivot_2, weight, 0.0)
            sum_3 += tl.where(x >= pivot_3, weight, 0.0)
            smallest_seen = tl.minimum(smallest_seen, tl.where(x >= low, x, _INF))
            largest_seen = tl.maximum(largest_seen, tl.where(x < high, x, -_INF))
        smallest, largest = tl.min(smallest_seen, 0), tl.max(largest_seen, 0)
        above_1, above_2, above_3 = tl.sum(sum_1, 0), tl.sum(sum_2, 0), tl.sum(sum_3, 0)
        in_1, in_2, in_3 = above_1 >= target, above_2 >= target, above_3 >= target
        high = tl.where(in_3, high, tl.where(in_2, pivot_3, tl.where(in_1, pivot_2, pivot_1)))
        above = tl.where(in_3, above, tl.where(in_2, above_3, tl.where(in_1, above_2, above_1)))
        bottom = tl.where(in_1, pivot_1, tl.maximum(low, smallest))
        low = tl.where(in_3, pivot_3, tl.where(in_2, pivot_2, bottom))
        num_passes += 1

    tie_weight = 1.0 if BY_COUNT else tl.exp2((smallest - highest) * scale)
    num_ties = tl.ceil((target - above) / tie_weight)
    num_ties = tl.minimum(tl.maximum(num_ties, 1.0), vocab_size.to(tl.float32)).to(tl.int32)
    last_tie = _nth_tie(logits, vocab_size, smallest, num_ties, BLOCK, STAGES)
    return smallest, tl.where(smallest == threshold, tl.minimum(last, last_tie), last_tie)


@triton.jit
def _nth_tie(logits, vocab_size, value, n, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """The n-th token whose logit is `value`; the last of them when they are fewer."""
    num_seen = tl.full((), 0, tl.int32)
    last = tl.full((), -1, tl.int32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocab_size, other=-_INF)
        is_tie = (x == value).to(tl.int32)
        num_here = tl.sum(is_tie, 0)
        if num_here > 0:
            rank = num_seen + tl.cumsum(is_tie, 0)
            last = tl.maximum(last, tl.max(tl.where((is_tie != 0) & (rank <= n), token, -1), 0))
        num_seen += num_here
    return last


@triton.jit
def _finite_range(logits, vocab_size, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """The smallest logit above -inf, and the largest."""
    smallest = tl.full((BLOCK,), _INF, tl.float32)
    largest = tl.full((BLOCK,), -_INF, tl.float32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocab_size, other=-_INF)
        smallest = tl.minimum(smallest, tl.where(x > -_INF, x, _INF))
        largest = tl.maximum(largest, x)
    return tl.min(smallest, 0), tl.max(largest, 0)


@triton.jit
def _mass(
    logits, vocab_size, highest, scale, threshold, last, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """The sum of exp(x - highest) inside a cut."""
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits + token, mask=token < vocab_size, other=-_INF)
        dropped = (x < threshold) | ((x == threshold) & (token > last))
        total += tl.where(dropped, 0.0, tl.exp2((x - highest) * scale))
    return tl.sum(total, 0)


# Launch options (num_warps, num_stages) are none of a kernel's own parameters.
# pyright: reportCallIssue=false


@dataclass(frozen=True, slots=True)
class DeviceSampling:
    """Sampling options by slot."""

    temperature_S: torch.Tensor  # float32, above 0
    top_k_S: torch.Tensor  # int32, at least 1; V or more: no cut
    top_p_S: torch.Tensor  # float32 in (0, 1]
    greedy_S: torch.Tensor  # int32, 0 or 1
    seed_S: torch.Tensor  # int64
    num_output_S: torch.Tensor  # int32, tokens drawn before: the index of this draw
    min_output_S: torch.Tensor  # int32, stop tokens are banned before this many
    frequency_penalty_S: torch.Tensor  # float32
    stop_ids_SM: torch.Tensor  # int32, padded with -1
    history_SC: torch.Tensor  # int32, tokens drawn; read only with a penalty
    constrained_S: torch.Tensor  # int32, 0 or 1
    allowed_SB: torch.Tensor  # int32, bits of the tokens that a constrained slot may draw next
    adjusted_S: torch.Tensor  # int32, 0 or 1; the rest is read only of slots that have 1
    presence_penalty_S: torch.Tensor  # float32
    repetition_penalty_S: torch.Tensor  # float32, 1: none
    min_p_S: torch.Tensor  # float32, 0: none
    biased_SN: torch.Tensor  # int32, tokens with a bias, padded with -1
    bias_SN: torch.Tensor  # float32
    drawn_SB: torch.Tensor  # int32, bits of the tokens drawn; the kernel adds the newest
    prompt_SB: torch.Tensor  # int32, bits of the tokens of the prompt


@dataclass(frozen=True, slots=True)
class SamplingTiles:
    """Partition of the vocabulary over programs.

    The same for every number of rows, so that a row's log-probability has the same bits in every
    batch: a part is `block` tokens, and a single row still has dozens of them.
    """

    block: int = 4096
    num_warps: int = 8
    cut_block: int = 2048
    cut_warps: int = 16
    cut_stages: int = 3


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Intermediate results of the kernels of one draw."""

    tiles: SamplingTiles
    threshold_R: torch.Tensor  # float32
    last_R: torch.Tensor  # int32
    highest_RW: torch.Tensor  # float32
    sum_RW: torch.Tensor  # float32
    token_RW: torch.Tensor  # int32

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        tiles: SamplingTiles = SamplingTiles(),  # noqa: B008 (frozen)
    ) -> SamplingWorkspace:
        num_splits = -(-vocab_size // tiles.block)
        empty = torch.empty
        return cls(
            tiles=tiles,
            threshold_R=empty(num_rows, dtype=torch.float32, device=device),
            last_R=empty(num_rows, dtype=torch.int32, device=device),
            highest_RW=empty(num_rows, num_splits, dtype=torch.float32, device=device),
            sum_RW=empty(num_rows, num_splits, dtype=torch.float32, device=device),
            token_RW=empty(num_rows, num_splits, dtype=torch.int32, device=device),
        )


def sample_rows(
    logits_RV: torch.Tensor,
    slot_R: torch.Tensor,
    options: DeviceSampling,
    token_R: torch.Tensor,
    logprob_R: torch.Tensor,
    workspace: SamplingWorkspace,
) -> None:
    """Fills `token_R` (int32) and `logprob_R` (float32); row r samples as slot `slot_R[r]` does.

    The float32 logits are changed in place where a penalty or a ban applies.
    """
    assert logits_RV.dtype == torch.float32  # penalties accumulate in place
    (num_rows, vocab_size), row_stride = logits_RV.shape, logits_RV.stride(0)
    num_splits, tiles = workspace.highest_RW.shape[1], workspace.tiles
    cut_kernel[(num_rows,)](
        logits_RV, row_stride, slot_R, options.temperature_S, options.top_k_S, options.top_p_S,
        options.greedy_S, options.num_output_S, options.min_output_S, options.frequency_penalty_S,
        options.stop_ids_SM, options.history_SC, options.history_SC.shape[1],
        options.constrained_S, options.allowed_SB, options.allowed_SB.shape[1],
        options.adjusted_S, options.presence_penalty_S, options.repetition_penalty_S,
        options.min_p_S, options.biased_SN, options.bias_SN, options.drawn_SB, options.prompt_SB,
        workspace.threshold_R, workspace.last_R, vocab_size, MAX_STOP_IDS=MAX_STOP_IDS,
        MAX_BIASED=MAX_BIASED, BLOCK=tiles.cut_block, STAGES=tiles.cut_stages,
        num_warps=tiles.cut_warps, **overlapping(OVERLAP),
    )  # fmt: skip
    race_kernel[(num_splits, num_rows)](
        logits_RV, row_stride, slot_R, options.temperature_S, options.greedy_S, options.seed_S,
        options.num_output_S, workspace.threshold_R, workspace.last_R, workspace.highest_RW,
        workspace.sum_RW, workspace.token_RW, vocab_size, num_splits,
        BLOCK=tiles.block, num_warps=tiles.num_warps, **overlapping(OVERLAP),
    )  # fmt: skip
    finish_kernel[(num_rows,)](
        logits_RV, row_stride, slot_R, options.temperature_S, options.greedy_S, options.seed_S,
        options.num_output_S, workspace.highest_RW, workspace.sum_RW, workspace.token_RW, token_R,
        logprob_R, vocab_size, num_splits, SPLITS=triton.next_power_of_2(num_splits),
        num_warps=1, **overlapping(OVERLAP),
    )  # fmt: skip
