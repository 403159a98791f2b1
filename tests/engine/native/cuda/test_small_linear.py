"""Linear layers of a few rows against float64: every shape of x, and weights of any size."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from areal.engine.native.cuda.block_kernels import Norm
from areal.engine.native.cuda.device import HOPPER, Device
from areal.engine.native.cuda.small_linear import (
    Plan,
    norm_linear,
    plan_for,
    small_gate_up,
    small_linear,
)

EPS = 1e-6
# In float32 a sum of 8960 products may be off by sqrt(8960) roundings of 2**-24, 6e-6, one after
# the other; tiles add in parallel, which leaves about half.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 6e-3}
# (outputs, D): whole and broken tiles of either, the inner sizes of real models.
SHAPES = [(32, 1536), (22, 3584), (18, 8960), (66, 64), (7, 100)]
VECTOR, MATRIX = Plan(rows=4, block=512, warps=2), Plan(rows=16, block=128, warps=2, stages=3)


def draw(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(device, dtype)


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def assert_near(out: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    error = (out.double() - expected).norm() / expected.norm()
    assert error < (tolerance or TOLERANCE[out.dtype]), f"relative error {error:.2e}"


def normed(x_MD: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x_MD.double(), (x_MD.shape[1],), weight_D.double(), EPS)


@pytest.mark.parametrize("num_rows", range(1, 9))
def test_any_number_of_rows(num_rows, dtype, device):
    x = draw(num_rows, 1536, dtype=dtype, device=device)
    weight = draw(50, 1536, dtype=dtype, device=device, scale=0.02)
    out = poisoned(num_rows, 50, dtype=dtype, device=device)
    small_linear(x, weight, None, out)
    assert_near(out, x.double() @ weight.double().T)


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_and_residual(shape, num_rows, dtype, device):
    num_outputs, dim = shape
    x = draw(num_rows, dim, dtype=dtype, device=device)
    weight = draw(*shape, dtype=dtype, device=device, scale=dim**-0.5)
    bias = draw(num_outputs, dtype=dtype, device=device)
    residual = draw(num_rows, num_outputs, dtype=dtype, device=device, scale=10.0)
    expected = x.double() @ weight.double().T + bias.double() + residual.double()
    out = poisoned(num_rows, num_outputs, dtype=dtype, device=device)
    small_linear(x, weight, bias, out, residual)
    assert_near(out, expected)
    small_linear(x, weight, bias, residual, residual)
    assert torch.equal(residual, out), "the result differs when it is written over the residual"


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norm_linear(shape, num_rows, dtype, device):
    num_outputs, dim = shape
    # Rows of very different size: each has its own root mean square.
    x = draw(num_rows, dim, dtype=dtype, device=device) * 10.0 ** torch.arange(
        num_rows, dtype=dtype, device=device
    ).unsqueeze(1)
    norm = draw(dim, dtype=dtype, device=device) + 1
    weight = draw(*shape, dtype=dtype, device=device, scale=dim**-0.5)
    bias = draw(num_outputs, dtype=dtype, device=device)
    out = poisoned(num_rows, num_outputs, dtype=dtype, device=device)
    norm_linear(x, Norm(norm, EPS), weight, bias, out)
    assert_near(out, normed(x, norm) @ weight.double().T + bias.double())


@pytest.mark.parametrize("num_rows", [1, 2, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gate_up_of_a_norm(shape, num_rows, dtype, device):
    width, dim = shape
    x = draw(num_rows, dim, dtype=dtype, device=device)
    norm = draw(dim, dtype=dtype, device=device) + 1
    weight = draw(2 * width, dim, dtype=dtype, device=device, scale=dim**-0.5)
    out = poisoned(num_rows, width, dtype=dtype, device=device)
    small_gate_up(x, Norm(norm, EPS), weight, "silu", out)
    gate, up = (normed(x, norm) @ weight.double().T).chunk(2, dim=1)
    assert_near(out, F.silu(gate) * up, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("shape", [(24, 1152), (7, 3584)], ids=str)
def test_gate_up_with_gelu(shape, num_rows, dtype, device):
    """Without a norm, and with one whose weight is an offset from 1."""
    width, dim = shape
    x = draw(num_rows, dim, dtype=dtype, device=device)
    norm = draw(dim, dtype=dtype, device=device)
    weight = draw(2 * width, dim, dtype=dtype, device=device, scale=dim**-0.5)
    for norm_of_x, y in [
        (None, x.double()),
        (Norm(norm, EPS, offset=1.0), normed(x, norm.double() + 1)),
    ]:
        out = poisoned(num_rows, width, dtype=dtype, device=device)
        small_gate_up(x, norm_of_x, weight, "gelu_tanh", out)
        gate, up = (y @ weight.double().T).chunk(2, dim=1)
        assert_near(out, F.gelu(gate, approximate="tanh") * up, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("plan", [VECTOR, MATRIX, Plan(2, 256, 1), Plan(8, 2048, 8)], ids=str)
def test_every_plan_computes_one_row(plan, dtype, device):
    x = draw(1, 1536, dtype=dtype, device=device)
    norm = draw(1536, dtype=dtype, device=device)
    weight = draw(30, 1536, dtype=dtype, device=device, scale=0.02)
    out = poisoned(1, 30, dtype=dtype, device=device)
    norm_linear(x, Norm(norm, EPS), weight, None, out, plan)
    assert_near(out, normed(x, norm) @ weight.double().T)


def test_few_programs_walk_over_many_outputs(dtype, device):
    plan = Plan(rows=2, block=64, warps=1, programs=3)
    x, norm = (draw(*shape, dtype=dtype, device=device) for shape in [(1, 48), (48,)])
    width = 7  # pairs of rows, two or three for each of the programs
    weight = draw(2 * width, 48, dtype=dtype, device=device, scale=0.1)
    bias = draw(2 * width, dtype=dtype, device=device)
    out = poisoned(1, 2 * width, dtype=dtype, device=device)
    norm_linear(x, Norm(norm, EPS), weight, bias, out, plan)
    products = normed(x, norm) @ weight.double().T
    assert_near(out, products + bias.double())
    gate, up = products.chunk(2, dim=1)
    out = poisoned(1, width, dtype=dtype, device=device)
    small_gate_up(x, Norm(norm, EPS), weight, "silu", out, plan)
    assert_near(out, F.silu(gate) * up, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("num_rows", [1, 4])
def test_logits_come_in_float32(num_rows, dtype, device):
    x = draw(num_rows, 1536, dtype=dtype, device=device)
    weight = draw(97, 1536, dtype=dtype, device=device, scale=0.02)
    out = poisoned(num_rows, 97, dtype=torch.float32, device=device)
    small_linear(x, weight, None, out)
    assert_near(out, x.double() @ weight.double().T)


def test_a_row_of_nan_stays_alone(dtype, device):
    x = draw(3, 128, dtype=dtype, device=device)
    x[1] = torch.nan
    weight = draw(20, 128, dtype=dtype, device=device)
    out = torch.zeros(3, 20, dtype=dtype, device=device)
    norm_linear(x, Norm(torch.ones_like(x[0]), EPS), weight, None, out)
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


DEVICES = {  # multiprocessors, shared memory in KB, warps of a multiprocessor
    "a100": Device(108, 164 * 1024, 64),
    "rtx4090": Device(128, 100 * 1024, 48),
    "h200": HOPPER,
    "b200": Device(148, 228 * 1024, 64),
}


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("dim", [9, 576, 1024, 1152, 2048, 2560, 3584, 4096, 5120, 18944])
def test_plans_fit_their_kernel_and_the_device(dim, device):
    for num_rows, weight_rows, normed in itertools.product(
        (1, 2, 8), (9, 960, 4608, 17920, 151936), (False, True)
    ):
        plan = plan_for(num_rows, weight_rows, dim, normed, device)
        assert plan.uses_tensor_cores == (num_rows > 1)
        if plan.uses_tensor_cores:
            assert 2 * plan.stages * plan.block * (plan.rows + 8) < device.program_bytes
        elif plan.block >= dim:
            assert plan.programs and plan.programs % device.num_processors == 0


# Weight rows, D, whether normed: rows, block, warps, stages for 1 row of x, and for 8.
MEASURED = {  # plans that were timed on an H200
    (2048, 1536, True): [(4, 2048, 4, 1), (32, 128, 2, 4)],
    (1536, 1536, False): [(4, 2048, 4, 1), (16, 256, 1, 4)],
    (17920, 1536, True): [(4, 2048, 4, 1), (32, 128, 2, 4)],
    (1536, 8960, False): [(4, 1024, 8, 1), (16, 256, 1, 4)],
    (151936, 1536, False): [(4, 2048, 4, 1), (64, 128, 4, 4)],
    (4608, 3584, True): [(2, 4096, 8, 1), (32, 128, 2, 5)],
    (3584, 3584, False): [(4, 1024, 4, 1), (16, 256, 1, 4)],
    (37888, 3584, True): [(2, 4096, 8, 1), (32, 128, 2, 5)],
    (3584, 18944, False): [(4, 1024, 4, 1), (16, 256, 1, 4)],
}


@pytest.mark.parametrize("weight", MEASURED, ids=str)
def test_the_rule_gives_measured_shapes_their_plans(weight):
    plans = [plan_for(num_rows, *weight, HOPPER) for num_rows in (1, 8)]
    found = [(plan.rows, plan.block, plan.warps, plan.stages) for plan in plans]
    assert found == MEASURED[weight]


def test_one_row_takes_the_plan_that_fills_the_last_wave():
    """4096 outputs make 1024 programs of 4, nearly one wave of the 1056 that 132 processors hold;
    5120 make 1280, nearly two waves of 660 only in programs of 8."""
    plans = [plan_for(1, outputs, 14336, False, HOPPER) for outputs in (4096, 5120)]
    assert [plan.rows for plan in plans] == [4, 8]


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize(
    "shape",
    [(2048, 1536), (1536, 8960), (151936, 1536), (4608, 3584), (5120, 17408), (6144, 2560)],
    ids=str,
)
def test_real_shapes(shape, num_rows, device):
    num_outputs, dim = shape
    x = draw(num_rows, dim, dtype=torch.bfloat16, device=device)
    weight = draw(*shape, dtype=torch.bfloat16, device=device, scale=dim**-0.5)
    out = poisoned(num_rows, num_outputs, dtype=torch.bfloat16, device=device)
    small_linear(x, weight, None, out)
    assert_near(out, x.double() @ weight.double().T)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_captured_chain_of_overlapping_kernels_has_no_race(num_rows, device):
    dim, width, layers = 1536, 8960, 16
    dtype = torch.bfloat16
    norm = draw(dim, dtype=dtype, device=device)
    gate_up = [draw(2 * width, dim, dtype=dtype, device=device, scale=0.02) for _ in range(layers)]
    down = [draw(dim, width, dtype=dtype, device=device, scale=0.02) for _ in range(layers)]
    x = draw(num_rows, dim, dtype=dtype, device=device)
    state, middle = torch.empty_like(x), draw(num_rows, width, dtype=dtype, device=device)

    def chain():
        state.copy_(x)
        for layer in range(layers):
            small_gate_up(state, Norm(norm, EPS), gate_up[layer], "silu", middle)
            small_linear(middle, down[layer], None, state, state)

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
    reference = x.double()
    for layer in range(layers):
        gate, up = (normed(reference, norm) @ gate_up[layer].double().T).chunk(2, dim=1)
        reference = reference + (F.silu(gate) * up) @ down[layer].double().T
    assert_near(state, reference, 0.05)
