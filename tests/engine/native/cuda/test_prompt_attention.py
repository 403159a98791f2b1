"""Prompts that rows read together: which rows do, and what comes out against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_world import make_paged_world, relative_error

from areal.engine.native.cuda import prompt_attention as prompts
from areal.engine.native.cuda.decode_attention import Workspace, decode_attention
from areal.engine.native.cuda.prompt_attention import Heads, PromptSpace, SharedPrompts

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SMALL = Heads(12, 2, 128, torch.bfloat16)  # 1 KiB a token, 21 rows in a bundle
MANY_HEADS = Heads(16, 1, 64, torch.bfloat16)  # 8 rows in a bundle: the fewest


def plan(first_page, prompt, num_rows=None, heads=SMALL):
    """`SharedPrompts` as the host fills it, or None."""
    num_rows = len(first_page) if num_rows is None else num_rows
    space = PromptSpace.make(num_rows, heads, torch.device("cpu"))
    flat = prompts.share_prompts(np.array(first_page), np.array(prompt), num_rows, space)
    if flat is None:
        return None
    shared = SharedPrompts.make(num_rows, space)
    shared.flat.copy_(torch.from_numpy(flat))
    return shared


def bundles_of(shared):
    """The rows of each bundle."""
    count = int(shared.counts[0])
    return [
        shared.member_R[first : first + size].tolist()
        for first, size in shared.bundle_B2[:count].tolist()
    ]


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(prompts, "MIN_SAVED_BYTES", 1)


def test_rows_of_a_prompt_form_a_bundle_wherever_they_stand(always):
    first_page = [7, 3, 7, 9, 3, 7, 3, 7, 3, 9]
    prompt = [130, 64, 130, 500, 64, 130, 64, 130, 64, 500]
    shared = plan(first_page, prompt, num_rows=12)
    assert bundles_of(shared) == [[1, 4, 6, 8], [0, 2, 5, 7]]
    # 130 tokens are two tiles of 64; page 9 has two rows only, and 10 and 11 are padding.
    assert shared.shared_R.tolist() == [128, 64, 128, 0, 64, 128, 64, 128, 64, 0, 0, 0]


def test_a_large_group_is_cut_evenly(always):
    assert [len(rows) for rows in bundles_of(plan([5] * 45, [64] * 45))] == [15, 15, 15]
    assert [len(rows) for rows in bundles_of(plan([5] * 22, [64] * 22))] == [11, 11]
    assert [len(rows) for rows in bundles_of(plan([5] * 21, [64] * 21))] == [21]


def test_it_must_pay():
    # Of 16 rows 15 save 2048 tokens of 1 KiB: 30 MiB a group; 256 are wanted.
    assert plan(np.repeat(np.arange(8), 16), [2048] * 128) is None
    assert plan(np.repeat(np.arange(9), 16), [2048] * 144) is not None
    assert plan(np.arange(512), [2048] * 512) is None


def test_few_prompts_are_cut_into_parts_and_many_are_not():
    def parts(num_prompts, samples):
        pages = np.repeat(np.arange(num_prompts), samples)
        return plan(pages, [65536] * len(pages)).counts.tolist()

    assert parts(32, 16) == [32, 2]
    assert parts(1, 16) == [1, 16]
    assert parts(256, 4) == [256, 1]  # more than fill the device
    # Of 700 rows 16 share: the space has room for one part of every row.
    assert plan([5] * 16 + list(range(10, 694)), [65536] * 700).counts.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("heads", "can_share"),
    [
        (SMALL, True),
        (Heads(28, 4, 128, torch.bfloat16), True),
        (MANY_HEADS, True),
        (Heads(17, 1, 64, torch.bfloat16), False),  # 7 rows would be cut into 3 and 4
        (Heads(8, 1, 64, torch.float32), True),
        (Heads(9, 1, 64, torch.float32), False),
    ],
)
def test_which_heads_can_share(heads, can_share):
    assert heads.can_share is can_share


@settings(max_examples=200, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 300)), min_size=1, max_size=12),
    padding=st.integers(0, 20),
    heads=st.sampled_from(
        [SMALL, Heads(16, 1, 64, torch.bfloat16), Heads(8, 1, 64, torch.float32)]
    ),
    seed=st.integers(0, 1000),
)
def test_every_plan_is_sound(groups, padding, heads, seed):
    page = np.repeat(np.arange(len(groups)), [size for size, _ in groups])
    prompt = np.array([tokens for _, tokens in groups])[page]
    order = np.random.default_rng(seed).permutation(len(page))
    page, prompt = page[order], prompt[order]
    num_rows = len(page) + padding
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "MIN_SAVED_BYTES", 1)
        shared = plan(page, prompt, num_rows, heads)
    large = [size for size, prompt in groups if size >= 4 and prompt >= 64]
    if shared is None:
        assert not large
        return
    bundles = bundles_of(shared)
    members = [row for rows in bundles for row in rows]
    assert len(members) == len(set(members))
    tokens = shared.shared_R.numpy()
    assert set(np.flatnonzero(tokens)) == set(members)
    for rows in bundles:
        assert 4 <= len(rows) <= heads.rows_of_bundle
        assert len({page[row] for row in rows}) == 1
        assert all(tokens[row] == prompt[row] // 64 * 64 for row in rows)
    assert len(members) == sum(large)
    count, parts = shared.counts.tolist()
    assert count * parts <= max(heads.most_items, num_rows // 4)
    assert num_rows * parts <= shared.space.num_pairs


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group", "page_size", "num_splits"),
    [(64, 2, 1, 16, 1), (128, 1, 4, 64, 2), (128, 2, 6, 16, 1), (64, 1, 7, 64, 8)],
)
def test_equals_dense_attention(
    always, monkeypatch, head_dim, num_kv_heads, group, page_size, num_splits, dtype, device
):
    """Two prompts, of 128 and 192 shared tokens; rows that share nothing; padding."""
    monkeypatch.setattr(prompts, "_PROGRAMS", 4 * num_kv_heads)
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
        prompts.prompt_attention(q_RNH, *caches, shared)
        decode_attention(q_RNH, *caches, num_tokens_S, out_RNH, workspace, num_splits, shared)
        return out_RNH

    rows = zip(q_RNH, slots, [*lengths, 1], strict=True)
    wanted = torch.stack([world.attend(q_NH, slot, length) for q_NH, slot, length in rows])
    assert relative_error(attend(), wanted) < TOLERANCE[dtype]  # nobody shares
    assert space.acc.isnan().all()
    first_page = world.table_SP[:12, 0].cpu().numpy()
    flat = prompts.share_prompts(first_page, np.array(num_shared), 13, space)
    shared.flat.copy_(torch.from_numpy(flat))
    assert shared.counts.tolist() == [2, 2]
    out_RNH = attend()
    assert relative_error(out_RNH, wanted) < TOLERANCE[dtype]
    assert torch.equal(attend(), out_RNH)
    assert not space.acc.isnan().all()
