"""What holds for every combination of levels: nothing explodes, and episodes count once."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from areal.algorithm.normalization import MIN_SPREAD, are_equal, episode_means, normalize

LEVELS = ("batch", "group", None)
COMBINATIONS = [
    dict(mean_level=mean, std_level=std, mean_leave1out=leave, std_unbiased=unbiased)
    for mean, std, leave, unbiased in itertools.product(
        LEVELS, LEVELS, (False, True), (False, True)
    )
    if mean is not None or not leave
]
combinations = st.sampled_from(COMBINATIONS)


@st.composite
def groups(draw, scales=(1e-30, 1e-6, 1.0, 1e6, 1e30)) -> tuple[list[int], list[float]]:
    """Group sizes and a reward for each row; many are equal, whole groups and within rounding."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    scale = draw(st.sampled_from(scales))
    values = st.sampled_from([0.0, 0.1, 0.1 + 7e-9, 1.0, 1.0001, -2.5, 7.0])
    rewards: list[float] = []
    for size in sizes:
        if draw(st.booleans()):
            rewards += [draw(values)] * size
        else:
            rewards += draw(st.lists(values, min_size=size, max_size=size))
    return sizes, [reward * scale for reward in rewards]


@given(groups(), combinations, st.sampled_from([0.0, 1e-5]))
def test_no_result_exceeds_what_the_inputs_justify(batch, levels, eps):
    sizes, rewards = batch
    x = torch.tensor(rewards)
    out = normalize(x, group_sizes=sizes, **levels, eps=eps)
    assert out.isfinite().all()
    largest = x.abs().max().item()
    if levels["std_level"] is None:
        bound = 2 * largest
    elif levels["mean_level"] is None:  # nothing was centred: 1/100 of spread, or as it was
        bound = max(math.sqrt(len(x)) / MIN_SPREAD, largest)
    else:
        bound = 2 * math.sqrt(len(x)) / MIN_SPREAD
        if levels["mean_leave1out"] and len(x) == 1:
            bound = max(bound, largest)  # one sample in all has no baseline
    assert out.abs().max().item() <= bound * (1 + 1e-5)


@given(groups(), combinations)
def test_equal_rewards_of_a_slice_are_centred_to_exactly_0(batch, levels):
    sizes, rewards = batch
    x = torch.tensor(rewards)
    out = normalize(x, group_sizes=sizes, **levels).split(sizes)
    if levels["mean_level"] == "group":
        for part, result in zip(x.split(sizes), out, strict=True):
            if are_equal(part):
                assert result.tolist() == [0.0] * len(part)
    if levels["mean_level"] == "batch" and are_equal(x) and len(x) > 1:
        assert torch.cat(out).tolist() == [0.0] * len(x)


@given(groups(scales=(1.0,)), combinations, st.integers(-40, 40))
def test_the_unit_of_a_reward_does_not_matter(batch, levels, exponent):
    """Powers of two scale exactly. eps has a unit, so it is left out."""
    assume(levels["std_level"] is not None and levels["mean_level"] is not None)
    sizes, rewards = batch
    x = torch.tensor(rewards)
    assume(levels["mean_level"] == "group" or len(x) > 1)
    out = [normalize(y, group_sizes=sizes, **levels, eps=0.0) for y in (x, x * 2.0**exponent)]
    torch.testing.assert_close(*out, rtol=1e-5, atol=1e-6)


@given(groups(), combinations, st.data())
def test_an_episode_counts_once_however_many_rows_it_has(batch, levels, data):
    sizes, rewards = batch
    x = torch.tensor(rewards)
    expected = normalize(x, group_sizes=sizes, **levels)
    copies = torch.tensor(
        data.draw(st.lists(st.integers(1, 5), min_size=len(x), max_size=len(x)), label="rows")
    )
    ids = torch.arange(len(x)).repeat_interleave(copies)
    rows_of_group = [int(part.sum()) for part in copies.split(sizes)]
    out = normalize(
        x.repeat_interleave(copies), group_sizes=rows_of_group, episode_ids=ids, **levels
    )
    torch.testing.assert_close(out, expected.repeat_interleave(copies), rtol=1e-5, atol=1e-6)


@given(groups(), combinations, st.randoms(use_true_random=False))
def test_masks_and_tokens(batch, levels, draw):
    """A token under the mask is an element; what lies off it has no say, whatever it is."""
    sizes, rewards = batch
    mask = torch.tensor([[draw.random() < 0.7 for _ in range(3)] for _ in rewards])
    x = torch.tensor(rewards)[:, None].expand(-1, 3).clone()
    wild = x.masked_fill(~mask, float("nan"))
    outs = [normalize(y, mask, group_sizes=sizes, **levels) for y in (x, wild)]
    if not mask.any():
        return
    assert torch.equal(*outs) and (outs[0][~mask] == 0).all() and outs[0].isfinite().all()


