"""The feed-forward of a fused decoder block, dense or with experts: which kernels compute it.

    out = layer.forward(normed_TD, ...)             # [T, D], or [T, K, D] to be summed over experts
    x_TD = layer.forward_few(x_TD, norm, ...)       # norm, sum over experts and residual included

`forward` is for many rows, `forward_few` for at most MAX_FEW_ROWS (small_linear.py). Both read the
module's own parameters, or tensors its parameters are views of: loading a weight by name writes
where the kernels read. How many rows an expert has is known on the device only (routing.py), so a
graph captures experts like everything else. What every token goes through besides its experts is a
dense layer whose output, in some families gated, is added to that of the first.

Shapes: T rows, D model dim, F feed-forward dim, K experts per token, S = T * K, L layers with
experts.
"""

from __future__ import annotations

from typing import Protocol

import torch

from areal.engine.native.cuda.block_kernels import Norm
from areal.engine.native.cuda.device import device_of
from areal.engine.native.cuda.expert_linear import (
    block_m_for,
    expert_down,
    expert_gate_up,
    plan_for,
)
from areal.engine.native.cuda.expert_vector import vector_down, vector_gate_up
from areal.engine.native.cuda.fp8_tensors import Fp8Rows
from areal.engine.native.cuda.hybrid_kernels import add_shared
from areal.engine.native.cuda.linear import Products, Projection, fuse_linears
from areal.engine.native.cuda.routing import RouterOptions, group_by_expert, norm_route, route
from areal.engine.native.cuda.small_linear import small_gate_up, small_linear
from areal.models.common.moe import FeedForward, MoE
from areal.models.common.tensor_parallel import Ranks


class FeedForwardLayer(Protocol):
    projections: tuple[Projection, ...]

    def forward(
        self, normed_TD: torch.Tensor | Fp8Rows, routed_TLK: torch.Tensor, products: Products
    ) -> torch.Tensor:
        """What `add_rms_norm` adds; a layer with experts writes which into its part of `routed`."""
        ...

    def forward_few(self, x_TD: torch.Tensor, norm: Norm, routed_TLK: torch.Tensor) -> torch.Tensor:
        """x + feed_forward(norm(x))"""
        ...


class DenseLayer:
    def __init__(self, mlp: FeedForward, activation: str) -> None:
        self._activation = activation
        self._gate_up = fuse_linears(mlp.w1, mlp.w3)
        self._w2 = fuse_linears(mlp.w2)
        self.projections = (self._gate_up, self._w2)

    def forward(
        self, normed_TD: torch.Tensor | Fp8Rows, routed_TLK: torch.Tensor, products: Products
    ) -> torch.Tensor:
        activated_TF = products.gate_up(normed_TD, self._gate_up, self._activation)
        return products.project(activated_TF, self._w2)

    def forward_few(self, x_TD: torch.Tensor, norm: Norm, routed_TLK: torch.Tensor) -> torch.Tensor:
        gate_up, down = self._gate_up.weight, self._w2.weight
        assert isinstance(gate_up, torch.Tensor), "FP8 has no kernels for few rows"
        assert isinstance(down, torch.Tensor), "FP8 has no kernels for few rows"
        activated_TF = x_TD.new_empty(len(x_TD), len(gate_up) // 2)
        small_gate_up(x_TD, norm, gate_up, self._activation, activated_TF)
        out_TD = torch.empty_like(x_TD)
        small_linear(activated_TF, down, self._w2.bias, out_TD, x_TD)
        return out_TD


class ExpertLayer:
    def __init__(
        self,
        moe: MoE,
        activation: str,
        index: int,
        router_arrivals: torch.Tensor,
        ranks: Ranks | None,
    ) -> None:
        """`index`: among the model's layers with experts. `ranks`: each has columns of all."""
        self._activation = activation
        self._router, self._experts = moe.router, moe.experts
        self._index = index
        self._arrivals = router_arrivals
        self._ranks = ranks
        self._options = RouterOptions.of(moe.router)
        self._shared = None if moe.shared is None else DenseLayer(moe.shared, activation)
        self._shared_gate = moe.shared_gate
        self.projections = () if self._shared is None else self._shared.projections

    def forward(
        self, normed_TD: torch.Tensor | Fp8Rows, routed_TLK: torch.Tensor, products: Products
    ) -> torch.Tensor:
        assert isinstance(normed_TD, torch.Tensor), "experts have no FP8 weights"
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
        expert_gate_up(
            normed_TD, w1, w3, self._activation, blocks, self._options.top_k, hidden_SF, up_plan
        )
        out_TKD = normed_TD.new_empty(*experts_TK.shape, dim)
        expert_down(hidden_SF, w2, weights_TK, blocks, out_TKD.flatten(0, 1), down_plan)
        if self._shared is not None:
            shared_TD = self._shared.forward(normed_TD, routed_TLK, products)
            if self._shared_gate is None:
                out_TKD[:, 0] += shared_TD
            else:
                add_shared(normed_TD, self._shared_gate.weight, shared_TD, out_TKD)
        return out_TKD if self._ranks is None else self._ranks.add_up(out_TKD.sum(1))

    def forward_few(self, x_TD: torch.Tensor, norm: Norm, routed_TLK: torch.Tensor) -> torch.Tensor:
        assert self._shared is None, "see `FusedDecoder.can_run_few`"
        router, experts_TK = self._router, routed_TLK[:, self._index]
        weights_TK = x_TD.new_empty(experts_TK.shape, dtype=torch.float32)
        normed_TD = torch.empty_like(x_TD)
        norm_route(
            x_TD, norm, router.weight, router.expert_bias, self._options, normed_TD,
            weights_TK, experts_TK, self._arrivals,
        )  # fmt: skip
        w1, w2, w3 = self._experts.weights()
        hidden_SF = x_TD.new_empty(experts_TK.numel(), w1.shape[1])
        vector_gate_up(normed_TD, w1, w3, self._activation, experts_TK, hidden_SF)
        out_TD = torch.empty_like(x_TD)
        vector_down(hidden_SF, w2, weights_TK, experts_TK, x_TD, out_TD)
        return out_TD
