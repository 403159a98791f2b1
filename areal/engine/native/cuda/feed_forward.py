"""The feed-forward of a fused decoder block, dense or with experts: which kernels compute it.

    out = layer.forward(normed_TD, ...)             # [T, D], or [T, K, D] to be summed over experts
    x_TD = layer.forward_few(x_TD, norm, ...)       # norm, sum over experts and residual included

`forward` is for many rows, `forward_few` for at most MAX_FEW_ROWS (small_linear.py). Both read the
module's own parameters, or tensors its parameters are views of: loading a weight by name writes
where the kernels read. How many rows an expert has is known on the device only (routing.py), so a
graph captures experts like everything else.

Shapes: T rows, D model dim, F feed-forward dim, K experts per token, S = T * K, L layers with
experts.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from areal.engine.native.cuda.block_kernels import silu_mul
from areal.engine.native.cuda.device import device_of
from areal.engine.native.cuda.expert_linear import (
    block_m_for,
    expert_down,
    expert_gate_up_silu,
    plan_for,
)
from areal.engine.native.cuda.expert_vector import vector_down, vector_gate_up_silu
from areal.engine.native.cuda.linear import fuse_linears, project, project_back
from areal.engine.native.cuda.routing import (
    RouterOptions,
    group_by_expert,
    norm_route,
    route,
)
from areal.engine.native.cuda.skinny_linear import SkinnyWorkspace, skinny_gate_up_silu
from areal.engine.native.cuda.small_linear import norm_gate_up_silu, small_linear
from areal.models.common.moe import FeedForward, MoE
from areal.models.common.tensor_parallel import Ranks


class FeedForwardLayer(Protocol):
    def forward(
        self,
        normed_TD: torch.Tensor,
        routed_TLK: torch.Tensor,
        skinny_space: SkinnyWorkspace | None,
    ) -> torch.Tensor:
        """What `add_rms_norm` adds; a layer with experts writes which into its part of `routed`."""
        ...

    def forward_few(
        self, x_TD: torch.Tensor, norm: nn.RMSNorm, routed_TLK: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """x + feed_forward(norm(x))"""
        ...


class DenseLayer:
    def __init__(self, mlp: FeedForward) -> None:
        self._gate_up, self._gate_up_bias = fuse_linears([mlp.w1, mlp.w3])
        self._w2 = mlp.w2

    def forward(
        self,
        normed_TD: torch.Tensor,
        routed_TLK: torch.Tensor,
        skinny_space: SkinnyWorkspace | None,
    ) -> torch.Tensor:
        activated_TF = normed_TD.new_empty(len(normed_TD), len(self._gate_up) // 2)
        if skinny_space is None:
            silu_mul(project(normed_TD, self._gate_up, self._gate_up_bias, None), activated_TF)
        else:
            skinny_gate_up_silu(normed_TD, self._gate_up, activated_TF, skinny_space)
        return project_back(activated_TF, self._w2, skinny_space)

    def forward_few(
        self, x_TD: torch.Tensor, norm: nn.RMSNorm, routed_TLK: torch.Tensor, eps: float
    ) -> torch.Tensor:
        activated_TF = x_TD.new_empty(len(x_TD), len(self._gate_up) // 2)
        norm_gate_up_silu(x_TD, norm.weight, eps, self._gate_up, activated_TF)
        out_TD = torch.empty_like(x_TD)
        small_linear(activated_TF, self._w2.weight, self._w2.bias, out_TD, x_TD)
        return out_TD


class ExpertLayer:
    def __init__(
        self, moe: MoE, index: int, router_arrivals: torch.Tensor, ranks: Ranks | None
    ) -> None:
        """`index`: among the model's layers with experts. `ranks`: each has columns of all."""
        self._router, self._experts = moe.router, moe.experts
        self._index = index
        self._arrivals = router_arrivals
        self._ranks = ranks
        self._options = RouterOptions(moe.router.top_k, moe.router.norm_topk_prob)

    def forward(
        self,
        normed_TD: torch.Tensor,
        routed_TLK: torch.Tensor,
        skinny_space: SkinnyWorkspace | None,
    ) -> torch.Tensor:
        router, experts_TK = self._router, routed_TLK[:, self._index]
        weights_TK = normed_TD.new_empty(experts_TK.shape, dtype=torch.float32)
        route(
            normed_TD, router.weight, router.expert_bias, self._options, weights_TK, experts_TK,
            self._arrivals,
        )  # fmt: skip
        w1, w2, w3 = self._experts.weights()
        num_experts, hidden_dim, dim = w1.shape
        block_m = block_m_for(experts_TK.numel(), num_experts)
        device, size = device_of(w1.device), w1.element_size()
        up_plan, down_plan = (plan_for(block_m, d, size, device) for d in (dim, hidden_dim))
        blocks = group_by_expert(experts_TK, num_experts, block_m)
        hidden_SF = normed_TD.new_empty(experts_TK.numel(), hidden_dim)
        expert_gate_up_silu(normed_TD, w1, w3, blocks, self._options.top_k, hidden_SF, up_plan)
        out_TKD = normed_TD.new_empty(*experts_TK.shape, dim)
        expert_down(hidden_SF, w2, weights_TK, blocks, out_TKD.flatten(0, 1), down_plan)
        return out_TKD if self._ranks is None else self._ranks.add_up(out_TKD.sum(1))

    def forward_few(
        self, x_TD: torch.Tensor, norm: nn.RMSNorm, routed_TLK: torch.Tensor, eps: float
    ) -> torch.Tensor:
        router, experts_TK = self._router, routed_TLK[:, self._index]
        weights_TK = x_TD.new_empty(experts_TK.shape, dtype=torch.float32)
        normed_TD = torch.empty_like(x_TD)
        norm_route(
            x_TD, norm.weight, eps, router.weight, router.expert_bias, self._options, normed_TD,
            weights_TK, experts_TK, self._arrivals,
        )  # fmt: skip
        w1, w2, w3 = self._experts.weights()
        hidden_SF = x_TD.new_empty(experts_TK.numel(), w1.shape[1])
        vector_gate_up_silu(normed_TD, w1, w3, experts_TK, hidden_SF)
        out_TD = torch.empty_like(x_TD)
        vector_down(hidden_SF, w2, weights_TK, experts_TK, x_TD, out_TD)
        return out_TD
