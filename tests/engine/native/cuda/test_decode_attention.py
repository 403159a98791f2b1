"""Decode attention against float64: shapes, lengths, splits, shared pages and padding rows."""

from __future__ import annotations

import pytest
import torch
from paged_world import make_paged_world, relative_error

from areal.engine.native.cuda.attention_tiles import padded
from areal.engine.native.cuda.decode_attention import (
    MAX_SPLITS,
    DecodeTiles,
    Workspace,
    decode_attention,
    rows_attention,
    splits_for,
    tiles_for,
)
from areal.engine.native.cuda.device import HOPPER, Device, device_of

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SMALL = DecodeTiles(tile=32, min_split=32, num_warps=4, num_stages=3)


def decode(world, q_RNH, slots, lengths, num_splits, tiles=None, workspace=None, **scores):
    """The output; lengths are those of the sequences, the scratch one comes by itself."""
    device = q_RNH.device
    if workspace is None and num_splits > 1:
        workspace = make_workspace(q_RNH, world, num_splits)
    out_RNH = torch.full_like(q_RNH, float("nan"))
    decode_attention(
        q_RNH,
        world.keys,
        world.values,
        world.table_SP,
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor([*lengths, 1], dtype=torch.int32, device=device),
        out_RNH,
        workspace,
        num_splits,
        tiles=tiles,
        **scores,
    )
    return out_RNH


def make_workspace(q_RNH, world, num_splits):
    num_rows, num_heads, head_dim = q_RNH.shape
    workspace = Workspace.make(
        num_rows, num_heads, world.keys.shape[1], head_dim, q_RNH.device, num_splits
    )
    for part in (workspace.result, workspace.log_weight):
        part.fill_(float("nan"))
    return workspace


