"""A packed micro-batch as the tokens one rank computes: padded, labelled, cut over cp.

    laid = pack_rows(mb, multiple=cp.size() * tp.size(), cp=cp)
    outputs_t = model(laid.tokens_t, laid.positions_t, laid.attend, laid.labels_t)
    logprobs_T, entropy_T = laid.whole(outputs_t)

Ranks of cp that are given the same micro-batch have as many tokens each. Padding is the
micro-batch's own sequences again, and no output tells of it.

Shape legend: T tokens of the micro-batch, P padded, t a rank's part of them over cp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from areal.engine.train.ulysses import UlyssesAttention, gather_over_ranks, own_tokens
from areal.models.common.attention import Attend
from areal.models.common.attention_varlen import PackedAttention


@dataclass(frozen=True, slots=True)
class LaidOut:
    tokens_t: torch.Tensor
    positions_t: torch.Tensor
    labels_t: torch.Tensor  # the next tokens; 0 at the end of a sequence
    attend: Attend
    num_tokens: int  # T
    cp: dist.ProcessGroup | None  # None: t is P

    def whole(self, outputs_t: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What was computed of each token, `[T]`, on every rank."""
        outputs_P = outputs_t
        if self.cp is not None:
            outputs_P = (gather_over_ranks(x_t, self.cp) for x_t in outputs_t)
        return tuple(x_P[: self.num_tokens] for x_P in outputs_P)


def pack_rows(
    mb: dict[str, Any],
    *,
    multiple: int = 1,
    cp: dist.ProcessGroup | None = None,
    min_tokens: int = 0,
    packed: Callable[[torch.Tensor, int], PackedAttention] = PackedAttention,
) -> LaidOut:
    """P is a `multiple` (of cp's ranks at least), and `min_tokens` or more."""
    tokens_T = mb["input_ids"].long()
    tokens_P, cu_seqlens = _pad(tokens_T, mb["cu_seqlens"], min_tokens, multiple)
    attend = packed(cu_seqlens, mb["max_seqlen"])
    labels_P = _next_tokens(tokens_P, cu_seqlens)
    if cp is None or cp.size() == 1:
        return LaidOut(tokens_P, attend.positions_T, labels_P, attend, len(tokens_T), None)
    tokens_t, positions_t, labels_t = (
        own_tokens(x_P, cp) for x_P in (tokens_P, attend.positions_T, labels_P)
    )
    attend = UlyssesAttention(attend, cp)
    return LaidOut(tokens_t, positions_t, labels_t, attend, len(tokens_T), cp)


def _next_tokens(tokens_T: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    labels_T = tokens_T.roll(-1)
    # Junk that does not depend on which sequence happens to come next.
    labels_T[cu_seqlens[1:].long() - 1] = 0
    return labels_T


def _pad(
    tokens_T: torch.Tensor, cu_seqlens: torch.Tensor, min_tokens: int, multiple: int
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens = -(-max(min_tokens, len(tokens_T)) // multiple) * multiple
    if num_tokens == len(tokens_T):
        return tokens_T, cu_seqlens
    # With equal sequences, much padding does not change which experts are in demand, nor does it
    # make one sequence so long that attention takes more time than for the others.
    num_copies = -(-num_tokens // len(tokens_T))
    offsets = torch.arange(num_copies, device=cu_seqlens.device) * len(tokens_T)
    starts = (offsets[:, None] + cu_seqlens[:-1]).flatten()
    bounds = torch.cat([starts[starts < num_tokens], offsets.new_tensor([num_tokens])])
    return tokens_T.repeat(num_copies)[:num_tokens], bounds
