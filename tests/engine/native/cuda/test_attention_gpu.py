"""Both attention kernels in bfloat16 at the sizes they are made for, and inside CUDA graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged_world import make_paged_world, relative_error

from areal.engine.native.cuda import shared_prompts
from areal.engine.native.cuda.decode_attention import (
    Workspace,
    decode_attention,
    rows_attention,
    splits_for,
)
from areal.engine.native.cuda.device import device_of
from areal.engine.native.cuda.prefill_attention import prefill_attention
from areal.engine.native.cuda.prompt_attention import prompt_attention
from areal.engine.native.cuda.shared_prompts import (
    Heads,
    PromptSpace,
    SharedPrompts,
    share_prompts,
)

pytestmark = pytest.mark.gpu

# N, K, H, page size
SHAPES = [(12, 2, 128, 16), (28, 4, 128, 16), (14, 2, 64, 64), (8, 4, 256, 16)]
TOLERANCE = 1e-2  # weights are rounded to bfloat16 before they meet the values


def make_world(lengths, num_kv_heads, head_dim, page_size, device):
    return make_paged_world(
        lengths,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=torch.bfloat16,
        device=device,
    )


def draw_lengths(count, longest):
    return torch.randint(1, longest + 1, (count,)).tolist()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("num_rows", "longest"), [(1, 1), (1, 3000), (17, 2000), (300, 1500)])
@pytest.mark.parametrize("one_split", [True, False])
def test_decode(shape, num_rows, longest, one_split, device):
    num_heads, num_kv_heads, head_dim, page_size = shape
    lengths = [*draw_lengths(num_rows - 1, longest), longest]
    world = make_world(lengths, num_kv_heads, head_dim, page_size, device)
    slot_R = torch.arange(num_rows, dtype=torch.int32, device=device)
    num_tokens_S = torch.tensor([*lengths, 1], dtype=torch.int32, device=device)
    q_RNH = torch.randn(num_rows, num_heads, head_dim, dtype=torch.bfloat16, device=device)
    num_splits = 1 if one_split else splits_for(num_rows, num_kv_heads, device_of(device))
    workspace = Workspace.make(num_rows, num_heads, num_kv_heads, head_dim, device)

    def run():
        out_RNH = torch.full_like(q_RNH, float("nan"))
        caches = (world.keys, world.values, world.table_SP)
        decode_attention(q_RNH, *caches, slot_R, num_tokens_S, out_RNH, workspace, num_splits)
        return out_RNH

    out_RNH = run()
    wanted = [world.attend(q_RNH[row], row, lengths[row]) for row in range(num_rows)]
    assert relative_error(out_RNH, torch.stack(wanted)) < TOLERANCE
    # Whichever split arrives last, the bits are the same.
    assert all(torch.equal(run(), out_RNH) for _ in range(50))
    assert not workspace.arrived.any()


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill(shape, device):
    num_heads, num_kv_heads, head_dim, page_size = shape
    chunks = [(0, 700), (0, 1), (333, 250), (1000, 17), (64, 64), (1999, 1)]
    lengths = [position + rows for position, rows in chunks]
    world = make_world(lengths, num_kv_heads, head_dim, page_size, device)
    starts = torch.tensor([0, *(rows for _, rows in chunks)], device=device).cumsum(0).int()
    positions = torch.tensor([position for position, _ in chunks], device=device).int()
    q_TNH = torch.randn(int(starts[-1]), num_heads, head_dim, dtype=torch.bfloat16, device=device)
    out_TNH = torch.full_like(q_TNH, float("nan"))
    caches = (world.keys, world.values, world.table_SP)
    prefill_attention(q_TNH, *caches, starts, positions, out_TNH, max_rows=700)
    seen = [(c, p + row + 1) for c, (p, rows) in enumerate(chunks) for row in range(rows)]
    wanted = [world.attend(q_NH, *place) for q_NH, place in zip(q_TNH, seen, strict=True)]
    assert relative_error(out_TNH, torch.stack(wanted)) < TOLERANCE


@pytest.mark.parametrize("shape", SHAPES)
def test_a_decoded_row_is_the_prefilled_row_bit_for_bit(shape, device):
    num_heads, num_kv_heads, head_dim, page_size = shape
    lengths = draw_lengths(40, 900)
    world = make_world(lengths, num_kv_heads, head_dim, page_size, device)
    caches = (world.keys, world.values, world.table_SP)
    position_T = torch.arange(lengths[0], dtype=torch.int32, device=device)
    q_TNH = torch.randn(lengths[0], num_heads, head_dim, dtype=torch.bfloat16, device=device)
    prefilled = torch.full_like(q_TNH, float("nan"))
    rows_attention(q_TNH, *caches, torch.zeros_like(position_T), position_T, prefilled)
    for position in {0, lengths[0] // 2, lengths[0] - 1}:
        now = torch.tensor([position + 1, *lengths[1:], 1], dtype=torch.int32, device=device)
        slot_R = torch.arange(40, dtype=torch.int32, device=device)
        q_RNH = torch.randn(40, num_heads, head_dim, dtype=torch.bfloat16, device=device)
        q_RNH[0] = q_TNH[position]
        decoded = torch.full_like(q_RNH, float("nan"))
        decode_attention(q_RNH, *caches, slot_R, now, decoded, None, 1)
        assert torch.equal(decoded[0], prefilled[position])


def test_a_captured_launch_follows_lengths_and_slots(device):
    lengths = draw_lengths(20, 800)
    world = make_world(lengths, 2, 128, 16, device)
    slot_R = torch.arange(8, dtype=torch.int32, device=device)
    num_tokens_S = torch.ones(21, dtype=torch.int32, device=device)
    q_RNH = torch.randn(8, 12, 128, dtype=torch.bfloat16, device=device)
    out_RNH = torch.empty_like(q_RNH)
    workspace = Workspace.make(8, 12, 2, 128, device)

    def run():
        caches = (world.keys, world.values, world.table_SP)
        decode_attention(
            q_RNH,
            *caches,
            slot_R,
            num_tokens_S,
            out_RNH,
            workspace,
            splits_for(8, 2, device_of(device)),
        )

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    num_tokens_S[:20] = torch.tensor(lengths, device=device).int()
    slots = [19, 3, 20, 7, 7, 0, 12, 20]
    slot_R.copy_(torch.tensor(slots))
    graph.replay()
    wanted = [world.attend(q_RNH[row], slot, [*lengths, 1][slot]) for row, slot in enumerate(slots)]
    assert relative_error(out_RNH, torch.stack(wanted)) < TOLERANCE


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("num_prompts", "samples"), [(1, 100), (12, 16), (40, 5), (60, 2)])
def test_a_captured_launch_follows_who_shares_a_prompt(
    shape, num_prompts, samples, device, monkeypatch
):
    """Groups of random sizes: each row alone, then they share the prompt, then a part of it."""
    monkeypatch.setattr(shared_prompts, "MIN_SAVED_BYTES", 1)
    num_heads, num_kv_heads, head_dim, page_size = shape
    num_rows, prompt = num_prompts * samples, 2 * 960
    lengths = [prompt + n for n in draw_lengths(num_rows, 700)]
    world = make_world(lengths, num_kv_heads, head_dim, page_size, device)
    leader = torch.randint(num_prompts, (num_rows,))
    table_SP = world.table_SP
    table_SP[:num_rows, : prompt // page_size] = table_SP[leader, : prompt // page_size]
    heads = Heads(num_heads, num_kv_heads, head_dim, torch.bfloat16)
    shared = SharedPrompts.make(num_rows, PromptSpace.make(num_rows, heads, device))
    workspace = Workspace.make(num_rows, num_heads, num_kv_heads, head_dim, device)
    slot_R = torch.randperm(num_rows, device=device).int()
    num_tokens_S = torch.tensor([*lengths, 1], dtype=torch.int32, device=device)
    q_RNH = torch.randn(num_rows, num_heads, head_dim, dtype=torch.bfloat16, device=device)
    out_RNH = torch.empty_like(q_RNH)

    def run():
        caches = (world.keys, world.values, table_SP, slot_R)
        prompt_attention(q_RNH, *caches, shared)
        num_splits = splits_for(num_rows, num_kv_heads, device_of(device))
        decode_attention(q_RNH, *caches, num_tokens_S, out_RNH, workspace, num_splits, shared)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    wanted = [world.attend(q_RNH[r], slot, lengths[slot]) for r, slot in enumerate(slot_R.tolist())]
    first_page = table_SP[slot_R.long(), 0].cpu().numpy()
    has_bundles = np.unique(first_page, return_counts=True)[1].max() >= 4
    for tokens in (0, prompt, 640):
        flat = share_prompts(first_page, np.full(num_rows, tokens), num_rows, shared.space)
        assert (flat is not None) == bool(tokens and has_bundles)
        if flat is not None:
            shared.flat.copy_(torch.from_numpy(flat))
        out_RNH.fill_(float("nan"))
        graph.replay()
        assert relative_error(out_RNH, torch.stack(wanted)) < TOLERANCE
