"""Draw one token per row, and its log-probability under the distribution it was drawn from.

The distribution of a row is softmax(logits / temperature), cut to the `top_k` most likely tokens,
then to the smallest set whose probabilities reach `top_p`, and renormalised. Before all that, a
logit gets its `bias`; is divided (if positive, else multiplied) by the repetition penalty if its
token is in prompt or output; and loses the frequency penalty once for each time its token was
drawn, and the presence penalty if it was. Before the cuts, `min_p` drops tokens whose probability
is below that share of the largest one. Tokens of `banned` have probability 0 (stop tokens before
`min_new_tokens`), and so have those outside of `allowed` (by a grammar). A greedy row takes the
most likely token; its log-probability is the one under the uncut distribution.

The draw inverts the cumulative distribution at u(seed, index), a counter-based hash: the token is a
function of the row's own logits and options, whatever else is in the batch. Arithmetic is float64,
because a float32 cumulative sum over a large vocabulary loses the tail.

Shapes: R rows, V vocabulary, W = ceil(V / 32) words of a bit mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from areal.api.config.inference import GenerationHyperparameters
from areal.models.common.invariant import drawn_logprobs

MAX_STOP_IDS = 64  # stop tokens one request can ban
MAX_BIASED = 1024  # tokens with a bias


@dataclass(slots=True)
class SamplingOptions:
    """One entry per row, on the host."""

    temperature: np.ndarray  # float64 [R]
    top_k: np.ndarray  # int64 [R]
    top_p: np.ndarray  # float64 [R]
    greedy: np.ndarray  # bool [R]
    seed: np.ndarray  # uint64 [R]
    index: np.ndarray  # int64 [R], how many tokens the request has drawn before
    banned: dict[int, list[int]] = field(default_factory=dict)  # row -> tokens of probability 0
    frequency_penalty: np.ndarray = field(default_factory=lambda: np.zeros(0))  # float64 [R]
    # Of rows that use them only, so that the others pay nothing.
    history: dict[int, list[int]] = field(default_factory=dict)  # row -> tokens drawn before
    presence_penalty: dict[int, float] = field(default_factory=dict)  # row with a history -> it
    # row -> penalty, tokens of prompt and output
    repetition: dict[int, tuple[float, list[int]]] = field(default_factory=dict)
    bias: dict[int, dict[int, float]] = field(default_factory=dict)  # row -> by token
    min_p: dict[int, float] = field(default_factory=dict)
    # row -> int32 [W], bit t % 32 of word t // 32 is 1 if token t may be drawn; all may elsewhere
    allowed: dict[int, np.ndarray] = field(default_factory=dict)

    @property
    def adjusted(self) -> set[int]:
        """Rows whose logits change."""
        return {*self.history, *self.repetition, *self.bias}


def has_rare_options(gconfig: GenerationHyperparameters) -> bool:
    """Options read from the sequence, not from arrays of all slots: few requests have them."""
    return bool(
        gconfig.presence_penalty
        or gconfig.repetition_penalty != 1
        or gconfig.min_p
        or gconfig.logit_bias
    )


def check_bias(logit_bias: dict[str, float], vocab_size: int) -> None:
    tokens = [int(token) for token in logit_bias]
    if len(tokens) > MAX_BIASED:
        raise ValueError(f"logit_bias takes at most {MAX_BIASED} tokens, got {len(tokens)}")
    if tokens and max(tokens) >= vocab_size:
        raise ValueError(
            f"logit_bias must name tokens of the model's vocabulary, below {vocab_size}, got "
            f"{max(tokens)}"
        )


def sample(
    logits_RV: torch.Tensor, options: SamplingOptions, *, max_chunk_elements: int = 2**23
) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities, one per row.

    Rows go in chunks of `max_chunk_elements` logits: 64 MiB of float64 per temporary by default.
    """
    num_rows, vocab_size = logits_RV.shape
    uniform = torch.from_numpy(uniforms(options.seed, options.index)).to(logits_RV.device)
    chunk_rows = max(1, max_chunk_elements // vocab_size)
    tokens: list[int] = []
    logprobs: list[float] = []
    for start in range(0, num_rows, chunk_rows):
        rows = slice(start, min(start + chunk_rows, num_rows))
        token_R, logprob_R = _sample_chunk(logits_RV[rows], options, rows, uniform[rows])
        tokens += token_R.tolist()
        logprobs += logprob_R.tolist()
    return tokens, logprobs


def uniforms(seed: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Float64 in [0, 1 - 2**-52], a hash of (seed, index) alone (splitmix64's mixer, twice)."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = _mix(seed.astype(np.uint64) + golden) + index.astype(np.uint64) * golden
    # 52 bits, not 53: u * total then stays strictly below total in float64, so the inverse of the
    # cumulative sum never runs past the last token of positive probability.
    return (_mix(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _sample_chunk(
    logits_RV: torch.Tensor, options: SamplingOptions, rows: slice, uniform_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    device, vocab_size = logits_RV.device, logits_RV.shape[1]
    temperature_R = torch.from_numpy(options.temperature[rows]).to(device)
    scaled_RV = logits_RV.to(torch.float64, copy=True)
    for row in options.adjusted & set(range(rows.start, rows.stop)):
        _adjust(scaled_RV[row - rows.start], options, row)
    scaled_RV.div_(temperature_R[:, None])
    for row in options.banned.keys() & range(rows.start, rows.stop):
        scaled_RV[row - rows.start, options.banned[row]] = -torch.inf
    for row in options.allowed.keys() & range(rows.start, rows.stop):
        bits = options.allowed[row].view(np.uint8)
        is_banned_V = np.unpackbits(bits, count=vocab_size, bitorder="little") == 0
        scaled_RV[row - rows.start, torch.from_numpy(is_banned_V).to(device)] = -torch.inf
    probs_RV = torch.softmax(scaled_RV, dim=-1)

    greedy, top_k, top_p = options.greedy[rows], options.top_k[rows], options.top_p[rows]
    for row in options.min_p.keys() & range(rows.start, rows.stop):
        probs_V = probs_RV[row - rows.start]
        if not options.greedy[row]:
            probs_V[probs_V < options.min_p[row] * probs_V.max()] = 0.0
    cut = np.flatnonzero(((top_k < vocab_size) | (top_p < 1)) & ~greedy)
    if cut.size:
        cut_R = torch.from_numpy(cut).to(device)
        k_R, p_R = (torch.from_numpy(x[cut]).to(device) for x in (top_k, top_p))
        probs_RV[cut_R] = keep_top(probs_RV[cut_R], k_R, p_R)

    cumulative_RV = probs_RV.cumsum(-1)
    total_R = cumulative_RV[:, -1]
    token_R = torch.searchsorted(cumulative_RV, (uniform_R * total_R)[:, None], right=True)[:, 0]
    if greedy.any():
        token_R = torch.where(torch.from_numpy(greedy).to(device), probs_RV.argmax(-1), token_R)
    return token_R, drawn_logprobs(probs_RV, cumulative_RV, token_R)


def _adjust(logits_V: torch.Tensor, options: SamplingOptions, row: int) -> None:
    """Bias and penalties of one row, in place."""
    device = logits_V.device
    for token, bias in options.bias.get(row, {}).items():
        logits_V[token] += bias
    if row in options.repetition:
        penalty, seen = options.repetition[row]
        token_T = torch.from_numpy(np.unique(np.asarray(seen, np.int64))).to(device)
        logit_T = logits_V[token_T]
        logits_V[token_T] = torch.where(logit_T > 0, logit_T / penalty, logit_T * penalty)
    if row in options.history:
        drawn = np.asarray(options.history[row], np.int64)
        tokens, counts = np.unique(drawn, return_counts=True)
        penalties = options.frequency_penalty[row] * counts + options.presence_penalty.get(row, 0.0)
        logits_V[torch.from_numpy(tokens).to(device)] -= torch.from_numpy(penalties).to(device)


def keep_top(probs_RV: torch.Tensor, k_R: torch.Tensor, p_R: torch.Tensor) -> torch.Tensor:
    """`probs` with 0 outside the top k, and outside the smallest top set that sums to p.

    The sum is of the probabilities left by top-k, renormalised. At least one token stays.
    """
    sorted_RV, order_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(probs_RV.shape[1], device=probs_RV.device)
    sorted_RV = sorted_RV.masked_fill(rank_V >= k_R[:, None], 0.0)
    cumulative_RV = sorted_RV.cumsum(-1)
    before_RV = cumulative_RV - sorted_RV
    reached_RV = before_RV >= (p_R[:, None] * cumulative_RV[:, -1:])
    # p = 1 keeps everything: rounding of the sum must not cut the tail.
    sorted_RV = sorted_RV.masked_fill(reached_RV & (p_R[:, None] < 1) & (rank_V > 0), 0.0)
    return torch.zeros_like(probs_RV).scatter_(1, order_RV, sorted_RV)
