"""FP8 linear layers: values and scales by hand, exact factors, and a model that stores them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model

from areal.models.common.attention import PackedAttention
from areal.models.common.fp8 import FP8, dequantize, quantize_blocks, round_heads, scale_for
from areal.models.common.fp8_linear import Fp8Linear, block_rows_of, quantize_rows, stored_in_fp8


@pytest.mark.parametrize(
    ("largest", "scale"),
    [(448.0, 1.0), (448.5, 2.0), (224.0, 0.5), (225.0, 1.0), (1.75, 2**-8), (3e38, 2.0**120)],
)
def test_the_scale_is_the_smallest_power_of_two_that_fits(largest, scale):
    assert scale_for(torch.tensor([largest])).item() == scale


def test_a_scale_of_zeros_is_no_zero():
    scale = scale_for(torch.zeros(1)).item()
    assert scale > 0 and math.isfinite(1 / scale)


def test_rows_by_hand():
    x = torch.zeros(2, 130)
    x[0, 0], x[0, 1], x[0, 129] = 448.0, 17.0, 0.1
    x[1, 5] = -3.0
    q, scale = quantize_rows(x)
    # 17 lies between 16 and 18 and goes to the even one; 0.1 is stored as 409.6 / 4096.
    assert q.dtype == FP8 and scale.tolist() == [[1.0, 2**-12], [2**-7, scale[1, 1].item()]]
    assert q[0, :2].tolist() == [448.0, 16.0] and q[0, 129].item() == 416.0
    assert q[1, 5].item() == -384.0
    assert dequantize(q, scale, torch.float32)[1, 5].item() == -3.0


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(1, 5),
    dim=st.integers(1, 300),
    scale=st.floats(1e-20, 1e20),
    seed=st.integers(0, 10**6),
)
def test_dequantized_numbers_are_near_and_exact_in_bfloat16(rows, dim, scale, seed):
    x = torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)) * scale
    near = dequantize(*quantize_rows(x), torch.float32)
    assert torch.equal(near.bfloat16().float(), near)
    largest = x.abs().amax(1, keepdim=True)
    # Three bits of mantissa, and below 2**-6 of the scale steps of 2**-9.
    assert ((near - x).abs() <= x.abs() / 16 + largest * 2**-17).all()
    again = dequantize(*quantize_rows(near), torch.float32)
    assert torch.equal(again, near)


def test_blocks_share_a_scale():
    weight = torch.ones(256, 256)
    weight[130, 200] = 1000.0
    q, scale = quantize_blocks(weight, 128)
    assert scale.tolist() == [[2**-8, 2**-8], [2**-8, 4.0]]
    assert dequantize(q, scale, torch.float32)[130, 200].item() == 1024.0


def test_layers_side_by_side_have_blocks_of_one_height():
    assert block_rows_of([3584, 512, 512]) == 128
    assert block_rows_of([576, 192, 192]) == 64
    assert block_rows_of([96, 24]) == 8
    assert block_rows_of([7]) == 1
    linears = [torch.nn.Linear(40, rows) for rows in (576, 192)]
    assert [len(linear.scale) for linear in stored_in_fp8(linears)] == [576 // 64, 192 // 64]


def test_a_layer_multiplies_rounded_factors():
    linear = torch.nn.Linear(200, 64)
    (stored,) = stored_in_fp8([linear])
    x = torch.randn(5, 200)
    rounded = dequantize(*quantize_rows(x), torch.float32)
    weight = dequantize(*quantize_blocks(linear.weight.detach(), 64), torch.float32)
    assert torch.equal(stored(x), F.linear(rounded, weight, linear.bias))
    assert (stored(x) - linear(x)).norm() < 0.1 * linear(x).norm()


def test_heads_have_scales_of_their_own():
    x = torch.tensor([[[1.0, 0.3], [1000.0, 1.0]]])
    # 0.3 is 76.8 of 256, between 72 and 80; 1000 is 250 of 4, between 240 and 256.
    assert round_heads(x).tolist() == [[[1.0, 0.3125], [1024.0, 1.0]]]


def logits(model, tokens):
    count = len(tokens)
    attend = PackedAttention(torch.tensor([0, count], dtype=torch.int32), count)
    return model.logits(model(tokens, torch.arange(count), attend))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3_text"])
@torch.no_grad()
def test_a_model_in_fp8_is_near_and_loads_by_name(family):
    plain, stored = tiny_model(family, seed=0), tiny_model(family, seed=1)
    stored.store_in_fp8()
    tokens = torch.arange(20) % plain.args.vocab_size
    for name, tensor in plain.named_hf_tensors():
        stored.load_hf_tensor(name, tensor)
    assert stored.hf_shapes() == plain.hf_shapes()
    assert all(isinstance(block.attention.wq, Fp8Linear) for block in stored.blocks)
    expected, found = logits(plain, tokens), logits(stored, tokens)
    error = (found - expected).norm() / expected.norm()
    assert 0 < error < 0.4
    # What it hands out are the stored numbers: quantizing them again loses nothing.
    again = tiny_model(family, seed=2)
    again.store_in_fp8()
    for name, tensor in stored.named_hf_tensors():
        again.load_hf_tensor(name, tensor)
    assert torch.equal(logits(again, tokens), found)


def test_experts_are_refused_by_name():
    with pytest.raises(ValueError, match=r"dtype fp8.*experts.*use bfloat16"):
        tiny_model("qwen3_moe").store_in_fp8()
