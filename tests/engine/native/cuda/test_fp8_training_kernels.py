"""The kernels of training in FP8 give the values and scales of plain torch, and right products."""

from __future__ import annotations

import pytest
import torch

from areal.models.common import fp8_products, fp8_training_kernels
from areal.models.common.fp8 import FP8


def assert_same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        bits = torch.uint8 if one.dtype == FP8 else torch.int32
        assert torch.equal(one.cpu().contiguous().view(bits), other.contiguous().view(bits))


def drawn(shape, device, dtype) -> torch.Tensor:
    x = (torch.randn(shape) * 10 ** torch.randn(shape[0], 1)).to(device, dtype)
    x[0] = 0
    return x


@pytest.mark.parametrize("shape", [(128, 128), (200, 144), (5, 300)], ids=str)
def test_rows_are_those_of_plain_torch(shape, dtype, device):
    x = drawn(shape, device, dtype)
    found, expected = fp8_training_kernels.quantize(x), fp8_products.quantize(x.cpu())
    assert_same(found, expected)
    columns, top = fp8_products.transpose(*expected)
    assert_same((fp8_training_kernels.transpose(*found, top.to(device)),), (columns,))


@pytest.mark.parametrize("rows", [(256,), (100,), (128, 256, 60)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_are_those_of_plain_torch(rows, transposed, dtype, device):
    """Also of weights on top of each other, which are one."""
    weights = [drawn((count, 200), device, dtype) for count in rows]
    whole = torch.cat(weights).cpu()
    expected = fp8_products.quantize_weights([whole], transposed=transposed)
    found = tuple(torch.full_like(tensor, torch.nan, device=device) for tensor in expected)
    fp8_training_kernels.quantize_weights(weights, *found, transposed=transposed)
    assert_same(found, expected)


def test_gates_are_near_those_of_plain_torch(dtype, device):
    """Not the same: a last bit of the sigmoid may round to another value."""
    grad, gate_up = (torch.randn(130, n).to(device, dtype) for n in (256, 512))
    found = fp8_training_kernels.quantize_gated(gate_up)
    assert_near_rows(found, fp8_products.quantize_gated(gate_up.cpu()))
    found = fp8_training_kernels.quantize_gate_grads(grad, gate_up)
    assert_near_rows(found, fp8_products.quantize_gate_grads(grad.cpu(), gate_up.cpu()))


def assert_near_rows(found, expected) -> None:
    near, other = (
        q.cpu().float() * scale.cpu().t().repeat_interleave(128, 1)[:, : q.shape[1]]
        for q, scale in (found, expected)
    )
    assert found[0].shape == expected[0].shape and found[1].shape == expected[1].shape
    assert (near - other).norm() < 2e-3 * other.norm()


def test_what_is_infinite_becomes_nan(dtype, device):
    x = torch.ones(3, 130).to(device, dtype)
    x[1, 129] = torch.inf
    q, scale = fp8_training_kernels.quantize(x)
    assert q.float().isnan().nonzero().tolist() == [[1, 129]]
    columns = fp8_training_kernels.transpose(q, scale, scale.amax())
    assert columns.float().isnan().nonzero().tolist() == [[129, 1]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="plain torch multiplies here")
@pytest.mark.parametrize("dims", [(1536, 8960), (576, 192), (1000, 520)], ids=str)
def test_products_are_those_of_the_rounded_factors(dims, device):
    """Also of sizes that are no multiple of 128, and of 70 groups, which is no multiple of 4."""
    (dim, out), dtype = dims, torch.bfloat16
    x, grad = (torch.randn(300, n).to(device, dtype) for n in (dim, out))
    weight = (torch.randn(out, dim) * 0.02).to(device, dtype)
    of_x, of_grad = fp8_products.quantize(x), fp8_products.quantize(grad)
    y = fp8_products.times_weights(of_x, [weight], 300, back=False)
    grad_x = fp8_products.times_weights(of_grad, [weight], 300, back=True)
    grad_w = fp8_products.weight_grad(of_grad, of_x, dtype)
    q, scale = fp8_products.quantize_weights([weight], transposed=False)
    factor = exact(q, scale.repeat_interleave(128, 0)[: len(q)])
    rows, grad_rows = exact(of_x[0], of_x[1].t()), exact(of_grad[0], of_grad[1].t())
    (columns, top), (grad_columns, grad_top) = (
        fp8_products.transpose(*one) for one in (of_x, of_grad)
    )
    for found, expected in (
        (y, (rows @ factor.t())[:300]),
        (grad_x, (grad_rows @ factor)[:300]),
        (grad_w, grad_columns.double() @ columns.double().t() * top * grad_top),
    ):
        error = (found.double() - expected).norm() / expected.norm()
        assert error < 8e-3, f"relative error {error:.2e}"


def exact(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return q.double() * scale.double().repeat_interleave(128, 1)[:, : q.shape[1]]
