"""Attention whose softmax is only a part of a larger one: kernels that also speak log-sum-exps.

    out_QNH, lse_NQ = attend_part(q_QNH, k_MKH, v_MKH, part, scale)
    dq, dk, dv = attend_part_backward(grad_QNH, q, k, v, out_QNH, lse_NQ, part, scale)

Outputs over disjoint keys are joined by their log-sum-exps. Backward of a part wants `out` and
`lse` of the whole: a key's gradient needs its probability among all keys, which is
exp(score - lse), and the row sum of grad * out, nothing else of the others.

On CUDA the flash kernels for packed runs; on a CPU its flash kernel, run by run.

Shape legend: Q queries, M keys, N query heads, K key-value heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

_aten = torch.ops.aten
_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """Runs of queries, each of which sees one run of keys: all of it, or causally.

    Queries and keys lie run by run; a causal run has as many of both.
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
        # For runs of one query the kernel rearranges heads, and lse with them.
        return max(*self.query_counts, 2), max(self.key_counts)

    def runs(self) -> list[tuple[slice, slice]]:
        queries = pairwise([0, *accumulate(self.query_counts)])
        keys = pairwise([0, *accumulate(self.key_counts)])
        return [(slice(*q), slice(*k)) for q, k in zip(queries, keys, strict=True)]


def has_kernel(q_QNH: torch.Tensor) -> bool:
    """Whether the functions below take such queries."""
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