def by_episode(rows: list[list[float]], levels: dict, eps: float) -> list[list[float]]:
    """The definition for one group in plain Python; `rows` are the rewards of each episode."""
    means = [sum(rewards) / len(rewards) for rewards in rows]
    count, mean = len(rows), sum(means) / len(rows)
    squares = sum(sum((r - mean) ** 2 for r in rewards) / len(rewards) for rewards in rows)
    std = math.sqrt(squares / (count - 1 if levels["std_unbiased"] else count))
    out = []
    for place, rewards in enumerate(rows):
        others = [m for i, m in enumerate(means) if i != place]
        baseline = sum(others) / len(others) if levels["mean_leave1out"] else mean
        baseline = 0.0 if levels["mean_level"] is None else baseline
        divisor = 1.0 if levels["std_level"] is None else std + eps
        out.append([(reward - baseline) / divisor for reward in rewards])
    return out


@pytest.mark.parametrize("levels", COMBINATIONS)
def test_rows_of_different_rewards_by_definition(levels):
    """A batch of one group, so both levels are the same slice."""
    rows = [[1.0, 0.5, 0.25], [0.0], [0.0, 1.0]]
    x = torch.tensor([r for rewards in rows for r in rewards])
    ids = torch.tensor([4, 4, 4, 0, 9, 9])
    out = normalize(x, group_sizes=[6], episode_ids=ids, eps=1e-3, **levels)
    expected = [r for rewards in by_episode(rows, levels, 1e-3) for r in rewards]
    assert out.tolist() == pytest.approx(expected, rel=1e-5)


def test_the_same_episode_id_in_two_groups_is_two_episodes():
    x = torch.tensor([1.0, 1.0, 0.0, 3.0])
    options = dict(mean_level="batch", std_level=None, group_sizes=[2, 2])
    ids = torch.tensor([0, 0, 0, 1])
    mean = (1 + 0 + 3) / 3
    out = normalize(x, episode_ids=ids, **options)
    assert out.tolist() == pytest.approx([1 - mean, 1 - mean, 0 - mean, 3 - mean])


@pytest.mark.parametrize(
    "levels, expected",
    [  # rewards 1, 1 | 0, 1: the batch has mean 0.75 and std 0.5, the second group std sqrt(1/2)
        (dict(mean_level="batch", std_level="group"), [0.5, 0.5, -0.75 * 2**0.5, 0.25 * 2**0.5]),
        (dict(mean_level=None, std_level="group"), [2.0, 2.0, 0.0, 2**0.5]),
        (dict(mean_level="group", std_level="group"), [0.0, 0.0, -(0.5**0.5), 0.5**0.5]),
    ],
)
def test_a_group_of_equal_rewards_by_hand(levels, expected):
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0])
    out = normalize(rewards, group_sizes=[2, 2], eps=0.0, **levels)
    assert out.tolist() == pytest.approx(expected, rel=1e-6)


def test_where_the_batch_has_no_spread_either_nothing_divides():
    options = dict(mean_level=None, std_level="group", group_sizes=[2, 1])
    assert normalize(torch.full((3,), 7.0), **options).tolist() == [7.0, 7.0, 7.0]


@pytest.mark.parametrize("unbiased", [True, False])
def test_a_group_of_one_is_scaled_like_the_batch(unbiased):
    rewards = torch.tensor([3.0, 0.0, 1.0])
    out = normalize(
        rewards,
        group_sizes=[1, 2],
        mean_level="batch",
        std_level="group",
        std_unbiased=unbiased,
        eps=0.0,
    )
    assert out[0].item() == pytest.approx((3 - 4 / 3) / rewards.std(unbiased=unbiased).item())


def test_what_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        normalize(
            torch.tensor([1.0, float("nan")]), group_sizes=[2], mean_level="group", std_level=None
        )


def test_episode_ids_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one number for each of the 2 rows"):
        normalize(
            torch.zeros(2),
            group_sizes=[2],
            mean_level="group",
            std_level=None,
            episode_ids=torch.zeros(3),
        )


def test_means_of_episodes():
    rewards, ids = torch.tensor([1.0, 0.0, 5.0]), torch.tensor([2, 2, 0])
    assert episode_means(rewards, ids).tolist() == [5.0, 0.5]
    assert episode_means(rewards, None).tolist() == [1.0, 0.0, 5.0]
