"""Normalisation against numbers worked out by hand and against torch's own statistics."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.algorithm.normalization import normalize


def close(a: torch.Tensor, b: list[float] | torch.Tensor) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b, dtype=a.dtype), rtol=1e-5, atol=1e-6)


def test_group_mean_and_std_use_the_real_group_sizes():
    rewards = torch.tensor([1.0, 0.0, 0.0, 4.0, 2.0])
    out = normalize(rewards, group_sizes=[3, 2], mean_level="group", std_level="group", eps=0.0)
    std3 = (((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2) ** 0.5
    std2 = 2**0.5
    close(out, [2 / 3 / std3, -1 / 3 / std3, -1 / 3 / std3, 1 / std2, -1 / std2])


def test_group_of_equal_rewards_gives_exact_zero():
    rewards = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0])
    out = normalize(rewards, group_sizes=[3, 2], mean_level="group", std_level="group")
    assert out[:3].tolist() == [0.0, 0.0, 0.0]


def test_without_std_the_divisor_is_one_and_eps_plays_no_part():
    out = normalize(
        torch.tensor([3.0, 1.0]), group_sizes=[2], mean_level="group", std_level=None, eps=9.0
    )
    assert out.tolist() == [1.0, -1.0]


def test_leave_one_out_by_hand():
    options = dict(mean_level="group", std_level=None, mean_leave1out=True)
    out = normalize(torch.tensor([1.0, 0.0, 0.5, 7.0]), group_sizes=[3, 1], **options)
    close(out, [1 - 0.25, 0 - 0.75, 0.5 - 0.5, 0.0])  # a lone sample is its own baseline


def test_leave_one_out_of_a_batch_of_one_has_no_baseline():
    out = normalize(
        torch.tensor([7.0]),
        group_sizes=[1],
        mean_level="batch",
        std_level=None,
        mean_leave1out=True,
    )
    assert out.tolist() == [7.0]


def test_mean_of_the_group_with_std_of_the_batch():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0])
    out = normalize(rewards, group_sizes=[2, 2], mean_level="group", std_level="batch", eps=0.0)
    close(out, torch.tensor([0.5, -0.5, 0.0, 0.0]) / rewards.std())


def test_std_of_one_element():
    options = dict(group_sizes=[1], mean_level=None, std_level="batch", eps=0.0)
    assert normalize(torch.tensor([3.0]), **options).tolist() == [3.0]
    biased = normalize(
        torch.tensor([3.0, 5.0]), std_unbiased=False, **options | {"group_sizes": [2]}
    )
    close(biased, [3.0, 5.0])  # the biased std of (3, 5) is 1


@given(st.integers(0, 2**31), st.booleans())
@settings(max_examples=30)
def test_masked_batch_statistics_equal_those_of_the_selected_elements(seed: int, unbiased: bool):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 7, generator=gen)
    mask = torch.rand(4, 7, generator=gen) < 0.6
    mask[0, :2] = True
    out = normalize(
        x, mask, group_sizes=[4], mean_level="batch", std_level="batch", std_unbiased=unbiased
    )
    chosen = x[mask].double()
    expected = (chosen - chosen.mean()) / (chosen.std(unbiased=unbiased) + 1e-5)
    close(out[mask], expected.float())
    assert (out[~mask] == 0).all()


def test_all_masked_comes_back_unchanged():
    x = torch.randn(2, 3)
    out = normalize(x, torch.zeros(2, 3), group_sizes=[2], mean_level="batch", std_level="batch")
    assert torch.equal(out, x)


def test_refusals():
    with pytest.raises(ValueError, match="add up to 3"):
        normalize(torch.zeros(4), group_sizes=[3], mean_level="group", std_level=None)
    with pytest.raises(ValueError, match="'prompt'"):
        normalize(torch.zeros(4), group_sizes=[4], mean_level="prompt", std_level=None)
