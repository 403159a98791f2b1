"""Context parallelism after Ulysses: tokens are cut over ranks everywhere but inside attention.

Each of cp ranks has T / cp consecutive tokens of a packed micro-batch. For attention the ranks
exchange: each gets all T tokens of N / cp heads, attends by the `attend` it was given, and sends
the outputs back. One layer costs two exchanges of its activations, forward and backward each.

    tokens_t, positions_t = (own_tokens(x_T, group) for x_T in (tokens_T, attend.positions_T))
    hidden_tD = model(tokens_t, positions_t, UlyssesAttention(attend, group))
    logprobs_T = gather_over_ranks(logprobs_t, group)

Shape legend: T tokens of the micro-batch, t = T / cp of this rank, N query heads, K key-value
heads, n and k = what a rank has of them in attention, H head dim, C = cp ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from areal.models.common.attention import Attend


class UlyssesAttention:
    """`attend` for T / cp tokens, by way of an `attend` for all T with a part of the heads."""

    def __init__(self, attend: Attend, group: dist.ProcessGroup) -> None:
        self._attend = attend
        self._group = group

    def __call__(
        self,
        layer: int,
        q_tNH: torch.Tensor,
        k_tKH: torch.Tensor,
        v_tKH: torch.Tensor,
        *,
        window: int | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        num_ranks = self._group.size()
        if k_tKH.shape[1] % num_ranks:
            # Fewer key-value heads than ranks: neighbouring ranks get the same one.
            copies = num_ranks // k_tKH.shape[1]
            k_tKH, v_tKH = (x.repeat_interleave(copies, dim=1) for x in (k_tKH, v_tKH))
        q_TnH, k_TkH, v_TkH = (self._all_tokens(x) for x in (q_tNH, k_tKH, v_tKH))
        out_TnH = self._attend(layer, q_TnH, k_TkH, v_TkH, window=window, scale=scale)
        return self._all_heads(out_TnH)

    def _all_tokens(self, x_tNH: torch.Tensor) -> torch.Tensor:
        x_CtnH = x_tNH.unflatten(1, (self._group.size(), -1)).transpose(0, 1)
        return _Exchange.apply(x_CtnH, self._group).flatten(0, 1)

    def _all_heads(self, x_TnH: torch.Tensor) -> torch.Tensor:
        x_CtnH = x_TnH.unflatten(0, (self._group.size(), -1))
        return _Exchange.apply(x_CtnH, self._group).transpose(0, 1).flatten(1, 2)


def own_tokens(x_T: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's T / cp tokens; T must be a multiple of the ranks."""
    return x_T.chunk(group.size())[group.rank()]


def gather_over_ranks(x_t: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[T] on every rank. All must compute the same of it: a rank's gradient is its own slice's."""
    return _Gather.apply(x_t, group)


class _Exchange(torch.autograd.Function):
    """Slice i of dimension 0 goes to rank i; slice i of the result came from rank i."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        x = x.contiguous()
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return _Exchange.apply(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_t: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        x_T = x_t.new_empty(group.size() * len(x_t), *x_t.shape[1:])
        dist.all_gather_into_tensor(x_T, x_t.contiguous(), group=group)
        return x_T

    @staticmethod
    def backward(ctx, grad_T: torch.Tensor):
        return own_tokens(grad_T, ctx.group), None
