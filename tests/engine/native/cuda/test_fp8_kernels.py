"""FP8 in the kernels against models/common/fp8.py: the same values, products of exact factors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from areal.engine.native.cuda.block_kernels import (
    Norm,
    add_rms_norm,
    gate_mul,
    gate_mul_fp8,
    quantized,
    rms_norm,
    rope_and_cache,
)
from areal.engine.native.cuda.decode_attention import Workspace, decode_attention
from areal.engine.native.cuda.fp8_tensors import CacheScales, Fp8Rows, Fp8Weight
from areal.engine.native.cuda.linear import Products, Projection
from areal.engine.native.cuda.prefill_attention import prefill_attention
from areal.engine.native.cuda.skinny_linear import SkinnyWorkspace, skinny_gate_up, skinny_linear
from areal.models.common.fp8 import FP8, dequantize, quantize_blocks, round_heads
from areal.models.common.fp8_kernels import quantize_into

EPS = 1e-6


def assert_same_rows(rows: Fp8Rows, x: torch.Tensor) -> None:
    q, scale = quantize_blocks(x.cpu(), block_rows=1)
    assert torch.equal(rows.scale_MG.cpu(), scale)
    assert torch.equal(rows.q_MD.cpu().view(torch.uint8), q.view(torch.uint8))


def weight_like(weight: torch.Tensor, block_rows: int) -> Fp8Weight:
    num_rows, dim = weight.shape
    q = torch.empty_like(weight, dtype=FP8)
    scale = weight.new_empty(num_rows // block_rows, -(-dim // 128), dtype=torch.float32)
    quantize_into(weight, q, scale)
    return Fp8Weight(q, scale)


@pytest.mark.parametrize("shape", [(1, 128), (13, 300), (9, 96)], ids=str)
def test_rows_are_those_of_plain_torch(shape, dtype, device):
    x = (torch.randn(shape) * 10 ** torch.randn(shape[0], 1)).to(device, dtype)
    x[0] = 0
    assert_same_rows(quantized(x), x)


@pytest.mark.parametrize(
    ("shape", "block_rows"), [((256, 256), 128), ((192, 100), 64), ((7, 40), 1)]
)
def test_blocks_are_those_of_plain_torch(shape, block_rows, dtype, device):
    weight = torch.randn(shape).to(device, dtype)
    made = weight_like(weight, block_rows)
    q, scale = quantize_blocks(weight.cpu(), block_rows)
    assert made.block_rows == block_rows and torch.equal(made.scale_BG.cpu(), scale)
    assert torch.equal(made.q_ND.cpu().view(torch.uint8), q.view(torch.uint8))


@pytest.mark.parametrize("dim", [128, 300])
def test_norms_write_quantized_rows(dim, dtype, device):
    x, residual = (torch.randn(5, dim).to(device, dtype) for _ in range(2))
    norm = Norm(torch.randn(dim).to(device, dtype), EPS)
    plain, rows = torch.empty_like(x), Fp8Rows.like(x)
    rms_norm(x, norm, plain)
    rms_norm(x, norm, rows)
    assert_same_rows(rows, plain)
    other = residual.clone()
    add_rms_norm(x, residual, norm, plain)
    add_rms_norm(x, other, norm, rows)
    assert_same_rows(rows, plain)
    assert torch.equal(other, residual)


@pytest.mark.parametrize("width", [200, 1100])
def test_gates_write_quantized_rows(width, dtype, device):
    x = torch.randn(3, 2 * width).to(device, dtype)
    plain = x.new_empty(3, width)
    gate_mul(x, "silu", plain)
    assert_same_rows(gate_mul_fp8(x, "silu"), plain)


@pytest.mark.parametrize("num_rows", [1, 16, 40, 67])
@pytest.mark.parametrize(
    ("shape", "block_rows"),
    [((256, 1024), 128), ((256, 384), 128), ((192, 300), 64), ((10, 96), 2)],
)
def test_products_of_few_rows(shape, block_rows, num_rows, dtype, device):
    (num_out, dim), space = shape, SkinnyWorkspace.make(device)
    x = torch.randn(num_rows, dim).to(device, dtype)
    weight = weight_like((torch.randn(shape) * 0.02).to(device, dtype), block_rows)
    bias = torch.randn(num_out).to(device, dtype)
    rows = quantized(x)
    factors = [
        dequantize(q.cpu(), scale.cpu(), torch.float64)
        for q, scale in ((rows.q_MD, rows.scale_MG), (weight.q_ND, weight.scale_BG))
    ]
    product = factors[0] @ factors[1].T
    out = torch.full((num_rows, num_out), torch.nan, dtype=dtype, device=device)
    skinny_linear(rows, weight, bias, out, space)
    assert_near(out, product + bias.cpu().double())
    gated = torch.full((num_rows, num_out // 2), torch.nan, dtype=dtype, device=device)
    skinny_gate_up(rows, weight, "silu", gated, space)
    assert_near(gated, F.silu(product[:, : num_out // 2]) * product[:, num_out // 2 :])
    many = Products("cublas", space, dtype).project(x, Projection(weight, bias))
    assert_near(many, product + bias.cpu().double())


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    error = (out.cpu().double() - expected).norm() / expected.norm()
    exact = 3e-4 if out.is_cuda else 3e-6  # tensor cores add FP8 products with about 14 bits
    assert error < (exact if out.dtype == torch.float32 else 8e-3), f"relative error {error:.2e}"


@pytest.mark.parametrize("head_dim", [32, 80])
@pytest.mark.parametrize("window", [None, 7])
def test_attention_reads_an_fp8_cache(head_dim, window, dtype, device):
    """A prompt is prefilled, then one token decoded: heads are those that `round_heads` leaves."""
    num_heads, num_kv, page_size, length = 4, 2, 4, 11
    qkv = torch.randn(length, (num_heads + 2 * num_kv) * head_dim).to(device, dtype)
    cos, sin = torch.ones(length, head_dim // 2), torch.zeros(length, head_dim // 2)
    cache = torch.zeros(2, 8, num_kv, page_size, head_dim, dtype=FP8, device=device)
    scales = CacheScales(*torch.zeros(2, 8, num_kv, page_size, device=device))
    pages = torch.tensor([[5, 2, 7]], dtype=torch.int32, device=device)
    position = torch.arange(length)
    write = pages.cpu()[0, position // page_size] * page_size + position % page_size
    q = qkv.new_empty(length, num_heads, head_dim)
    rope_and_cache(
        qkv, cos.to(device, dtype), sin.to(device, dtype), write.int().to(device), *cache, q,
        None, None, scales,
    )  # fmt: skip
    heads = qkv.unflatten(1, (-1, head_dim))
    assert torch.equal(q, heads[:, :num_heads])
    k = round_heads(heads[:, num_heads : num_heads + num_kv].cpu()).double()
    v = round_heads(heads[:, num_heads + num_kv :].cpu()).double()
    behind = position[:, None] - position
    seen = (behind >= 0) & (behind < (window or length))
    expected = F.scaled_dot_product_attention(
        q.cpu().double().transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1),
        attn_mask=seen, enable_gqa=True,
    ).transpose(0, 1)  # fmt: skip

    prefilled = torch.empty_like(q)
    first = torch.zeros(1, dtype=torch.int32, device=device)
    bounds = torch.tensor([0, length], dtype=torch.int32, device=device)
    prefill_attention(
        q, *cache, pages, bounds, first, prefilled, length, window=window, scales=scales
    )
    assert_near(prefilled, expected)
    decoded = torch.empty_like(q[-1:])
    space = Workspace.make(1, num_heads, num_kv, head_dim, device)
    decode_attention(
        q[-1:], *cache, pages, first, first + length, decoded, space, 2, window=window,
        scales=scales,
    )  # fmt: skip
    assert_near(decoded, expected[-1:])
