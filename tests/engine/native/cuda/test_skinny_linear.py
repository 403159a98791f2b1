"""Linear layers of 9 to 128 rows against float64: broken tiles everywhere, and parts of D."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from areal.engine.native.cuda.block_kernels import Norm, rms_norm
from areal.engine.native.cuda.device import HOPPER, Device
from areal.engine.native.cuda.skinny_linear import (
    Plan,
    SkinnyWorkspace,
    padded_rows,
    plan_for,
    skinny_gate_up,
    skinny_linear,
)
from areal.models.common.moe import ACTIVATIONS

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}
ROWS = [9, 16, 48, 64, 96, 128]
WEIGHTS = {  # qkv, o, gate and up, down
    "1.5b": [(2048, 1536), (1536, 1536), (17920, 1536), (1536, 8960)],
    "7b": [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)],
}
REAL_SHAPES = [shape for shapes in WEIGHTS.values() for shape in shapes]
OTHER_SHAPES = [(151936, 1536), (100, 64), (960, 576), (4096, 1024), (5120, 17408), (57344, 8192)]
# Small enough for float32 and for the interpreter.
SMALL = Plan(rows=64, block=32, warps=4, stages=2)
PARTS = Plan(rows=64, block=32, warps=4, stages=2, parts=3)


@pytest.fixture
def workspace(device) -> SkinnyWorkspace:
    workspace = SkinnyWorkspace.make(device)
    workspace.sums.fill_(torch.nan)
    return workspace


def draw(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=device) * scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def assert_near(out: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    error = (out.double() - expected).norm() / expected.norm()
    assert error < (tolerance or TOLERANCE[out.dtype]), f"relative error {error:.2e}"


@pytest.mark.parametrize("plan", [SMALL, PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize("shape", [(9, 70, 96), (17, 64, 200), (128, 130, 64)], ids=str)
def test_any_shape_with_bias(shape, plan, dtype, device, workspace):
    num_rows, num_outputs, dim = shape
    x = draw(num_rows, dim, dtype=dtype, device=device)
    weight = draw(num_outputs, dim, dtype=dtype, device=device, scale=dim**-0.5)
    bias = draw(num_outputs, dtype=dtype, device=device)
    out = poisoned(num_rows, num_outputs, dtype=dtype, device=device)
    skinny_linear(x, weight, bias, out, workspace, plan)
    assert_near(out, x.double() @ weight.double().T + bias.double())


@pytest.mark.parametrize("plan", [SMALL, PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize("shape", [(9, 35, 96), (40, 32, 100)], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate_up(shape, plan, activation, dtype, device, workspace):
    num_rows, width, dim = shape
    x = draw(num_rows, dim, dtype=dtype, device=device)
    weight = draw(2 * width, dim, dtype=dtype, device=device, scale=dim**-0.5)
    out = poisoned(num_rows, width, dtype=dtype, device=device)
    skinny_gate_up(x, weight, activation, out, workspace, plan)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    assert_near(out, ACTIVATIONS[activation](gate) * up, 2 * TOLERANCE[dtype])


def test_a_second_launch_finds_the_workspace_as_the_first(dtype, device, workspace):
    x = draw(20, 96, dtype=dtype, device=device)
    weight = draw(64, 96, dtype=dtype, device=device)
    first, second = (poisoned(20, 64, dtype=dtype, device=device) for _ in range(2))
    skinny_linear(x, weight, None, first, workspace, PARTS)
    assert not workspace.arrived.any()
    skinny_linear(x, weight, None, second, workspace, PARTS)
    assert torch.equal(first, second) and first.isfinite().all()


def test_logits_come_in_float32(dtype, device, workspace):
    x = draw(10, 64, dtype=dtype, device=device)
    weight = draw(97, 64, dtype=dtype, device=device)
    out = poisoned(10, 97, dtype=torch.float32, device=device)
    skinny_linear(x, weight, None, out, workspace, SMALL)
    assert_near(out, x.double() @ weight.double().T)


def test_a_row_of_nan_stays_alone(dtype, device, workspace):
    x = draw(11, 64, dtype=dtype, device=device)
    x[-1] = torch.nan  # the row that padding repeats
    weight = draw(64, 64, dtype=dtype, device=device)
    out = torch.zeros(11, 64, dtype=dtype, device=device)
    skinny_linear(x, weight, None, out, workspace, PARTS)
    assert out[-1].isnan().all() and out[:-1].isfinite().all()


@pytest.mark.parametrize("num_processors", [58, 108, 132, 148])
@pytest.mark.parametrize("kilobytes", [100, 164, 228])  # an RTX 4090, an A100, an H100
@pytest.mark.parametrize("num_rows", ROWS)
def test_plans_fit_the_device_and_the_workspace(num_rows, kilobytes, num_processors):
    padded = padded_rows(num_rows)
    device = Device(num_processors, shared_bytes=kilobytes * 1024, max_warps=48)
    workspace = SkinnyWorkspace.make(torch.device("cpu"))
    for weight_rows, dim in [*REAL_SHAPES, *OTHER_SHAPES]:
        plan = plan_for(num_rows, weight_rows, dim, device)
        assert 2 * plan.stages * plan.block * (plan.rows + padded) <= device.program_bytes
        tiles = -(-weight_rows // plan.rows)
        if plan.parts > 1:
            assert tiles <= workspace.arrived.numel()
            assert tiles * plan.parts * plan.rows * padded <= workspace.sums.numel()


# Weight rows, D: rows, block, stages, parts for 16 rows of x, and for 64.
MEASURED = {  # plans that were timed on an H200
    (2048, 1536): [(64, 128, 4, 4), (64, 128, 4, 4)],
    (1536, 1536): [(64, 128, 4, 5), (64, 128, 4, 5)],
    (17920, 1536): [(64, 128, 3, 1), (64, 64, 4, 1)],
    (1536, 8960): [(64, 128, 6, 5), (64, 128, 4, 5)],
    (4608, 3584): [(64, 128, 6, 1), (64, 128, 4, 1)],
    (3584, 3584): [(64, 128, 6, 2), (64, 128, 4, 2)],
    (37888, 3584): [(128, 64, 3, 1), (128, 64, 3, 1)],
    (3584, 18944): [(64, 128, 6, 2), (64, 128, 4, 2)],
}


@pytest.mark.parametrize("weight", MEASURED, ids=str)
def test_the_rule_gives_measured_shapes_their_plans(weight):
    plans = [plan_for(num_rows, *weight, HOPPER) for num_rows in (16, 64)]
    found = [(plan.rows, plan.block, plan.stages, plan.parts) for plan in plans]
    assert found == MEASURED[weight]


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("shape", [*REAL_SHAPES, *OTHER_SHAPES[:-1]], ids=str)
def test_real_shapes(shape, num_rows, device, workspace):
    num_outputs, dim = shape
    x = draw(num_rows, dim, dtype=torch.bfloat16, device=device)
    weight = draw(*shape, dtype=torch.bfloat16, device=device, scale=dim**-0.5)
    bias = draw(num_outputs, dtype=torch.bfloat16, device=device)
    out = poisoned(num_rows, num_outputs, dtype=torch.bfloat16, device=device)
    skinny_linear(x, weight, bias, out, workspace)
    expected = x.float() @ weight.float().T + bias.float()
    assert_near(out, expected.double())


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("shape", [(17920, 1536), (37888, 3584)], ids=str)
def test_real_gates(shape, num_rows, device, workspace):
    x = draw(num_rows, shape[1], dtype=torch.bfloat16, device=device)
    weight = draw(*shape, dtype=torch.bfloat16, device=device, scale=shape[1] ** -0.5)
    out = poisoned(num_rows, shape[0] // 2, dtype=torch.bfloat16, device=device)
    skinny_gate_up(x, weight, "silu", out, workspace)
    gate, up = (x.float() @ weight.float().T).chunk(2, dim=1)
    assert_near(out, (F.silu(gate) * up).double(), 2 * TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [16, 64])
def test_a_captured_chain_of_overlapping_kernels_has_no_race(num_rows, device, workspace):
    dim, width, layers = 1536, 8960, 16
    dtype = torch.bfloat16
    gate_up = [draw(2 * width, dim, dtype=dtype, device=device, scale=0.03) for _ in range(layers)]
    down = [draw(dim, width, dtype=dtype, device=device, scale=0.03) for _ in range(layers)]
    x = draw(num_rows, dim, dtype=dtype, device=device)
    state, middle = torch.empty_like(x), draw(num_rows, width, dtype=dtype, device=device)
    ones = torch.ones(dim, dtype=dtype, device=device)

    def chain():
        state.copy_(x)
        for layer in range(layers):
            skinny_gate_up(state, gate_up[layer], "silu", middle, workspace)
            skinny_linear(middle, down[layer], None, state, workspace)
            rms_norm(state, Norm(ones, 1e-6), state)  # or the state would grow without bound

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    expected = None
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        expected = state.clone() if expected is None else expected
        assert torch.equal(state, expected)
    assert state.isfinite().all() and state.any()
