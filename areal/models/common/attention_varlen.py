"""Causal attention over packed sequences: the training back end of `attend`, in plain torch.

Sequences lie one after another in a flat row of T tokens; none sees another. Sequences of similar
length (within a factor of two) are padded to a rectangle together, so that one long sequence does
not make every short one pay for it. Right padding is harmless under a causal mask: a real query
never looks right, and what padded queries produce is dropped. Differentiable; no state is kept.

A window is computed in blocks of queries, each with the keys its window can reach: the cost grows
with S times the window, and no S x S mask is ever made.

Shape legend: T packed tokens, N query heads, K key-value heads, H head dim, B x S one rectangle,
Q queries of a block, W keys it reaches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Shorter blocks would recompute more keys than their own for small windows.
_MIN_QUERY_BLOCK = 256


class PackedAttention:
    """`attend` for the sequences bounded by `cu_seqlens`; build it once per micro-batch.

        attend = PackedAttention(cu_seqlens, max_seqlen)
        hidden_TD = model(tokens_T, attend.positions_T, attend)

    cu_seqlens: [num_sequences + 1], 0 first and T last, any integer dtype. Lengths 0 are allowed.
    """

    def __init__(self, cu_seqlens: torch.Tensor, max_seqlen: int):
        starts, lengths = _starts_and_lengths(cu_seqlens, max_seqlen)
        device = cu_seqlens.device
        self.num_tokens = int(lengths.sum())
        self.positions_T = _ranges(lengths).to(device)
        # Where each token's output lies when the rectangles are laid out one after another.
        slot_T = torch.empty(self.num_tokens, dtype=torch.int64)
        self._rectangles: list[tuple[torch.Tensor, tuple[int, int]]] = []
        offset = 0
        for group in _groups_of_similar_length(lengths):
            size = int(lengths[group].max())
            column_S = torch.arange(size)
            # Padding repeats the last token of its sequence: any finite value would do.
            token_BS = starts[group, None] + column_S.clamp(max=lengths[group, None] - 1)
            real_BS = column_S < lengths[group, None]
            slot_T[token_BS[real_BS]] = offset + real_BS.flatten().nonzero().squeeze(1)
            self._rectangles.append((token_BS.flatten().to(device), (len(group), size)))
            offset += token_BS.numel()
        self._slot_T = slot_T.to(device)

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
        if len(q_TNH) != self.num_tokens:
            raise ValueError(f"cu_seqlens ends at {self.num_tokens}, got {len(q_TNH)} tokens")
        outputs = [
            _attend_rows(
                *(x.index_select(0, tokens) for x in (q_TNH, k_TKH, v_TKH)), shape, window, scale
            )
            for tokens, shape in self._rectangles
        ]
        return torch.cat(outputs).index_select(0, self._slot_T)


def _attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shape: tuple[int, int],
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Attention within each row of a rectangle: [B * S, heads, H] in and out."""
    q_BNSH, k_BKSH, v_BKSH = (x.unflatten(0, shape).transpose(1, 2) for x in (q, k, v))
    if window is None or window >= shape[1]:
        out_BNSH = F.scaled_dot_product_attention(
            q_BNSH, k_BKSH, v_BKSH, is_causal=True, scale=scale, enable_gqa=_shares(q_BNSH, k_BKSH)
        )
    else:
        out_BNSH = _windowed(q_BNSH, k_BKSH, v_BKSH, window, scale)
    return out_BNSH.transpose(1, 2).flatten(0, 1)


def _windowed(
    q_BNSH: torch.Tensor,
    k_BKSH: torch.Tensor,
    v_BKSH: torch.Tensor,
    window: int,
    scale: float | None,
) -> torch.Tensor:
    size = q_BNSH.shape[2]
    block = max(window, _MIN_QUERY_BLOCK)
    position_S = torch.arange(size, device=q_BNSH.device)
    outputs = []
    for start in range(0, size, block):
        end, first = min(start + block, size), max(start - window + 1, 0)
        behind_QW = position_S[start:end, None] - position_S[first:end]
        out_BNQH = F.scaled_dot_product_attention(
            q_BNSH[:, :, start:end],
            k_BKSH[:, :, first:end],
            v_BKSH[:, :, first:end],
            attn_mask=(behind_QW >= 0) & (behind_QW < window),
            scale=scale,
            enable_gqa=_shares(q_BNSH, k_BKSH),
        )
        outputs.append(out_BNQH)
    return torch.cat(outputs, dim=2)


def _shares(q_BNSH: torch.Tensor, k_BKSH: torch.Tensor) -> bool:
    """Whether several query heads share a key-value head."""
    return q_BNSH.shape[1] != k_BKSH.shape[1]


def _starts_and_lengths(
    cu_seqlens: torch.Tensor, max_seqlen: int
) -> tuple[torch.Tensor, torch.Tensor]:
    bounds = cu_seqlens.to("cpu", torch.int64)
    lengths = bounds.diff()
    if bounds.ndim != 1 or len(bounds) < 2 or bounds[0] != 0 or (lengths < 0).any():
        raise ValueError(f"cu_seqlens must rise from 0, sequence by sequence: {bounds.tolist()}")
    if int(lengths.max()) > max_seqlen:
        raise ValueError(f"max_seqlen is {max_seqlen}, but a sequence has {int(lengths.max())}")
    return bounds[:-1], lengths


def _groups_of_similar_length(lengths: torch.Tensor) -> list[torch.Tensor]:
    """Indices of non-empty sequences, grouped by the power of two their length rounds up to."""
    # Below 32 tokens a shared rectangle costs less than another call.
    power = torch.log2(lengths.clamp(min=32).to(torch.float64)).ceil()
    power[lengths == 0] = -1
    return [(power == p).nonzero().squeeze(1) for p in power.unique().tolist() if p >= 0]


def _ranges(lengths: torch.Tensor) -> torch.Tensor:
    """0..n-1 for each length n, one after another."""
    first = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) - first.repeat_interleave(lengths)
