"""Log-probabilities of given tokens under the live weights: a prefill without a cache.

    logprobs = score(model, [[5, 7, 9], ...])        # one number per token of each sequence

As in training, the number at a token is log p of the next one; the last of a sequence is 0. All
ranks of a tensor-parallel model call with the same sequences. `token_lists` and `padded_scores`
convert from and to padded batches [B, S].

`InvariantPackedAttention` is the trainer's side of batch-invariant numerics: keys and values are
laid out in pages like the native engine's cache, and each row attends by `rows_attention`, so it
has the bits of a decoded row. Gradients are those of PackedAttention.

Shape legend: T packed tokens, C tokens of a chunk (in attention: sequences), D model dim,
V vocabulary, P pages, K key/value heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from areal.models.common.attention import PackedAttention
from areal.models.common.decoder import Decoder
from areal.models.common.invariant import with_gradients_of
from areal.utils.data import sequence_lengths

_BATCH_TOKENS = 16384  # of one forward, unless a single sequence is longer
_CHUNK_TOKENS = 1024  # rows of logits [C, V] that exist at a time


@torch.inference_mode()
def score(
    model: Decoder, sequences: Sequence[Sequence[int]], *, batch_invariant: bool = False
) -> list[list[float]]:
    return [
        row for some in _batches(sequences) for row in _score_batch(model, some, batch_invariant)
    ]


def check_tokens(sequences: Sequence[Sequence[int]], vocab_size: int) -> None:
    for index, tokens in enumerate(sequences):
        if not tokens:
            raise ValueError(f"sequences[{index}] is empty: expected at least one token id")
        if not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise ValueError(
                f"sequences[{index}] must lie in [0, {vocab_size}), the model's vocabulary, "
                f"got {min(tokens)} to {max(tokens)}"
            )


def _batches(sequences: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    batch: list[Sequence[int]] = []
    for tokens in sequences:
        if batch and sum(map(len, batch)) + len(tokens) > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(tokens)
    if batch:
        yield batch


def _score_batch(
    model: Decoder, batch: list[Sequence[int]], batch_invariant: bool
) -> list[list[float]]:
    device = model.embedding_weight.device
    lengths = torch.tensor([0, *map(len, batch)])
    attention = InvariantPackedAttention if batch_invariant else PackedAttention
    attend = attention(lengths.cumsum(0).to(device), int(lengths.max()))
    tokens_T = torch.tensor([token for tokens in batch for token in tokens], device=device)
    hidden_TD = model(tokens_T, attend.positions_T, attend)
    next_T = tokens_T.roll(-1)
    logprobs_T = torch.cat(
        [
            _chosen(model.logits(hidden_CD).float(), next_C)
            for hidden_CD, next_C in zip(
                hidden_TD.split(_CHUNK_TOKENS), next_T.split(_CHUNK_TOKENS), strict=True
            )
        ]
    )
    rows = logprobs_T.cpu().split(lengths[1:].tolist())
    return [[*row[:-1].tolist(), 0.0] for row in rows]


def _chosen(logits_CV: torch.Tensor, tokens_C: torch.Tensor) -> torch.Tensor:
    return logits_CV.log_softmax(-1).gather(-1, tokens_C[:, None]).squeeze(-1)


def token_lists(data: Mapping[str, Any]) -> list[list[int]]:
    lengths = sequence_lengths(data["attention_mask"])
    rows = zip(data["input_ids"].tolist(), lengths.tolist(), strict=True)
    return [row[:length] for row, length in rows]


def padded_scores(scores: list[list[float]], data: Mapping[str, Any]) -> torch.Tensor:
    out_BS = torch.zeros(data["input_ids"].shape, dtype=torch.float32)
    for row_S, its_scores in zip(out_BS, scores, strict=True):
        row_S[: len(its_scores)] = torch.tensor(its_scores)
    return out_BS


_PAGE = 16


class InvariantPackedAttention(PackedAttention):
    def __init__(self, cu_seqlens: torch.Tensor, max_seqlen: int) -> None:
        super().__init__(cu_seqlens, max_seqlen)
        device = cu_seqlens.device
        lengths = cu_seqlens.long().diff()
        pages_C = -(-lengths // _PAGE)
        first_page_C = 1 + pages_C.cumsum(0) - pages_C  # page 0 stays scratch, as in the cache
        self._chunk_T = torch.arange(len(lengths), device=device).repeat_interleave(lengths)
        self._page_T = first_page_C[self._chunk_T] + self.positions_T // _PAGE
        self._num_pages = 1 + int(pages_C.sum())
        columns = torch.arange(int(pages_C.max()), device=device)
        inside = columns < pages_C[:, None]
        self._pages_CP = torch.where(inside, first_page_C[:, None] + columns, 0).int()

    def __call__(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        *,
        window: int | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        if window is not None or scale is not None:
            raise ValueError(
                "batch_invariant: its attention has no sliding window and no scale of its own; "
                "turn batch_invariant off for this model"
            )

        def reference(q, k, v):
            return PackedAttention.__call__(self, layer, q, k, v)

        return with_gradients_of(reference, self._by_rows, (q_TNH, k_TKH, v_TKH))

    def _by_rows(
        self, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> torch.Tensor:
        from areal.engine.native.cuda.decode_attention import rows_attention  # needs Triton

        shape = (self._num_pages, k_TKH.shape[1], _PAGE, k_TKH.shape[2])
        keys, values = k_TKH.new_zeros(shape), v_TKH.new_zeros(shape)
        offset_T = self.positions_T % _PAGE
        keys[self._page_T, :, offset_T] = k_TKH
        values[self._page_T, :, offset_T] = v_TKH
        out_TNH = torch.empty_like(q_TNH)
        rows_attention(
            q_TNH.contiguous(), keys, values, self._pages_CP, self._chunk_T.int(),
            self.positions_T.int(), out_TNH,
        )  # fmt: skip
        return out_TNH
