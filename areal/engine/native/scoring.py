"""Log-probabilities of given tokens under the live weights: a prefill without a cache.

    scored = score(model, [[5, 7, 9], ...], num_top=2)
    scored[0].logprobs, scored[0].top                # entries for each token of the sequence

As in training, the number at a token is log p of the next one; the last of a sequence is 0. All
ranks of a tensor-parallel model call with the same sequences. `token_lists` and `padded_scores`
convert from and to padded batches [B, S].

Shape legend: T packed tokens, C tokens of a chunk, D model dim, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from areal.engine.invariant_attention import InvariantPackedAttention
from areal.models.common.attention import PackedAttention
from areal.models.common.decoder import Decoder
from areal.models.common.invariant import row_logprobs
from areal.models.vision.args import VisionArgs
from areal.models.vision.placeholders import never_sampled
from areal.utils.data import sequence_lengths
from areal.utils.device import whole_tiles

_BATCH_TOKENS = 16384  # of one forward, unless a single sequence is longer
_CHUNK_TOKENS = 1024  # rows of logits [C, V] that exist at a time


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Of one sequence, entry by entry about the token that follows; nothing follows the last."""

    logprobs: list[float]
    top: list[list[tuple[int, float]]]  # (token, log-probability), the most likely first


@torch.inference_mode()
def score(
    model: Decoder,
    sequences: Sequence[Sequence[int]],
    num_top: int = 0,
    *,
    batch_invariant: bool = False,
) -> list[ScoredTokens]:
    return [
        row
        for some in _batches(sequences)
        for row in _score_batch(model, some, num_top, batch_invariant)
    ]


def check_tokens(
    sequences: Sequence[Sequence[int]], vocab_size: int, vision: VisionArgs | None = None
) -> None:
    banned = set(never_sampled(vision, vocab_size))
    for index, tokens in enumerate(sequences):
        if found := banned.intersection(tokens):
            raise ValueError(
                f"sequences[{index}] has the token {min(found)}, which stands for an image: only "
                "text is scored"
            )
        if not tokens:
            raise ValueError(f"sequences[{index}] is empty: expected at least one token id")
        if not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise ValueError(
                f"sequences[{index}] must lie in [0, {vocab_size}), the model's vocabulary, "
                f"got {min(tokens)} to {max(tokens)}"
            )


def _batches(sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    batch: list[Sequence[int]] = []
    size = 0
    for tokens in sequences:
        if batch and size + len(tokens) > _BATCH_TOKENS:
            yield batch
            batch, size = [], 0
        batch.append(tokens)
        size += len(tokens)
    if batch:
        yield batch


def _score_batch(
    model: Decoder, batch: list[Sequence[int]], num_top: int, batch_invariant: bool
) -> list[ScoredTokens]:
    device = model.embedding_weight.device
    lengths = [0, *map(len, batch)]
    tokens = [token for sequence in batch for token in sequence]
    if batch_invariant:  # one more sequence makes whole tiles of rows
        padding = [0] * (whole_tiles(len(tokens)) - len(tokens))
        tokens, lengths = [*tokens, *padding], [*lengths, len(padding)]
    attention = InvariantPackedAttention if batch_invariant else PackedAttention
    attend = attention(torch.tensor(lengths).cumsum(0).to(device), max(lengths))
    tokens_T = torch.tensor(tokens, device=device)
    hidden_TD = model(tokens_T, attend.positions_T, attend)
    next_T = tokens_T.roll(-1)
    never = never_sampled(model.args.vision, model.args.vocab_size)
    chosen: list[float] = []
    top: list[list[tuple[int, float]]] = []
    for hidden_CD, next_C in zip(
        hidden_TD.split(_CHUNK_TOKENS), next_T.split(_CHUNK_TOKENS), strict=True
    ):
        logits_CV = model.logits(hidden_CD).float()
        if never:
            logits_CV = logits_CV.index_fill(1, torch.tensor(never, device=device), -torch.inf)
        logprobs_CV = logits_CV.log_softmax(-1)
        logprobs_C = logprobs_CV.gather(-1, next_C[:, None]).squeeze(-1)
        chosen += (row_logprobs(logits_CV, next_C) if batch_invariant else logprobs_C).tolist()
        top += _most_likely(logprobs_CV, num_top)
    ends = itertools.accumulate(map(len, batch), initial=0)
    return [
        ScoredTokens([*chosen[start : end - 1], 0.0], [*top[start : end - 1], []])
        for start, end in itertools.pairwise(ends)
    ]


def _most_likely(logprobs_CV: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    if count == 0:
        return [[] for _ in logprobs_CV]
    values, tokens = logprobs_CV.topk(count, dim=-1)
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    return [list(zip(*pair, strict=True)) for pair in pairs]


def token_lists(data: Mapping[str, Any]) -> list[list[int]]:
    lengths = sequence_lengths(data["attention_mask"])
    rows = zip(data["input_ids"].tolist(), lengths.tolist(), strict=True)
    return [row[:length] for row, length in rows]


def padded_scores(scores: list[list[float]], data: Mapping[str, Any]) -> torch.Tensor:
    out_BS = torch.zeros(data["input_ids"].shape, dtype=torch.float32)
    for row_S, its_scores in zip(out_BS, scores, strict=True):
        row_S[: len(its_scores)] = torch.tensor(its_scores)
    return out_BS
