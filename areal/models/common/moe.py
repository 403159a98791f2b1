"""Feed-forward layers: dense, and mixture of experts.

`FeedForward` is `w2(activation(w1(x)) * w3(x))`, D -> F -> D; SwiGLU with silu. In `MoE` each token
goes through the few experts its router chooses:

    weights_TK, experts_TK = router(x_TD)       # float32, whatever the model's dtype
    out_SD = experts(x_SD, counts_E)            # rows in the order of their experts

`experts` gets only rows by expert and their counts, so models/expert_parallel.py can replace it.
A shared feed-forward (`shared`), which every token goes through, is added to their outputs, in
some families weighed by a gate (`TokenGate`).

Grouped routing: a token's experts are of a few groups of consecutive experts, those whose best
expert is the most probable.

Load balancing without a loss: `expert_bias` affects which experts are chosen, not their weights,
and has no gradient. `balance_experts` raises the bias of experts that got fewer tokens than the
average since its last call, and lowers that of the others.

Router replay: `recorded_experts` collects the experts that a forward chooses, and `replay_experts`
makes the forwards after it choose given ones. The weights of replayed experts are those of the
current router, with their gradients.

Shape legend: T tokens, D model dim, E experts, K experts per token, S = T * K rows, F expert dim,
L layers with experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from areal.models.common.args import DecoderArgs, MoEArgs
from areal.utils.device import CPU_TILE

if TYPE_CHECKING:
    from areal.models.common.lora_layers import ExpertLora

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
BALANCE_RATE = 1e-3
_WEIGHTS: tuple[str, ...] = ("w1", "w2", "w3")  # of experts
# The grouped kernel needs rows aligned to 16 bytes.
_GROUPED_DTYPE, _GROUPED_MULTIPLE = torch.bfloat16, 8


class FeedForward(nn.Module):
    def __init__(self, args: DecoderArgs, hidden_dim: int):
        super().__init__()
        self.activation = ACTIVATIONS[args.activation]
        self.w1 = nn.Linear(args.dim, hidden_dim, bias=args.mlp_bias)
        self.w2 = nn.Linear(hidden_dim, args.dim, bias=args.mlp_bias)
        self.w3 = nn.Linear(args.dim, hidden_dim, bias=args.mlp_bias)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.w2(self.activation(self.w1(x_TD)) * self.w3(x_TD))


class MoE(nn.Module):
    def __init__(self, args: DecoderArgs):
        super().__init__()
        self.router = Router(args.dim, args.expert_args)
        self.experts = Experts(args)
        shared_dim = args.expert_args.shared_dim
        self.shared = FeedForward(args, shared_dim) if shared_dim else None
        self.shared_gate = TokenGate(args.dim) if args.expert_args.shared_gate else None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        weights_TK, experts_TK = self.router(x_TD)
        order_S = experts_TK.flatten().argsort(stable=True)
        place_S = torch.empty_like(order_S).scatter_(
            0, order_S, torch.arange(len(order_S), device=order_S.device)
        )
        x_SD = _Spread.apply(x_TD, order_S, place_S)
        out_SD = self.experts(x_SD, count_rows(experts_TK, self.router.num_experts))
        out_TKD = out_SD.index_select(0, place_S).unflatten(0, experts_TK.shape)
        out_TD = (out_TKD * weights_TK.to(x_TD.dtype)[..., None]).sum(1)
        if self.shared is None:
            return out_TD
        shared_TD = self.shared(x_TD)
        if self.shared_gate is not None:
            shared_TD = shared_TD * self.shared_gate(x_TD)
        return out_TD + shared_TD


class TokenGate(nn.Module):
    """[T, 1]: how much of a token's shared output counts, from 0 to 1."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, dim))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        # By row: the bits of a product with one column would depend on the number of rows.
        dot_T1 = (x_TD.float() * self.weight.float()).sum(-1, keepdim=True)
        return torch.sigmoid(dot_T1).to(x_TD.dtype)


