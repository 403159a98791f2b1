"""Grouped-query attention: the training back end of `attend`, and the module around any back end.

`PackedAttention` is causal attention over packed sequences in plain torch. Sequences are
concatenated in a flat row of T tokens; none sees another. Differentiable and stateless. Three
layouts, chosen once per micro-batch:

| sequences                | computed as                                                     |
|--------------------------|-----------------------------------------------------------------|
| one, or all equally long | the rectangle they already are, on a GPU by cuDNN (the fastest) |
| mixed, 16 bits on a GPU  | one call of the kernel for packed sequences                     |
| mixed otherwise          | rectangles of similar length (within a factor of two), padded   |

Rectangles of similar length keep padding small. Right padding is harmless under a causal mask: a
real query never looks right, and outputs of padded queries are dropped. In a rectangle, a window is
computed in blocks of queries, each with the keys its window can reach: the cost grows with S times
the window, and no S x S mask is created.

`Attention` has the projections, QK norm and rotation. Scores and weighted sum belong to `attend`, a
callable of the caller: packed sequences in training, a paged cache in decoding. So both run the
same weights through the same code up to there.

    out_TNH = attend(attention.spec, *attention.heads(x_TD, cos_TR, sin_TR))
    x_TD += attention.output(out_TNH)                # done by the block: see decoder.py

Another kind of attention is another `AttentionLayer`: latent_attention.py.

Shape legend: T packed tokens, D model dim, N query heads, K key-value heads, H head dim, R = H / 2,
B x S one rectangle, Q queries of a block, W keys it reaches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from areal.models.common.args import DecoderArgs, DeltaArgs
from areal.models.common.delta_rule import (
    ChunkLayout,
    DeltaInputs,
    has_tiles,
    recur_packed,
)
from areal.models.common.fp8 import round_heads
from areal.models.common.norm import make_norm
from areal.models.common.rope import rotate

if TYPE_CHECKING:
    from areal.models.common.delta_kernels import Chunks

# Shorter blocks would recompute more keys than their own for small windows.
_MIN_QUERY_BLOCK = 256
# In order of preference. (By default torch prefers flash, at half the speed of cuDNN on Hopper.)
_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class PackedAttention:
    """`attend` for the sequences bounded by `cu_seqlens`; build it once per micro-batch.

        attend = PackedAttention(cu_seqlens, max_seqlen)
        hidden_TD = model(tokens_T, attend.positions_T, attend)

    cu_seqlens: [num_sequences + 1], 0 first and T last, any integer dtype. Lengths 0 are allowed.
    """

    def __init__(self, cu_seqlens: torch.Tensor, max_seqlen: int):
        lengths = _lengths(cu_seqlens, max_seqlen)
        self.num_tokens = int(lengths.sum())
        self.positions_T = _ranges(lengths).to(cu_seqlens.device)
        self._cu_seqlens = cu_seqlens.to(torch.int32)
        self._max_seqlen = int(lengths.max())
        self._lengths = lengths
        used = lengths[lengths > 0]
        is_even = bool((used == self._max_seqlen).all())
        self._shape = (len(used), self._max_seqlen) if is_even else None

    def __call__(
        self, spec: AttentionSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> torch.Tensor:
        if len(q_TNH) != self.num_tokens:
            raise ValueError(f"cu_seqlens ends at {self.num_tokens}, got {len(q_TNH)} tokens")
        if spec.window is not None and spec.window >= self._max_seqlen:
            spec = replace(spec, window=None)
        if (spec.window is not None or self._shape is None) and _packed_kernel_takes(q_TNH):
            return self._by_packed_kernel(spec, q_TNH, k_TKH, v_TKH)
        if self._shape is not None:
            return _attend_rows(spec, q_TNH, k_TKH, v_TKH, self._shape)
        return self._rectangles.attend(spec, q_TNH, k_TKH, v_TKH)

    def recur(self, layer: int, inputs: DeltaInputs, sizes: DeltaArgs) -> torch.Tensor:
        """The gated delta rule (delta_rule.py), each sequence from a state of zeros."""
        if not (inputs.qkv_TX.is_cuda and has_tiles(sizes)):
            return recur_packed(inputs, sizes, self.positions_T, self._chunk_layout)
        from areal.models.common.delta_kernels import recur_by_kernels  # needs Triton

        return recur_by_kernels(inputs, sizes, self.positions_T, self._chunks)

    @cached_property
    def _chunk_layout(self) -> ChunkLayout:
        return ChunkLayout.of(self._lengths, self.positions_T.device)

    @cached_property
    def _chunks(self) -> Chunks:
        from areal.models.common.delta_kernels import Chunks  # needs Triton

        return Chunks.of(self._lengths, self.positions_T.device)

    def _by_packed_kernel(
        self, spec: AttentionSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> torch.Tensor:
        varlen_attn, gqa = _varlen_attention()
        bounds, longest = self._cu_seqlens, self._max_seqlen
        out_TNH = varlen_attn(
            q_TNH, k_TKH, v_TKH, bounds, bounds, longest, longest, scale=spec.scale,
            window_size=(-1 if spec.window is None else spec.window - 1, 0), **gqa,
        )  # fmt: skip
        return cast(torch.Tensor, out_TNH)  # no tuple: no log-sum-exp was requested

    @cached_property
    def _rectangles(self) -> Rectangles:
        return Rectangles.of(self._lengths, self._cu_seqlens.device)


@dataclass(frozen=True, slots=True)
class Rectangles:
    """Sequences side by side, padded to rectangles of similar length."""

    slots: list[tuple[torch.Tensor, tuple[int, int]]]  # index of the token in each slot, B and S
    slot_T: torch.Tensor  # of each token's output, among the slots of all rectangles

    @classmethod
    def of(cls, lengths: torch.Tensor, device: torch.device) -> Rectangles:
        starts = lengths.cumsum(0) - lengths
        slot_T = torch.empty(int(lengths.sum()), dtype=torch.int64)
        slots = []
        offset = 0
        for group in _groups_of_similar_length(lengths):
            size = int(lengths[group].max())
            column_S = torch.arange(size)
            # Padding repeats the last token of its sequence: any finite value would do.
            token_BS = starts[group, None] + column_S.clamp(max=lengths[group, None] - 1)
            real_BS = column_S < lengths[group, None]
            slot_T[token_BS[real_BS]] = offset + real_BS.flatten().nonzero().squeeze(1)
            slots.append((token_BS.flatten().to(device), (len(group), size)))
            offset += token_BS.numel()
        return cls(slots, slot_T.to(device))

    def attend(
        self, spec: AttentionSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> torch.Tensor:
        outputs = []
        for token, shape in self.slots:
            q, k, v = (x.index_select(0, token) for x in (q_TNH, k_TKH, v_TKH))
            outputs.append(_attend_rows(spec, q, k, v, shape))
        return torch.cat(outputs).index_select(0, self.slot_T)

    def num_scores(self) -> int:
        """Pairs of a query and a key that are computed for a head."""
        return sum(num_rows * size * size for _, (num_rows, size) in self.slots)


@cache
def _varlen_attention() -> tuple[Callable[..., Any], dict[str, bool]]:
    """The kernel, and its option to share key-value heads, which older releases do without."""
    from torch.nn.attention.varlen import varlen_attn  # importing it registers operators

    takes_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return varlen_attn, {"enable_gqa": True} if takes_gqa else {}


def _packed_kernel_takes(q_TNH: torch.Tensor) -> bool:
    is_16_bit = q_TNH.dtype in (torch.bfloat16, torch.float16)
    return q_TNH.is_cuda and is_16_bit and q_TNH.shape[-1] % 8 == 0 and q_TNH.shape[-1] <= 256


def _attend_rows(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    """Attention within each row of a rectangle: [B * S, heads, H] in and out."""
    q_BNSH, k_BKSH, v_BKSH = (x.unflatten(0, shape).transpose(1, 2) for x in (q, k, v))
    if spec.window is not None and spec.window < shape[1]:
        out_BNSH = _windowed(q_BNSH, k_BKSH, v_BKSH, spec.window, spec.scale)
    else:
        # Other devices have a single kernel, and the context manager costs time.
        with sdpa_kernel(_KERNELS, set_priority=True) if q.is_cuda else nullcontext():
            out_BNSH = F.scaled_dot_product_attention(
                q_BNSH, k_BKSH, v_BKSH, is_causal=True, scale=spec.scale,
                enable_gqa=shares_heads(q_BNSH, k_BKSH),
            )  # fmt: skip
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

    def sees(start: int, end: int) -> tuple[int, torch.Tensor]:
        first = max(start - window + 1, 0)
        behind_QW = position_S[start:end, None] - position_S[first:end]
        return first, (behind_QW >= 0) & (behind_QW < window)

    return masked_blocks(q_BNSH, k_BKSH, v_BKSH, block, sees, scale)


def masked_blocks(
    q_BNSH: torch.Tensor,
    k_BKSH: torch.Tensor,
    v_BKSH: torch.Tensor,
    block: int,
    sees: Callable[[int, int], tuple[int, torch.Tensor]],
    scale: float | None,
) -> torch.Tensor:
    """Masked attention, `block` queries at a time, so that no S x S mask is created.

    sees: (start, end) of a block -> the first key it reaches, and which keys up to `end` each query
    sees.
    """
    size = q_BNSH.shape[2]
    outputs = []
    for start in range(0, size, block):
        end = min(start + block, size)
        first, mask_QW = sees(start, end)
        out_BNQH = F.scaled_dot_product_attention(
            q_BNSH[:, :, start:end],
            k_BKSH[:, :, first:end],
            v_BKSH[:, :, first:end],
            attn_mask=mask_QW,
            scale=scale,
            enable_gqa=shares_heads(q_BNSH, k_BKSH),
        )
        outputs.append(out_BNQH)
    return torch.cat(outputs, dim=2)


def shares_heads(q_BNSH: torch.Tensor, k_BKSH: torch.Tensor) -> bool:
    """Whether several query heads share a key-value head."""
    return q_BNSH.shape[1] != k_BKSH.shape[1]


def _lengths(cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
    bounds = cu_seqlens.to("cpu", torch.int64)
    lengths = bounds.diff()
    if bounds.ndim != 1 or len(bounds) < 2 or bounds[0] != 0 or (lengths < 0).any():
        raise ValueError(f"cu_seqlens must rise from 0, sequence by sequence: {bounds.tolist()}")
    if int(lengths.max()) > max_seqlen:
        raise ValueError(f"max_seqlen is {max_seqlen}, but a sequence has {int(lengths.max())}")
    return lengths


def _groups_of_similar_length(lengths: torch.Tensor) -> list[torch.Tensor]:
    """Indices of non-empty sequences, grouped by the power of two their length rounds up to."""
    # Below 32 tokens a shared rectangle costs less than another call.
    power = torch.log2(lengths.clamp(min=32).to(torch.float64)).ceil()
    power[lengths == 0] = -1
    return [(power == p).nonzero().squeeze(1) for p in power.unique().tolist() if p >= 0]


def _ranges(lengths: torch.Tensor) -> torch.Tensor:
    """0..n-1 for each length n, one after another."""
    counts = lengths.numpy()  # torch wakes threads for this, which takes longer
    first = np.repeat(np.cumsum(counts) - counts, counts)
    return torch.from_numpy(np.arange(counts.sum()) - first)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer asks of `attend`."""

    layer: int
    window: int | None = None  # tokens each one sees, itself included; None: all before it
    scale: float | None = None  # factor on the scores; None: H ** -0.5


