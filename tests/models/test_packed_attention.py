"""Packed attention: each sequence attends to itself alone, whatever lies beside it in the row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.models.common.attention import AttentionSpec, PackedAttention


def bounds(lengths: list[int]) -> torch.Tensor:
    return F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0), (1, 0))


def plain_causal(q_TNH, k_TKH, v_TKH, window=None, scale=None):
    """One sequence, written out: softmax over the masked scores of each head."""
    group = q_TNH.shape[1] // k_TKH.shape[1]
    k_TNH, v_TNH = (x.repeat_interleave(group, dim=1) for x in (k_TKH, v_TKH))
    scores = torch.einsum("tnh,snh->nts", q_TNH, k_TNH) * (scale or q_TNH.shape[-1] ** -0.5)
    hidden = torch.ones(len(q_TNH), len(q_TNH), dtype=torch.bool).triu(1)
    if window is not None:
        hidden |= torch.ones_like(hidden).tril(-window)
    return torch.einsum("nts,snh->tnh", scores.masked_fill(hidden, -torch.inf).softmax(-1), v_TNH)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 80), min_size=1, max_size=8).filter(any),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    window=st.sampled_from([None, 1, 7, 64, 200]),
    scale=st.sampled_from([None, 0.3]),
)
def test_output_and_gradients_equal_plain_attention(lengths, kv_heads, group, window, scale):
    torch.manual_seed(0)
    total = sum(lengths)
    heads = (kv_heads * group, kv_heads, kv_heads)
    qkv = [torch.randn(total, n, 4, dtype=torch.float64, requires_grad=True) for n in heads]
    attend = PackedAttention(bounds(lengths), max(lengths))
    out = attend(AttentionSpec(0, window, scale), *qkv)
    parts = zip(*(x.split(lengths) for x in qkv), strict=True)
    expected = torch.cat([plain_causal(*part, window, scale) for part in parts if len(part[0])])
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad((out * weight).sum(), qkv)
    expected_grads = torch.autograd.grad((expected * weight).sum(), qkv)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=1e-6, rtol=0)


@pytest.mark.parametrize("window", [3, 256, 300, 599])
def test_a_window_longer_than_a_block_of_queries(window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(650, 1, 4, dtype=torch.float64) for _ in range(3))
    out = PackedAttention(bounds([50, 600]), 600)(AttentionSpec(0, window), q, k, v)
    torch.testing.assert_close(out[50:], plain_causal(q[50:], k[50:], v[50:], window))


def test_positions_restart_with_each_sequence():
    attend = PackedAttention(bounds([2, 0, 3]), 3)
    assert attend.positions_T.tolist() == [0, 1, 0, 1, 2]


def test_a_long_sequence_does_not_pad_the_short_ones():
    attend = PackedAttention(bounds([1000] + [10] * 50), 1000)
    assert attend._rectangles.num_scores() == 1000**2 + 50 * 10**2


@pytest.mark.parametrize("cu_seqlens", [[0], [1, 4], [0, 4, 2]])
def test_bad_bounds_are_refused(cu_seqlens):
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0"):
        PackedAttention(torch.tensor(cu_seqlens), 8)


def test_bounds_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="max_seqlen is 3, but a sequence has 4"):
        PackedAttention(torch.tensor([0, 4]), 3)
    x = torch.zeros(5, 1, 4)
    with pytest.raises(ValueError, match="cu_seqlens ends at 4, got 5 tokens"):
        PackedAttention(torch.tensor([0, 4]), 4)(AttentionSpec(0), x, x, x)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[128] * 3, [517], [3, 200, 0, 64, 333]])
@pytest.mark.parametrize("window", [None, 50])
def test_kernels_of_the_device_agree_with_float64(lengths, window):
    torch.manual_seed(0)
    qkv = [
        torch.randn(sum(lengths), n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (6, 2, 2)
    ]
    attend = PackedAttention(bounds(lengths).cuda(), max(lengths))
    out = attend(AttentionSpec(0, window, 0.2), *qkv)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad(out, qkv, weight)
    wide = [x.detach().double().cpu().requires_grad_() for x in qkv]
    parts = zip(*(x.split(lengths) for x in wide), strict=True)
    expected = torch.cat([plain_causal(*part, window, 0.2) for part in parts if len(part[0])])
    expected_grads = torch.autograd.grad(expected, wide, weight.double().cpu())
    for got, want in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert (got.double().cpu() - want).norm() < 1e-2 * want.norm()
