"""Prefill attention against float64: chunks of all sizes, begun anywhere in their sequences."""

from __future__ import annotations

import itertools

import pytest
import torch
from paged_world import make_paged_world, relative_error

from areal.engine.native.cuda.attention_tiles import MAX_SUMS, padded
from areal.engine.native.cuda.device import HOPPER, Device
from areal.engine.native.cuda.prefill_attention import prefill_attention, tiles_for

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def check(
    chunks, *, group, dtype, device, tiles=None, shared_pages=0, window=None, scale=None, **shape
):
    """`chunks`: (first position, rows) of one sequence each."""
    lengths = [position + rows for position, rows in chunks]
    world = make_paged_world(
        lengths, dtype=dtype, device=device, shared_pages=shared_pages, **shape
    )
    starts = torch.tensor([0, *(rows for _, rows in chunks)]).cumsum(0)
    num_heads = shape["num_kv_heads"] * group
    q_TNH = torch.randn(int(starts[-1]), num_heads, shape["head_dim"]).to(device, dtype)
    out_TNH = torch.full_like(q_TNH, float("nan"))
    max_rows = max(rows for _, rows in chunks)
    if tiles is None and device.type == "cpu":
        # The interpreter computes in float32; the tiles it is to prove are those of bfloat16.
        context = world.table_SP.shape[1] * shape["page_size"]
        tiles = tiles_for(max_rows, context, group, q_TNH.shape[2], torch.bfloat16, HOPPER)
    prefill_attention(
        q_TNH,
        world.keys,
        world.values,
        world.table_SP,
        starts.to(device, torch.int32),
        torch.tensor([position for position, _ in chunks], dtype=torch.int32, device=device),
        out_TNH,
        max_rows,
        tiles,
        window=window,
        scale=scale,
    )
    seen = [
        (chunk, position + row + 1)
        for chunk, (position, rows) in enumerate(chunks)
        for row in range(rows)
    ]
    rows = zip(q_TNH, seen, strict=True)
    wanted = torch.stack([world.attend(q_NH, *place, window, scale) for q_NH, place in rows])
    assert relative_error(out_TNH, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group", "page_size"),
    [
        *[(64, 2, 1, 16), (128, 1, 4, 64), (128, 2, 6, 16), (64, 1, 7, 64), (128, 1, 8, 16)],
        *[(8, 2, 2, 16), (80, 1, 4, 16), (96, 1, 8, 64), (112, 1, 3, 16), (192, 2, 1, 16)],
        (256, 1, 4, 16),
    ],
)
def test_mixed_chunks(head_dim, num_kv_heads, group, page_size, dtype, device):
    chunks = [(0, 1), (0, 100), (37, 23), (64, 64), (130, 1), (0, 65)]
    check(
        chunks,
        group=group,
        dtype=dtype,
        device=device,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
    )


@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 1)],
        [(70, 1), (15, 1), (16, 1)],  # the last token of shared prompts
        [(3, 2), (129, 5)],
        [(0, 9), (61, 10)],
        [(200, 150)],  # over several tiles of rows and of keys
    ],
)
def test_each_size_of_tile(chunks, dtype, device):
    shape = {"num_kv_heads": 1, "head_dim": 64, "page_size": 16}
    check(chunks, group=6, dtype=dtype, device=device, **shape)


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # rows of padding
@pytest.mark.parametrize("window", [1, 7, 64, 100, 1000])
@pytest.mark.parametrize("head_dim", [256, 80])
def test_a_window_and_a_scale(window, head_dim, dtype, device):
    """Windows shorter and longer than tiles and sequences; begun anywhere in their sequences."""
    chunks = [(0, 1), (0, 150), (37, 23), (200, 70), (130, 1)]
    shape = {"num_kv_heads": 1, "head_dim": head_dim, "page_size": 16}
    scores = {"window": window, "scale": 0.07}
    check(chunks, group=4, dtype=dtype, device=device, **scores, **shape)


def test_prompts_that_share_their_first_pages(dtype, device):
    shape = {"num_kv_heads": 2, "head_dim": 64, "page_size": 16, "shared_pages": 3}
    check([(48, 20), (50, 3), (48, 1)], group=4, dtype=dtype, device=device, **shape)


def test_the_tiles_of_float32(device):
    group = 20  # a tile holds at least one row
    shape = {"num_kv_heads": 1, "head_dim": 64, "page_size": 16}
    tiles = tiles_for(5, 80, group, 64, torch.float32, HOPPER)
    assert tiles.pairs == 32
    chunks = [(0, 5), (64, 2)]
    check(chunks, group=group, dtype=torch.float32, device=device, tiles=tiles, **shape)


def test_short_chunks_take_small_tiles():
    sizes = (1, 2, 3, 10, 11, 4096)
    pairs = [tiles_for(rows, 4096, 6, 128, torch.bfloat16, HOPPER).pairs for rows in sizes]
    assert pairs == [16, 16, 64, 64, 128, 128]
    # And so do those of a short context, but for wide heads.
    shapes = [(1024, 64), (1024, 128), (1025, 128), (256, 192)]
    tiles = [tiles_for(256, *(c, 6, dim), torch.bfloat16, HOPPER) for c, dim in shapes]
    assert [(t.pairs, t.keys) for t in tiles] == [(64, 64), (64, 32), (128, 64), (128, 64)]


@pytest.mark.parametrize("kilobytes", [100, 164, 228])  # an RTX 4090, an A100, an H100
@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 96, 112, 128, 192, 256, 512])
@pytest.mark.parametrize("group", [1, 4, 16])
def test_tiles_fit_into_shared_memory(group, head_dim, kilobytes):
    device = Device(num_processors=100, shared_bytes=kilobytes * 1024, max_warps=48)
    dtypes = (torch.bfloat16, torch.float32)
    for max_rows, dtype, fp8 in itertools.product((1, 8, 256, 2048), dtypes, (False, True)):
        tiles = tiles_for(max_rows, max_rows, group, head_dim, dtype, device, fp8=fp8)
        row_bytes = padded(head_dim) * dtype.itemsize
        used = (tiles.pairs + 2 * tiles.keys * tiles.num_stages) * row_bytes
        assert used <= device.program_bytes
        assert tiles.keys >= 16 and tiles.pairs >= group
        assert tiles.pairs * padded(head_dim) <= MAX_SUMS
