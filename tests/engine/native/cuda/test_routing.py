"""Choice of experts against the module's router, and pairs grouped by expert."""

from __future__ import annotations

import pytest
import torch

from areal.engine.native.cuda.block_kernels import Norm
from areal.engine.native.cuda.device import HOPPER
from areal.engine.native.cuda.routing import (
    RouterOptions,
    group_by_expert,
    max_blocks,
    norm_route,
    route,
    router_arrivals,
    router_plan,
)
from areal.models.common.args import MoEArgs
from areal.models.common.moe import Router

EPS = 1e-6
# T, E, K, D: one token, one choice, experts and dims that are no powers of two, several tiles.
SHAPES = [(1, 4, 2, 32), (3, 128, 8, 64), (17, 6, 6, 100), (40, 20, 1, 160), (9, 130, 4, 32)]


def make_router(
    num_experts, top_k, dim, device, dtype, *, normed=True, bias=False, **grouped
) -> Router:
    args = MoEArgs(
        num_experts=num_experts, top_k=top_k, hidden_dim=1, norm_topk_prob=normed,
        layers=frozenset(), expert_bias=bias, **grouped,
    )  # fmt: skip
    router = Router(dim, args).to(device, dtype).requires_grad_(False)
    router.weight.normal_(0.0, dim**-0.5)  # logits as of a model: no probability is 0
    if router.expert_bias is not None:
        router.expert_bias.normal_(0.0, 0.3)
    return router