class Router(nn.Module):
    expert_bias: torch.Tensor | None  # [E] float32
    load_E: torch.Tensor | None  # rows of each expert since the last bias update

    def __init__(self, dim: int, args: MoEArgs):
        super().__init__()
        self.num_experts = args.num_experts
        self.top_k = args.top_k
        self.norm_topk_prob = args.norm_topk_prob
        self.num_groups, self.top_groups = args.num_groups, args.top_groups
        self.weight_scale = args.weight_scale
        self.weight = nn.Parameter(torch.empty(args.num_experts, dim))
        bias_E = torch.zeros(args.num_experts, dtype=torch.float32) if args.expert_bias else None
        load_E = torch.zeros(args.num_experts, dtype=torch.int64) if args.expert_bias else None
        self.register_buffer("expert_bias", bias_E)
        self.register_buffer("load_E", load_E, persistent=False)
        self.given_TK: torch.Tensor | None = None  # see replay_experts

    def _apply(self, fn, recurse=True):
        # Kept in float32: bfloat16 loses steps of 0.001. `to_empty` would leave it undefined.
        bias_E = self.expert_bias
        super()._apply(fn, recurse)
        if bias_E is not None and self.load_E is not None:
            device = self.weight.device
            self.expert_bias = (
                torch.zeros_like(bias_E, device=device) if bias_E.is_meta else bias_E.to(device)
            )
            self.load_E = torch.zeros_like(self.load_E)
        return self

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights (float32) and indices of the chosen experts, [T, K] each."""
        probs_TE = F.linear(x_TD.float(), self.weight.float()).softmax(dim=-1)
        scores_TE = probs_TE if self.expert_bias is None else probs_TE + self.expert_bias
        if self.num_groups > 1:
            scores_TE = self._within_best_groups(scores_TE)
        experts_TK = scores_TE.topk(self.top_k, dim=-1).indices
        if self.given_TK is not None:
            is_given_TK = self.given_TK < self.num_experts
            experts_TK = torch.where(is_given_TK, self.given_TK.long(), experts_TK)
        weights_TK = probs_TE.gather(1, experts_TK)
        if self.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        if self.weight_scale != 1.0:
            weights_TK = weights_TK * self.weight_scale
        if self.load_E is not None and self.training and torch.is_grad_enabled():
            self.load_E += count_rows(experts_TK, self.num_experts)
        return weights_TK, experts_TK

    def _within_best_groups(self, scores_TE: torch.Tensor) -> torch.Tensor:
        """The scores, -inf outside the groups that the token may use."""
        scores_TGE = scores_TE.unflatten(-1, (self.num_groups, -1))
        best_TG = scores_TGE.amax(dim=-1).topk(self.top_groups, dim=-1).indices
        is_left_TG = torch.ones_like(scores_TGE[..., 0], dtype=torch.bool).scatter(
            1, best_TG, False
        )
        return scores_TGE.masked_fill(is_left_TG[..., None], -torch.inf).flatten(1)


class Experts(nn.Module):
    """Gated feed-forwards, stacked: w1 and w3 [E, F, D], w2 [E, D, F]."""

    def __init__(self, args: DecoderArgs):
        super().__init__()
        num, hidden, dim = args.expert_args.num_experts, args.expert_args.hidden_dim, args.dim
        self.activation = ACTIVATIONS[args.activation]
        self.w1 = nn.Parameter(torch.empty(num, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(num, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(num, hidden, dim))
        self.adapters = nn.ModuleDict()  # low-rank ones, by the name of a weight: lora_layers.py

    def forward(self, x_SD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """Rows 0 .. counts[0] - 1 by expert 0, the next counts[1] by expert 1, and so on."""
        if _grouped_kernel_takes(x_SD, self.weights()[0], self._ranks()):
            return self._grouped(x_SD, counts_E.cumsum(0).to(torch.int32))
        return self._one_by_one(x_SD, counts_E.tolist())

    def weights(self) -> tuple[torch.Tensor, ...]:
        """w1, w2, w3 of the local experts."""
        return self.w1, self.w2, self.w3

    def _ranks(self) -> list[int]:
        return [cast("ExpertLora", adapter).rank for adapter in self.adapters.values()]

    def _low_rank(self) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
        """A, B and scaling of each weight that has an adapter."""
        adapters = cast("dict[str, ExpertLora]", self.adapters)
        return {name: (*one.matrices(), one.scaling) for name, one in adapters.items()}

    def _grouped(self, x_SD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        weights = dict(zip(_WEIGHTS, self.weights(), strict=True))
        low_rank = self._low_rank()

        def product(x_SD: torch.Tensor, w_END: torch.Tensor) -> torch.Tensor:
            return F.grouped_mm(x_SD, w_END.transpose(1, 2), offs=ends_E)

        def linear(name: str, x_SD: torch.Tensor) -> torch.Tensor:
            out_SN = product(x_SD, weights[name])
            if name not in low_rank:
                return out_SN
            a_ERD, b_ENR, scaling = low_rank[name]
            return out_SN + product(product(x_SD, a_ERD), b_ENR) * scaling

        return linear("w2", self.activation(linear("w1", x_SD)) * linear("w3", x_SD))

    def _one_by_one(self, x_SD: torch.Tensor, counts: list[int]) -> torch.Tensor:
        # Unbound, because the gradient of each index operation would be a full stack.
        stacks = zip(_WEIGHTS, self.weights(), strict=True)
        weights = {name: weight.unbind() for name, weight in stacks}
        low_rank = {
            name: (a_ERD.unbind(), b_ENR.unbind(), scaling)
            for name, (a_ERD, b_ENR, scaling) in self._low_rank().items()
        }

        def linear(name: str, x_RD: torch.Tensor, expert: int) -> torch.Tensor:
            out_RN = F.linear(x_RD, weights[name][expert])
            if name not in low_rank:
                return out_RN
            a_ERD, b_ENR, scaling = low_rank[name]
            return out_RN + F.linear(F.linear(x_RD, a_ERD[expert]), b_ENR[expert]) * scaling

        # Without any row, one expert computes an empty result, to keep the autograd graph.
        used = [expert for expert, count in enumerate(counts) if count] or [0]
        outputs, start = [], 0
        for expert in used:
            end = start + counts[expert]
            x_RD = _whole_tiles(x_SD[start:end])
            hidden_RF = self.activation(linear("w1", x_RD, expert)) * linear("w3", x_RD, expert)
            outputs.append(linear("w2", hidden_RF, expert)[: end - start])
            start = end
        return torch.cat(outputs)


def count_rows(experts_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[E] int64. (bincount would synchronise with the device.)"""
    flat_S = experts_TK.flatten()
    zeros_E = torch.zeros(num_experts, dtype=torch.int64, device=flat_S.device)
    return zeros_E.scatter_add_(0, flat_S, torch.ones_like(flat_S))