def reference(world, q_RNH, slots, lengths, **scores):
    lengths = [*lengths, 1]
    rows = zip(q_RNH, slots, strict=True)
    return torch.stack([world.attend(q_NH, slot, lengths[slot], **scores) for q_NH, slot in rows])


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group", "page_size"),
    [
        *[(64, 2, 1, 16), (128, 1, 4, 64), (128, 2, 6, 16), (64, 1, 7, 64), (128, 1, 8, 16)],
        *[(8, 2, 2, 16), (80, 2, 4, 16), (96, 1, 8, 64), (112, 1, 3, 16), (192, 2, 1, 16)],
        (256, 1, 4, 16),
    ],
)
def test_equals_dense_attention(head_dim, num_kv_heads, group, page_size, dtype, device):
    lengths = [1, 16, 17, 63, 64, 65, 128, 200]
    world = make_paged_world(
        lengths,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        device=device,
    )
    slots = [3, 7, 0, 8, 6, 1, 5, 2, 4, 8]  # in any order; the scratch slot pads, twice
    q_RNH = torch.randn(len(slots), num_kv_heads * group, head_dim).to(device, dtype)
    out_RNH = decode(world, q_RNH, slots, lengths, num_splits=1)
    wanted = reference(world, q_RNH, slots, lengths)
    assert relative_error(out_RNH, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_splits", [2, 4, 64])
def test_splits_are_combined_whatever_the_length(num_splits, dtype, device):
    lengths = [1, 70, 257]  # at tiles of 32: fewer tiles than splits, and more
    world = make_paged_world(
        lengths, num_kv_heads=1, head_dim=64, page_size=16, dtype=dtype, device=device
    )
    slots = [2, 0, 1]
    q_RNH = torch.randn(3, 6, 64).to(device, dtype)
    workspace = make_workspace(q_RNH, world, num_splits)
    out_RNH = decode(world, q_RNH, slots, lengths, num_splits, SMALL, workspace)
    wanted = reference(world, q_RNH, slots, lengths)
    assert relative_error(out_RNH, wanted) < TOLERANCE[dtype]
    # The counters are back at 0, so a second launch gives the same bits.
    assert not workspace.arrived.any()
    assert torch.equal(out_RNH, decode(world, q_RNH, slots, lengths, num_splits, SMALL, workspace))


@pytest.mark.parametrize("head_dim", [256, 96])
@pytest.mark.parametrize("window", [1, 33, 100, 1000])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_a_window_and_a_scale(num_splits, window, head_dim, dtype, device):
    lengths = [1, 33, 70, 257]
    world = make_paged_world(
        lengths, num_kv_heads=1, head_dim=head_dim, page_size=16, dtype=dtype, device=device
    )
    slots, scores = [2, 0, 1, 3, 4], {"window": window, "scale": 0.07}
    q_RNH = torch.randn(5, 4, head_dim).to(device, dtype)
    out_RNH = decode(world, q_RNH, slots, lengths, num_splits, SMALL, **scores)
    wanted = reference(world, q_RNH, slots, lengths, **scores)
    assert relative_error(out_RNH, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_splits", [2, 4])
def test_the_tiles_of_full_batches_split_long_rows_only(num_splits, dtype, device):
    lengths = [70, 200, 500]  # a split has 128 tokens at least
    world = make_paged_world(
        lengths, num_kv_heads=1, head_dim=64, page_size=16, dtype=dtype, device=device
    )
    slots = [0, 1, 2]
    q_RNH = torch.randn(3, 6, 64).to(device, dtype)
    workspace = make_workspace(q_RNH, world, num_splits)
    out_RNH = decode(world, q_RNH, slots, lengths, num_splits, workspace=workspace)
    wanted = reference(world, q_RNH, slots, lengths)
    assert relative_error(out_RNH, wanted) < TOLERANCE[dtype]
    used = workspace.log_weight.view(3, num_splits, 6).isfinite().all(2).sum(1)
    assert used.tolist() == [0, 2, num_splits]  # a row of one split goes straight out


def test_rows_that_share_pages(dtype, device):
    lengths = [40, 55, 90]
    world = make_paged_world(
        lengths,
        num_kv_heads=2,
        head_dim=64,
        page_size=16,
        dtype=dtype,
        device=device,
        shared_pages=2,
    )
    assert torch.equal(world.table_SP[0, :2], world.table_SP[2, :2])
    q_RNH = torch.randn(3, 8, 64).to(device, dtype)
    out_RNH = decode(world, q_RNH, [0, 1, 2], lengths, num_splits=1)
    wanted = reference(world, q_RNH, [0, 1, 2], lengths)
    assert relative_error(out_RNH, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize(("head_dim", "window"), [(128, None), (96, None), (128, 50)])
def test_with_one_split_a_row_is_the_same_bits_alone_in_a_batch_and_as_a_prefill_row(
    head_dim, window, dtype, device
):
    lengths = [131, 20, 77]
    world = make_paged_world(
        lengths, num_kv_heads=2, head_dim=head_dim, page_size=16, dtype=dtype, device=device
    )
    q_TNH = torch.randn(5, 12, head_dim).to(device, dtype)
    chunks, positions = [0, 2, 1, 0, 2], [130, 76, 19, 70, 3]

    def on_device(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    out_TNH = torch.full_like(q_TNH, float("nan"))
    rows_attention(
        q_TNH,
        world.keys,
        world.values,
        world.table_SP,
        on_device(chunks),
        on_device(positions),
        out_TNH,
        window=window,
    )
    for row, (chunk, position) in enumerate(zip(chunks, positions, strict=True)):
        as_of_then = list(lengths)
        as_of_then[chunk] = position + 1
        alone = decode(world, q_TNH[row : row + 1], [chunk], as_of_then, 1, window=window)
        assert torch.equal(alone[0], out_TNH[row])
    wanted = reference(world, q_TNH[:3], [0, 2, 1], lengths, window=window)
    assert relative_error(out_TNH[:3], wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 5, 50])
def test_rows_that_see_ahead_count_their_window_from_themselves(window, dtype, device):
    world = make_paged_world(
        [90, 40], num_kv_heads=1, head_dim=64, page_size=16, dtype=dtype, device=device
    )
    chunks, positions, last = [0, 0, 1], [70, 89, 3], [89, 89, 12]
    q_TNH = torch.randn(3, 2, 64).to(device, dtype)
    columns = torch.tensor([chunks, last, [b - a for a, b in zip(positions, last, strict=True)]])
    chunk_T, last_T, ahead_T = columns.to(device, torch.int32)
    out_TNH = torch.full_like(q_TNH, float("nan"))
    caches = (world.keys, world.values, world.table_SP)
    rows_attention(q_TNH, *caches, chunk_T, last_T, out_TNH, window=window, ahead_T=ahead_T)
    for row, q_NH in enumerate(q_TNH):
        reach = None if window is None else window + last[row] - positions[row]
        wanted = world.attend(q_NH, chunks[row], last[row] + 1, window=reach)
        assert relative_error(out_TNH[row], wanted) < TOLERANCE[dtype]


def test_rows_may_be_part_of_a_wider_tensor(dtype, device):
    lengths = [30, 50]
    world = make_paged_world(
        lengths, num_kv_heads=1, head_dim=64, page_size=16, dtype=dtype, device=device
    )
    wide = torch.randn(2, 6, 64).to(device, dtype)
    q_RNH = wide[:, :4]
    out_RNH = decode(world, q_RNH, [1, 0], lengths, num_splits=1)
    wanted = reference(world, q_RNH, [1, 0], lengths)
    assert relative_error(out_RNH, wanted) < TOLERANCE[dtype]


def test_the_tiles_of_measured_heads():
    found = [tiles_for(splits, 128, torch.bfloat16, HOPPER) for splits in (1, 8, 64)]
    assert found == [
        DecodeTiles(64, min_split=128, num_warps=4, num_stages=3),
        DecodeTiles(64, min_split=64, num_warps=4, num_stages=3),
        DecodeTiles(32, min_split=32, num_warps=4, num_stages=4),
    ]
    wide = tiles_for(1, 256, torch.bfloat16, HOPPER)
    assert wide == DecodeTiles(32, min_split=128, num_warps=4, num_stages=4)


def test_few_rows_take_many_splits_and_the_workspace_holds_every_batch(device):
    assert splits_for(1, 2, HOPPER) == MAX_SPLITS
    assert [splits_for(rows, 2, HOPPER) for rows in (8, 16, 64, 512, 1024)] == [8, 4, 2, 1, 1]
    workspace, of_device = Workspace.make(300, 12, 2, 64, device), device_of(device)
    for rows in (1, 7, 8, 100, 299, 300):
        num_splits = splits_for(rows, 2, of_device)
        assert rows * num_splits * 12 <= len(workspace.result) == len(workspace.log_weight)
    assert len(workspace.arrived) == 300 * 2


@pytest.mark.parametrize("num_processors", [20, 108, 132, 148])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8, 32])
def test_splits_give_every_processor_a_program_but_few_splits_two(num_kv_heads, num_processors):
    device = Device(num_processors, shared_bytes=164 * 1024, max_warps=64)
    for rows in (1, 2, 8, 24, 64, 512):
        num_splits = splits_for(rows, num_kv_heads, device)
        programs = rows * num_kv_heads * num_splits
        assert programs > 0.9 * num_processors or num_splits == MAX_SPLITS
        most = 2.9 if num_splits <= 4 else 1.9
        assert programs < most * num_processors or num_splits == 1


@pytest.mark.parametrize("kilobytes", [100, 164, 228])  # an RTX 4090, an A100, an H100
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        *((n, torch.bfloat16) for n in (8, 16, 32, 64, 80, 96, 112, 128, 192, 256, 512)),
        *((n, torch.float32) for n in (8, 16, 32, 64, 96, 128, 256)),
    ],
)
def test_a_programs_tiles_fit_into_shared_memory(head_dim, dtype, kilobytes):
    device = Device(num_processors=100, shared_bytes=kilobytes * 1024, max_warps=48)
    for num_splits in (1, 4, 16, 64):
        tiles = tiles_for(num_splits, head_dim, dtype, device)
        buffered = (tiles.num_stages - 1) * 2 * tiles.tile * padded(head_dim) * dtype.itemsize
        assert buffered + 16 * padded(head_dim) * dtype.itemsize + 8192 <= device.program_bytes
        assert 16 <= tiles.tile <= 128
    assert len({tiles_for(splits, head_dim, dtype, device).tile for splits in (1, 2, 4)}) == 1