def run(router: Router, x_TD, norm: torch.nn.RMSNorm | None = None):
    """Weights, experts, and what was routed."""
    options = RouterOptions.of(router)
    weights_TK = x_TD.new_full((len(x_TD), router.top_k), float("nan"), dtype=torch.float32)
    # Rows apart, as those of one layer are among all layers'.
    routed_TLK = torch.full((len(x_TD), 3, router.top_k), -7, device=x_TD.device).int()
    arrived = router_arrivals(x_TD.device)
    outputs, normed_TD = (weights_TK, routed_TLK[:, 1], arrived), x_TD
    if norm is None:
        route(x_TD, router.weight, router.expert_bias, options, *outputs)
    else:
        normed_TD = torch.full_like(x_TD, float("nan"))
        weights = (router.weight, router.expert_bias)
        norm_route(x_TD, Norm(norm.weight, EPS), *weights, options, normed_TD, *outputs)
    assert not arrived.any()
    assert (routed_TLK[:, [0, 2]] == -7).all()
    return weights_TK, routed_TLK[:, 1].long(), normed_TD


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("normed", "bias"), [(True, False), (False, True), (False, False)])
def test_chooses_as_the_router_does(shape, normed, bias, device, dtype):
    torch.manual_seed(0)
    num_tokens, num_experts, top_k, dim = shape
    router = make_router(num_experts, top_k, dim, device, dtype, normed=normed, bias=bias)
    x_TD = torch.randn(num_tokens, dim, device=device).to(dtype)
    weights_TK, experts_TK, _ = run(router, x_TD)
    expected_weights, expected_experts = router(x_TD)
    assert torch.equal(experts_TK, expected_experts)
    torch.testing.assert_close(weights_TK, expected_weights, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("shape", [(1, 128, 8, 96), (4, 6, 3, 32), (3, 200, 1, 2048)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_few_tokens_are_normed_for_the_products_that_follow(shape, bias, device, dtype):
    torch.manual_seed(0)
    num_tokens, num_experts, top_k, dim = shape
    router = make_router(num_experts, top_k, dim, device, dtype, bias=bias)
    norm = torch.nn.RMSNorm(dim, EPS).to(device, dtype).requires_grad_(False)
    norm.weight.uniform_(0.5, 1.5)
    x_TD = torch.randn(num_tokens, dim, device=device).to(dtype)
    weights_TK, experts_TK, normed_TD = run(router, x_TD, norm)
    torch.testing.assert_close(normed_TD, norm(x_TD))
    expected_weights, expected_experts = router(normed_TD)
    assert torch.equal(experts_TK, expected_experts)
    torch.testing.assert_close(weights_TK, expected_weights, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "num_groups", "top_groups"),
    [(1, 8, 2, 4, 1), (37, 160, 6, 8, 3), (5, 12, 8, 3, 2), (3, 20, 4, 4, 4)],
)
def test_experts_of_the_best_groups_and_scaled_weights(
    num_tokens, num_experts, top_k, num_groups, top_groups, normed, device, dtype
):
    torch.manual_seed(0)
    grouped = {"num_groups": num_groups, "top_groups": top_groups, "weight_scale": 16.0}
    router = make_router(num_experts, top_k, 64, device, dtype, normed=normed, **grouped)
    x_TD = torch.randn(num_tokens, 64, device=device).to(dtype)
    for norm in (None, torch.nn.RMSNorm(64, EPS).to(device, dtype).requires_grad_(False)):
        weights_TK, experts_TK, routed_TD = run(router, x_TD, norm)
        expected_weights, expected_experts = router(routed_TD)
        assert torch.equal(experts_TK, expected_experts)
        torch.testing.assert_close(weights_TK, expected_weights, atol=3e-5, rtol=1e-4)
    assert len(set((experts_TK[0] // (num_experts // num_groups)).tolist())) <= top_groups


def test_of_equal_scores_the_lower_index_is_chosen(device):
    router = make_router(6, 3, 32, device, torch.float32)
    router.weight.fill_(0.5)
    weights_TK, experts_TK, _ = run(router, torch.randn(4, 32, device=device))
    assert (experts_TK == torch.tensor([0, 1, 2], device=device)).all()
    torch.testing.assert_close(weights_TK, torch.full_like(weights_TK, 1 / 3))


@pytest.mark.parametrize("grouped", [{}, {"num_groups": 3, "top_groups": 2}])
def test_what_is_no_number_still_has_experts_that_exist(grouped, device):
    router = make_router(6, 3, 32, device, torch.float32, **grouped)
    x_TD = torch.randn(4, 32, device=device)
    x_TD[1] = float("nan")
    _, experts_TK, _ = run(router, x_TD)
    assert (experts_TK >= 0).all() and (experts_TK < 6).all()
    assert torch.equal(experts_TK[[0, 2, 3]], router(x_TD)[1][[0, 2, 3]])


def test_parts_of_the_experts_fill_the_device_until_tokens_do():
    plans = [router_plan(rows, 128, 2048, HOPPER) for rows in (1, 64, 512, 16384)]
    assert [(plan.tokens, plan.experts) for plan in plans] == [
        (16, 16), (16, 16), (16, 32), (64, 128),
    ]  # fmt: skip


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts"), [(1, 8, 128), (37, 2, 5), (700, 8, 20), (3, 1, 1)]
)
def test_every_pair_is_in_one_block_of_its_expert(block_m, num_tokens, top_k, num_experts, device):
    torch.manual_seed(0)
    scores = torch.rand(num_tokens, num_experts, device=device)
    check_blocks(scores.topk(top_k, dim=1).indices, num_experts, block_m)


@pytest.mark.parametrize("chosen", [0, 3, 6])
def test_one_expert_has_all_pairs(chosen, device):
    check_blocks(torch.full((50, 1), chosen, device=device), 7, 16)


def check_blocks(experts_TK, num_experts, block_m):
    blocks = group_by_expert(experts_TK.int(), num_experts, block_m)
    flat_S = experts_TK.flatten().tolist()
    assert len(blocks.expert_B) == max_blocks(len(flat_S), num_experts, block_m)
    seen, last = [], 0
    for expert, pairs in zip(blocks.expert_B.tolist(), blocks.pair_BM.tolist(), strict=True):
        if expert < 0:
            last = num_experts  # nothing may follow
            continue
        assert expert >= last
        last = expert
        real = [pair for pair in pairs if pair != len(flat_S)]
        assert real == sorted(real) and all(flat_S[pair] == expert for pair in real)
        assert real, "a block without a pair reads weights for nothing"
        seen += real
    assert sorted(seen) == list(range(len(flat_S)))
