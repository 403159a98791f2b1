"""Attention over a prefix tree: a token sees itself and its ancestors. Back end of `attend`.

Tokens of a segment see the earlier tokens of that segment (causal attention within segments) and
all tokens of each ancestor segment. The descendants of a segment directly follow it in memory, so
that is one more call per level of the tree: for every segment of the level, all queries below it
against its keys. No score is computed that a mask would drop, and a group of answers to one prompt
takes two calls, whatever its size. Windows, and dtypes the kernels lack (float32 on CUDA), use a
mask, a block of queries at a time.

On a CPU each segment is a call of its own, which takes longer than many small segments are worth:
there short paths from a root to an end are attended side by side, as packed sequences are, and each
token takes its output from the first path that it is on.

The calls compute partial softmaxes with kernels that also return log-sum-exps:

    out_QNH, lse_NQ = attend_part(q_QNH, k_MKH, v_MKH, part, scale)
    dq, dk, dv = attend_part_backward(grad_QNH, q, k, v, out_QNH, lse_NQ, part, scale)

Outputs over disjoint keys are merged by their log-sum-exps. Backward of a part needs `out` and
`lse` over all keys: a key's gradient depends on its global probability exp(score - lse) and on the
row sum of grad * out only. On CUDA these are the flash kernels for packed runs; on a CPU its flash
kernel, run by run.

Shape legend: T tokens of the tree (U in utils/prefix_tree.py), N query heads, K key-value heads,
H head dim, Q queries of one call, M keys of it, P tokens of all paths.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from areal.models.common.attention import AttentionSpec, Rectangles, masked_blocks
from areal.utils.prefix_tree import PrefixTree

_aten = torch.ops.aten
_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_QUERY_BLOCK = 1024  # queries whose mask exists at a time
# Products of a query's and a key's numbers that a CPU computes in the time of one call of its
# kernel, forward and backward: measured with heads of 16 and 64 dims.
_CALL = 800_000


@dataclass(frozen=True, slots=True)
class Part:
    """Runs of queries, each of which sees one run of keys: all of it, or causally.

    Queries and keys are concatenated run by run; a causal run has equally many of both.
    """

    query_counts: list[int]
    key_counts: list[int]
    is_causal: bool
    query_bounds: torch.Tensor  # int32, on the device of the queries
    key_bounds: torch.Tensor

    @classmethod
    def of(
        cls, query_counts: list[int], key_counts: list[int], device: torch.device, *, causal: bool
    ) -> Part:
        bounds = (
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
            for counts in (query_counts, key_counts)
        )
        return cls(query_counts, key_counts, causal, *bounds)

    def longest(self) -> tuple[int, int]:
        # For runs of one query the kernel permutes heads, and lse with them.
        return max(*self.query_counts, 2), max(self.key_counts)

    def runs(self) -> list[tuple[slice, slice]]:
        queries = pairwise([0, *accumulate(self.query_counts)])
        keys = pairwise([0, *accumulate(self.key_counts)])
        return [(slice(*q), slice(*k)) for q, k in zip(queries, keys, strict=True)]


def has_kernel(q_QNH: torch.Tensor) -> bool:
    """Whether the functions below support such queries."""
    if not q_QNH.is_cuda:
        return True
    head_dim = q_QNH.shape[2]
    return q_QNH.dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256


def attend_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: Part, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [Q, N, H] and float32 log-sum-exp of the scores [N, Q]."""
    if q.is_cuda:
        bounds = (part.query_bounds, part.key_bounds, *part.longest())
        out, lse, *_ = _aten._flash_attention_forward(
            q, k, v, *bounds, 0.0, part.is_causal, False, scale=scale
        )
        return out, lse
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    for queries, keys in part.runs():
        out_1NQH, lse_1NQ = _aten._scaled_dot_product_flash_attention_for_cpu(
            *_rows(q[queries], k[keys], v[keys]), 0.0, part.is_causal, scale=scale
        )
        out[queries], lse[:, queries] = out_1NQH[0].transpose(0, 1), lse_1NQ[0]
    return out, lse


