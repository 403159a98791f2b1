"""Products of tokens with their experts against float64: many tokens, and a few."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from areal.engine.native.cuda.block_kernels import Norm, add_rms_norm
from areal.engine.native.cuda.device import HOPPER
from areal.engine.native.cuda.expert_linear import (
    Plan,
    block_m_for,
    expert_down,
    expert_gate_up,
    plan_for,
)
from areal.engine.native.cuda.expert_vector import vector_down, vector_gate_up
from areal.engine.native.cuda.routing import group_by_expert

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
# E, K, D, F: dims of whole and of broken tiles, experts that are no power of two.
SHAPES = [(4, 2, 32, 16), (20, 8, 128, 96), (5, 1, 100, 36)]
FEW_SHAPES = [(4, 2, 32, 16), (7, 3, 72, 20), (5, 1, 36, 33)]


def draw(num_tokens, shape, device, dtype, experts_TK=None):
    """x, w1, w2, w3, weights, experts, and hidden and summed outputs of these in float64."""
    torch.manual_seed(0)
    num_experts, top_k, dim, hidden_dim = shape
    if experts_TK is None:
        scores = torch.rand(num_tokens, num_experts, device=device)
        experts_TK = scores.topk(top_k, dim=1).indices
    weights_TK = torch.rand(num_tokens, top_k, device=device).softmax(1)
    x_TD, w1, w2, w3 = (
        torch.randn(size, device=device).to(dtype)
        for size in (
            (num_tokens, dim),
            (num_experts, hidden_dim, dim),
            (num_experts, dim, hidden_dim),
            (num_experts, hidden_dim, dim),
        )
    )
    w1, w2, w3 = w1 / dim**0.5, w2 / hidden_dim**0.5, w3 / dim**0.5
    picked = [w.double()[experts_TK] for w in (w1, w2, w3)]
    gate_TKF = torch.einsum("td,tkfd->tkf", x_TD.double(), picked[0])
    hidden_TKF = F.silu(gate_TKF) * torch.einsum("td,tkfd->tkf", x_TD.double(), picked[2])
    out_TKD = torch.einsum("tkf,tkdf->tkd", hidden_TKF, picked[1])
    out_TKD = out_TKD * weights_TK.to(dtype).double()[..., None]
    return (x_TD, w1, w2, w3, weights_TK, experts_TK.int()), hidden_TKF.flatten(0, 1), out_TKD


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def grouped(x_TD, w1, w2, w3, weights_TK, experts_TK, plan: Plan):
    blocks = group_by_expert(experts_TK, len(w1), plan.block_m)
    hidden_SF = x_TD.new_full((experts_TK.numel(), w1.shape[1]), float("nan"))
    expert_gate_up(x_TD, w1, w3, "silu", blocks, experts_TK.shape[1], hidden_SF, plan)
    out_TKD = x_TD.new_full((*experts_TK.shape, x_TD.shape[1]), float("nan"))
    expert_down(hidden_SF, w2, weights_TK, blocks, out_TKD.flatten(0, 1), plan)
    return hidden_SF, out_TKD


def default_plan(num_pairs, num_experts, dtype) -> Plan:
    return plan_for(block_m_for(num_pairs, num_experts), 128, dtype.itemsize, HOPPER)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 9, 45])
def test_many_tokens(shape, num_tokens, device, dtype):
    inputs, hidden_SF, out_TKD = draw(num_tokens, shape, device, dtype)
    plan = default_plan(num_tokens * shape[1], shape[0], dtype)
    found_hidden, found_out = grouped(*inputs, plan)
    assert error(found_hidden, hidden_SF) < TOLERANCE[dtype]
    assert error(found_out, out_TKD) < TOLERANCE[dtype]


def test_all_tokens_have_one_expert_and_the_others_none(device, dtype):
    experts_TK = torch.full((40, 1), 3, device=device)
    inputs, _, out_TKD = draw(40, (5, 1, 64, 48), device, dtype, experts_TK)
    x_TD, w1, w2, w3, *routing = inputs
    for weight in (w1, w2, w3):  # read by nobody
        weight[[0, 1, 2, 4]] = float("nan")
    _, found = grouped(x_TD, w1, w2, w3, *routing, default_plan(40, 5, dtype))
    assert error(found, out_TKD) < TOLERANCE[dtype]


def test_a_row_does_not_depend_on_the_rows_beside_it(device, dtype):
    inputs, _, _ = draw(50, (4, 2, 64, 32), device, dtype)
    x_TD, w1, w2, w3, weights_TK, experts_TK = inputs
    plan = default_plan(100, 4, dtype)
    _, every = grouped(*inputs, plan)
    _, some = grouped(x_TD[7:12], w1, w2, w3, weights_TK[7:12], experts_TK[7:12], plan)
    assert torch.equal(every[7:12], some)


@pytest.mark.parametrize("shape", FEW_SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_few_tokens(shape, num_tokens, device, dtype):
    inputs, hidden_SF, out_TKD = draw(num_tokens, shape, device, dtype)
    x_TD, w1, w2, w3, weights_TK, experts_TK = inputs
    found_SF = torch.full_like(hidden_SF, float("nan"), dtype=dtype)
    vector_gate_up(x_TD, w1, w3, "silu", experts_TK, found_SF)
    assert error(found_SF, hidden_SF) < TOLERANCE[dtype]
    residual_TD = torch.randn_like(x_TD)
    found_TD = torch.full_like(x_TD, float("nan"))
    vector_down(found_SF, w2, weights_TK, experts_TK, residual_TD, found_TD)
    assert error(found_TD, residual_TD.double() + out_TKD.sum(1)) < TOLERANCE[dtype]


def test_choices_are_summed_before_the_norm(device, dtype):
    torch.manual_seed(0)
    x_TCD = torch.randn(5, 3, 80, device=device).to(dtype)
    residual_TD = torch.randn(5, 80, device=device).to(dtype)
    weight_D = torch.rand(80, device=device).to(dtype)
    expected_TD = residual_TD + x_TCD.sum(1)
    normed_TD = F.rms_norm(expected_TD, (80,), weight_D, 1e-6)
    out_TD = torch.empty_like(residual_TD)
    add_rms_norm(x_TCD, residual_TD, Norm(weight_D, 1e-6), out_TD)
    torch.testing.assert_close(residual_TD, expected_TD)
    torch.testing.assert_close(out_TD, normed_TD)


def test_blocks_are_as_wide_as_the_rows_of_an_expert():
    widths = [block_m_for(8 * tokens, 128) for tokens in (9, 64, 256, 512, 16384)]
    assert widths == [16, 16, 32, 64, 128]


@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("dim", [64, 768, 2048])
def test_tiles_fit_into_shared_memory(block_m, element_bytes, dim):
    plan = plan_for(block_m, dim, element_bytes, HOPPER)
    tile_bytes = element_bytes * plan.block * (plan.rows + plan.block_m)
    assert plan.stages >= 2 and plan.stages * tile_bytes <= HOPPER.program_bytes