class Attend(Protocol):
    """An attention back end: causal attention of T new tokens."""

    def __call__(
        self, spec: AttentionSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, /
    ) -> torch.Tensor:
        """Return [T, N, H]; keys are rotated, ready to be cached."""
        ...


Projection = Callable[..., Sequence[torch.Tensor]]  # of an input and linear layers


def project_each(x_TD: torch.Tensor, *linears: nn.Linear) -> list[torch.Tensor]:
    return [linear(x_TD) for linear in linears]


class AttentionLayer(nn.Module):
    """What a block computes around `attend`."""

    wo: nn.Linear

    def __init__(self, args: DecoderArgs, layer: int):
        super().__init__()
        self.spec = AttentionSpec(layer, args.window(layer), args.score_scale)
        self.head_dim = args.head_dim
        self.has_fp8_cache = False  # keys and values are those that an FP8 cache returns

    def heads(
        self, x_TD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, N, H], keys and values [T, K, H]; the first two rotated."""
        raise NotImplementedError

    def output(self, out_TNH: torch.Tensor) -> torch.Tensor:
        """[T, D] from the result of `attend`."""
        return self.wo(out_TNH.flatten(1))


class Attention(AttentionLayer):
    def __init__(self, args: DecoderArgs, layer: int):
        super().__init__(args, layer)
        q_dim, kv_dim = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
        self.wq = nn.Linear(args.dim, q_dim, bias=args.qkv_bias)
        self.wk = nn.Linear(args.dim, kv_dim, bias=args.qkv_bias)
        self.wv = nn.Linear(args.dim, kv_dim, bias=args.qkv_bias)
        self.wo = nn.Linear(q_dim, args.dim, bias=args.attention_out_bias)
        self.q_norm = make_norm(args, args.head_dim) if args.qk_norm else None
        self.k_norm = make_norm(args, args.head_dim) if args.qk_norm else None
        self.project_qkv: Projection = project_each  # how the first three read their input

    def heads(
        self, x_TD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        projected = self.project_qkv(x_TD, self.wq, self.wk, self.wv)
        q_TNH, k_TKH, v_TKH = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)
        if self.q_norm is not None and self.k_norm is not None:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
        q_TNH, k_TKH = rotate(q_TNH, cos_TR, sin_TR), rotate(k_TKH, cos_TR, sin_TR)
        if self.has_fp8_cache:
            k_TKH, v_TKH = round_heads(k_TKH), round_heads(v_TKH)
        return q_TNH, k_TKH, v_TKH