def attend_part_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    part: Part,
    scale: float | None,
) -> _Three:
    """Gradients of q, k and v; `out` and `lse` are those over all keys, not this part's alone."""
    if q.is_cuda:
        bounds = (part.query_bounds, part.key_bounds, *part.longest())
        no_dropout = (
            torch.zeros(2, dtype=torch.uint64, device=q.device),
            torch.empty(0, device=q.device),
        )
        return _aten._flash_attention_backward(
            grad, q, k, v, out, lse, *bounds, 0.0, part.is_causal, *no_dropout, scale=scale
        )
    grads = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    for queries, keys in part.runs():
        grad_1NQH, q_1NQH, out_1NQH, k_1KMH, v_1KMH = _rows(
            grad[queries], q[queries], out[queries], k[keys], v[keys]
        )
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_1NQH, q_1NQH, k_1KMH, v_1KMH, out_1NQH, lse[None, :, queries].contiguous(),
            0.0, part.is_causal, scale=scale,
        )  # fmt: skip
        for target, rows, x_1 in zip(grads, (queries, keys, keys), found, strict=True):
            target[rows] = x_1[0].transpose(0, 1)
    return grads


def _rows(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.transpose(0, 1)[None] for x in tensors)


@dataclass(frozen=True, slots=True)
class _Level:
    """Segments of equal depth, and the descendants of each."""

    queries: torch.Tensor
    keys: torch.Tensor
    part: Part


