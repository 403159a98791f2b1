"""Which rows read a prompt together: bundles, parts, and when it pays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.engine.native.cuda import shared_prompts
from areal.engine.native.cuda.device import HOPPER
from areal.engine.native.cuda.shared_prompts import (
    Heads,
    PromptSpace,
    SharedPrompts,
    share_prompts,
)

SMALL = Heads(12, 2, 128, torch.bfloat16)  # 1 KiB a token, 21 rows in a bundle
MANY_HEADS = Heads(16, 1, 64, torch.bfloat16)  # 8 rows in a bundle: the fewest


def plan(first_page, prompt, num_rows=None, heads=SMALL):
    """`SharedPrompts` as the host fills it, or None."""
    num_rows = len(first_page) if num_rows is None else num_rows
    space = PromptSpace.make(num_rows, heads, torch.device("cpu"))
    flat = share_prompts(np.array(first_page), np.array(prompt), num_rows, space)
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
    monkeypatch.setattr(shared_prompts, "MIN_SAVED_BYTES", 1)


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
    assert heads.can_share(HOPPER) is can_share


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
        patch.setattr(shared_prompts, "MIN_SAVED_BYTES", 1)
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
    assert count * parts <= max(shared.space.most_items, num_rows // 4)
    assert num_rows * parts <= shared.space.num_pairs
