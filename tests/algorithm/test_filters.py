"""The dynamic filter of DAPO."""

from __future__ import annotations

import pytest
import torch

from areal.algorithm.filters import keep_mixed_groups


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [([1.0, 0.0, 1.0], True), ([1.0, 1.0], False), ([0.0, 0.0], False), ([0.5], False)]
    + [([0.1, 0.1, 0.1], False), ([-1.0, 2.0], True)]
    + [([0.1, 0.1 + 7e-9], False), ([1.0, 1.0001], True)],  # what rounding can make, and cannot
)
def test_a_group_is_kept_iff_its_rewards_differ(rewards: list[float], kept: bool):
    assert keep_mixed_groups({"rewards": torch.tensor(rewards)}) is kept
