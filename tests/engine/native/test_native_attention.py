"""Paged attention against dense attention over the same keys and values, row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import tiny_model

from areal.engine.native.torch_runner import KVCache, PagedAttention, bucket_of, new_cache
from areal.models.common.attention import AttentionSpec


def make_cache(num_pages: int, page_size: int) -> KVCache:
    return new_cache(tiny_model(), num_pages=num_pages, page_size=page_size)


def test_buckets_round_up_by_at_most_a_quarter():
    pages = np.arange(1, 3000)
    rounded = bucket_of(pages)
    assert (rounded >= pages).all() and (rounded <= np.maximum(pages * 1.25, pages)).all()
    assert bucket_of(np.array([1, 2, 5, 8, 9, 17, 33])).tolist() == [1, 2, 5, 8, 10, 20, 40]
    assert len(np.unique(rounded)) < 45


@pytest.mark.parametrize("lengths", [[1], [4, 4], [3, 9, 17, 40]])
@pytest.mark.parametrize(("window", "scale"), [(None, None), (1, 0.5), (6, None), (16, 0.5)])
def test_prefill_equals_dense_causal_attention(lengths, window, scale):
    torch.manual_seed(0)
    size, total = 4, sum(lengths)
    cache = make_cache(1 + sum(-(-n // size) for n in lengths), size)
    q, k, v = torch.randn(total, 6, 8), torch.randn(total, 2, 8), torch.randn(total, 2, 8)
    positions = np.concatenate([np.arange(n) for n in lengths])
    tables = np.zeros((total, -(-max(lengths) // size)), np.int64)
    free = iter(np.random.default_rng(0).permutation(np.arange(1, cache.keys.shape[1])))
    start = 0
    for n in lengths:
        for page in range(-(-n // size)):
            tables[start : start + n, page] = next(free)
        start += n

    out = PagedAttention(cache, positions, tables)(AttentionSpec(1, window, scale), q, k, v)

    start = 0
    for n in lengths:
        rows = slice(start, start + n)
        seen = torch.ones(n, n, dtype=torch.bool).tril()
        if window is not None:
            seen = seen.triu(1 - window)
        dense = F.scaled_dot_product_attention(
            *(x[rows].transpose(0, 1)[None] for x in (q, k, v)),
            attn_mask=seen,
            scale=scale,
            enable_gqa=True,
        )
        torch.testing.assert_close(out[rows], dense[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
        start += n
    assert not cache.keys[0].any()  # the other layer is untouched


@pytest.mark.parametrize("window", [None, 6])
def test_a_decoded_row_equals_the_prefilled_one_bit_for_bit(window):
    torch.manual_seed(1)
    cache = make_cache(12, 4)
    q, k, v = torch.randn(37, 4, 8), torch.randn(37, 2, 8), torch.randn(37, 2, 8)
    tables = np.tile(np.arange(1, 11), (37, 1))
    spec = AttentionSpec(0, window)
    together = PagedAttention(cache, np.arange(37), tables)(spec, q, k, v)
    for t in (0, 5, 16, 36):
        row = slice(t, t + 1)
        attend = PagedAttention(cache, np.array([t]), tables[:1])
        one = attend(spec, q[row], k[row], v[row])
        assert torch.equal(one, together[row])


def test_a_window_reads_only_the_pages_it_reaches():
    torch.manual_seed(2)
    cache = make_cache(12, 4)
    q, k, v = torch.randn(1, 4, 8), torch.randn(1, 2, 8), torch.randn(1, 2, 8)
    cache.keys.fill_(torch.nan)  # of positions 0 .. 31
    cache.values.fill_(torch.nan)
    cache.keys[:, 9:], cache.values[:, 9:] = 0.0, 0.0
    tables = np.arange(1, 12)[None]
    out = PagedAttention(cache, np.array([37]), tables)(AttentionSpec(0, window=6), q, k, v)
    assert bool(out.isfinite().all())


def test_copied_pages_hold_the_same_in_all_layers():
    cache = make_cache(5, 4)
    cache.keys.normal_()
    cache.values.normal_()
    cache.copy_pages(torch.tensor([1, 2]), torch.tensor([3, 4]))
    assert torch.equal(cache.keys[:, 1:3], cache.keys[:, 3:5])
    assert torch.equal(cache.values[:, 1:3], cache.values[:, 3:5])