def routers_of(model: nn.Module) -> list[Router]:
    """In the order of the layers."""
    return [module for module in model.modules() if isinstance(module, Router)]


@contextmanager
def recorded_experts(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """The experts [T, K] of each layer that has some, added by a forward within."""
    chosen: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _, __, out: chosen.append(out[1]))
        for router in routers_of(model)
    ]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def replay_experts(model: nn.Module, routed_TLK: torch.Tensor | None) -> None:
    """Until the next call, tokens use these experts; None: those the routers choose.

    A token whose indices are no experts of the model has none on record: the router chooses. Not a
    context manager, because a backward pass may compute the forward again.
    """
    for layer, router in enumerate(routers_of(model)):
        router.given_TK = None if routed_TLK is None else routed_TLK[:, layer]


@torch.no_grad()
def balance_experts(
    model: nn.Module, *, rate: float = BALANCE_RATE, group: dist.ProcessGroup | None = None
) -> None:
    """Move the expert biases by `rate` against the load; call it after each optimizer step.

    `group`: the ranks that routed other tokens of the batch, each token equally often; all of them
    call, so that their biases stay equal. No-op for a model without expert biases.
    """
    for router in routers_of(model):
        if router.expert_bias is None or router.load_E is None:
            continue
        if group is not None:
            dist.all_reduce(router.load_E, group=group)
        load_E = router.load_E.float()
        router.expert_bias += rate * (load_E.mean() - load_E).sign()
        router.load_E.zero_()


class _Spread(torch.autograd.Function):
    """Row s of the result is the token of choice `order[s]`; gradients of a token's choices are
    summed in a fixed order, unlike with atomic adds on a GPU."""

    @staticmethod
    def forward(ctx, x_TD, order_S, place_S):
        ctx.save_for_backward(place_S)
        ctx.num_tokens = len(x_TD)
        top_k = len(order_S) // max(len(x_TD), 1)
        return x_TD.index_select(0, order_S // max(top_k, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_SD):
        (place_S,) = ctx.saved_tensors
        grad_TKD = grad_SD.index_select(0, place_S).view(ctx.num_tokens, -1, grad_SD.shape[1])
        return grad_TKD.sum(1), None, None


def _grouped_kernel_takes(x_SD: torch.Tensor, w1_EFD: torch.Tensor, ranks: list[int]) -> bool:
    fits = all(size % _GROUPED_MULTIPLE == 0 for size in (*w1_EFD.shape[1:], *ranks))
    return x_SD.is_cuda and x_SD.dtype == _GROUPED_DTYPE and fits


def _whole_tiles(x_RD: torch.Tensor) -> torch.Tensor:
    """On a CPU a row's bits must not depend on how many rows its expert got."""
    return F.pad(x_RD, (0, 0, 0, -len(x_RD) % CPU_TILE)) if x_RD.device.type == "cpu" else x_RD
