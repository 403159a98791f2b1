"""Attention to prompts that rows read together, and what rows make of it, against float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from paged_world import make_paged_world, relative_error

from areal.engine.native.cuda import shared_prompts
from areal.engine.native.cuda.decode_attention import Workspace, decode_attention
from areal.engine.native.cuda.device import HOPPER
from areal.engine.native.cuda.prompt_attention import prompt_attention
from areal.engine.native.cuda.shared_prompts import (
    Heads,
    PromptSpace,
    SharedPrompts,
    share_prompts,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group", "page_size", "num_splits"),
    [
        *[(64, 2, 1, 16, 1), (128, 1, 4, 64, 2), (128, 2, 6, 16, 1), (64, 1, 7, 64, 8)],
        *[(96, 1, 4, 16, 2), (80, 2, 1, 16, 1), (256, 1, 4, 16, 1)],
    ],
)
def test_equals_dense_attention(
    monkeypatch, head_dim, num_kv_heads, group, page_size, num_splits, dtype, device
):
    """Two prompts, of 128 and 192 shared tokens; rows that share nothing; padding."""
    monkeypatch.setattr(shared_prompts, "MIN_SAVED_BYTES", 1)
    small = replace(HOPPER, num_processors=4 * num_kv_heads)
    monkeypatch.setattr(shared_prompts, "device_of", lambda device: small)
    lengths = [129, 200, 193, 260, 140, 210, 128 + 128, 193, 195, 300, 7, 70]
    leaders = [0, 1, 0, 1, 0, 1, 0, 1, 1, 9, 10, 11]
    num_shared = [128 if leader == 0 else 192 if leader == 1 else 0 for leader in leaders]
    world = make_paged_world(
        lengths,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        dtype=dtype,
        device=device,
    )
    for row, leader in enumerate(leaders):
        pages = num_shared[row] // page_size
        world.table_SP[row, :pages] = world.table_SP[leader, :pages]
    heads = Heads(num_kv_heads * group, num_kv_heads, head_dim, dtype)
    slots = [*range(12), 12]  # the scratch slot pads
    q_RNH = torch.randn(13, heads.num_heads, head_dim).to(device, dtype)
    slot_R = torch.tensor(slots, dtype=torch.int32, device=device)
    num_tokens_S = torch.tensor([*lengths, 1], dtype=torch.int32, device=device)
    space = PromptSpace.make(13, heads, device)
    for part in (space.acc, space.score_max, space.weight_sum):
        part.fill_(float("nan"))
    shared = SharedPrompts.make(13, space)
    caches = (world.keys, world.values, world.table_SP, slot_R)
    workspace = Workspace.make(13, heads.num_heads, num_kv_heads, head_dim, device, num_splits)

    def attend():
        out_RNH = torch.full_like(q_RNH, float("nan"))
        prompt_attention(q_RNH, *caches, shared, scale=0.1)
        decode_attention(
            q_RNH, *caches, num_tokens_S, out_RNH, workspace, num_splits, shared, scale=0.1
        )
        return out_RNH

    rows = zip(q_RNH, slots, [*lengths, 1], strict=True)
    wanted = torch.stack([world.attend(*row, scale=0.1) for row in rows])
    assert relative_error(attend(), wanted) < TOLERANCE[dtype]  # nobody shares
    assert space.acc.isnan().all()
    first_page = world.table_SP[:12, 0].cpu().numpy()
    flat = share_prompts(first_page, np.array(num_shared), 13, space)
    shared.flat.copy_(torch.from_numpy(flat))
    assert shared.counts.tolist() == [2, 2]
    out_RNH = attend()
    assert relative_error(out_RNH, wanted) < TOLERANCE[dtype]
    assert torch.equal(attend(), out_RNH)
    assert not space.acc.isnan().all()