class TreeAttention:
    """`attend` for the tokens of a tree; build it once per micro-batch.

    attend = TreeAttention(tree, device)
    hidden_TD = model(tokens_T, attend.positions_T, attend)
    """

    def __init__(self, tree: PrefixTree, device: torch.device) -> None:
        self.num_tokens = len(tree)
        self.positions_T = torch.as_tensor(tree.depth_U, device=device)
        self._subtree_end_T = torch.as_tensor(
            tree.subtree_ends_G.repeat(tree.lengths_G), device=device
        )
        self._tree = tree

    def __call__(
        self, spec: AttentionSpec, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> torch.Tensor:
        if len(q_TNH) != self.num_tokens:
            raise ValueError(f"the tree has {self.num_tokens} tokens, got {len(q_TNH)}")
        if self._paths_pay(q_TNH, spec.window):
            return self.by_paths(spec, q_TNH, k_TKH, v_TKH)
        if spec.window is None and has_kernel(q_TNH):
            return self.by_segments(spec, q_TNH, k_TKH, v_TKH)
        return self.by_mask(spec, q_TNH, k_TKH, v_TKH)

    def _paths_pay(self, q_TNH: torch.Tensor, window: int | None) -> bool:
        """Whether calls of the CPU's kernel cost more than computing shared scores again."""
        if q_TNH.is_cuda:
            return False
        num_runs, num_scores = self._tree.num_runs(), self._tree.num_scores()
        if window is not None:
            num_runs, num_scores = 0, self.num_tokens**2
        more = self._paths.num_scores() - num_scores
        return more * q_TNH.shape[1] * q_TNH.shape[2] <= num_runs * _CALL

    def by_paths(
        self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        return self._paths.attend(spec, q, k, v)

    def by_segments(
        self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        return _BySegments.apply(q, k, v, *self._segments, spec.scale)

    @cached_property
    def _segments(self) -> tuple[Part, list[_Level]]:
        tree, device = self._tree, self.positions_T.device
        counts = tree.lengths_G.tolist()
        levels = range(int(tree.levels_G.max(initial=0)))
        return (
            Part.of(counts, counts, device, causal=True),
            [_level(tree, level, device) for level in levels],
        )

    @cached_property
    def _paths(self) -> Rectangles:
        paths, device = self._tree.paths(), self.positions_T.device
        token_P, first_T = (
            torch.as_tensor(places, device=device) for places in (paths.token_P, paths.first_U)
        )
        rows = Rectangles.of(torch.from_numpy(paths.lengths), device)
        slots = [(token_P[place], shape) for place, shape in rows.slots]
        return Rectangles(slots, rows.slot_T[first_T])

    def by_mask(
        self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        q_NTH, k_KTH, v_KTH = (x.transpose(0, 1)[None] for x in (q, k, v))
        place_T = torch.arange(self.num_tokens, device=q.device)

        def sees(start: int, end: int) -> tuple[int, torch.Tensor]:
            query_Q1, key_M = place_T[start:end, None], place_T[:end]
            sees_QM = (key_M <= query_Q1) & (query_Q1 < self._subtree_end_T[:end])
            if spec.window is not None:
                behind_QM = self.positions_T[start:end, None] - self.positions_T[:end]
                sees_QM &= behind_QM < spec.window
            return 0, sees_QM

        out_NTH = masked_blocks(q_NTH, k_KTH, v_KTH, _QUERY_BLOCK, sees, spec.scale)
        return out_NTH[0].transpose(0, 1)


class _BySegments(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_TNH, k_TKH, v_TKH, within: Part, above: list[_Level], scale: float | None):
        out_TNH, lse_NT = attend_part(q_TNH, k_TKH, v_TKH, within, scale)
        if above:
            out_TNH = out_TNH.float()
        for level in above:
            q_QNH = q_TNH.index_select(0, level.queries)
            k_MKH, v_MKH = (x.index_select(0, level.keys) for x in (k_TKH, v_TKH))
            found = attend_part(q_QNH, k_MKH, v_MKH, level.part, scale)
            _join(out_TNH, lse_NT, level.queries, *found)
        out_TNH = out_TNH.to(q_TNH.dtype)
        ctx.save_for_backward(q_TNH, k_TKH, v_TKH, out_TNH, lse_NT)
        ctx.within, ctx.above, ctx.scale = within, above, scale
        return out_TNH

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TNH):
        q_TNH, k_TKH, v_TKH, out_TNH, lse_NT = ctx.saved_tensors
        grad_TNH = grad_TNH.contiguous()
        saved = (grad_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT)
        grads = attend_part_backward(*saved, ctx.within, ctx.scale)
        if ctx.above:
            # float32, since a prompt's keys sum over all descendants.
            grads = tuple(grad.float() for grad in grads)
        for level in ctx.above:
            queries, keys = level.queries, level.keys
            rows = (queries, queries, keys, keys, queries)
            grad, q, k, v, out = (
                x.index_select(0, index) for x, index in zip(saved[:-1], rows, strict=True)
            )
            lse_NQ = lse_NT.index_select(1, queries)
            found = attend_part_backward(grad, q, k, v, out, lse_NQ, level.part, ctx.scale)
            for total, index, grad in zip(grads, (queries, keys, keys), found, strict=True):
                total.index_add_(0, index, grad.float())
        return *(grad.to(q_TNH.dtype) for grad in grads), None, None, None


def _join(
    out_TNH: torch.Tensor,
    lse_NT: torch.Tensor,
    rows: torch.Tensor,
    other_QNH: torch.Tensor,
    other_lse_NQ: torch.Tensor,
) -> None:
    """Merge the result of `rows` over other keys into `out` and `lse`, in place."""
    own_lse_NQ = lse_NT.index_select(1, rows)
    both_NQ = torch.logaddexp(own_lse_NQ, other_lse_NQ)
    own_QN1, other_QN1 = (
        (lse_NQ - both_NQ).exp().T[..., None] for lse_NQ in (own_lse_NQ, other_lse_NQ)
    )
    joined_QNH = out_TNH.index_select(0, rows) * own_QN1 + other_QNH * other_QN1
    out_TNH.index_copy_(0, rows, joined_QNH)
    lse_NT.index_copy_(1, rows, both_NQ)


def _level(tree: PrefixTree, level: int, device: torch.device) -> _Level:
    starts, lengths = tree.starts_G, tree.lengths_G
    ends = starts + lengths
    chosen = np.flatnonzero((tree.levels_G == level) & (tree.subtree_ends_G > ends))
    below = [(ends[g], tree.subtree_ends_G[g]) for g in chosen]
    own = [(starts[g], ends[g]) for g in chosen]
    queries, keys = (
        torch.as_tensor(np.concatenate([np.arange(*run) for run in runs]), device=device)
        for runs in (below, own)
    )
    num_queries, num_keys = ([int(end - start) for start, end in runs] for runs in (below, own))
    return _Level(queries, keys, Part.of(num_queries, num_keys, device, causal=False))
