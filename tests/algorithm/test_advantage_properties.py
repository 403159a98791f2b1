"""What holds of normalisation and advantages for any batch: padding and order change nothing."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.algorithm.advantage import gae, gae_by_turn
from areal.algorithm.normalization import normalize

SEEDS = st.integers(0, 2**31)
few = settings(max_examples=40)
GROUPS = st.lists(st.integers(1, 4), min_size=1, max_size=4)
LEVELS = st.sampled_from(["batch", "group", None])


def batch(rows: int, width: int, seed: int) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, width, generator=gen, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=gen) < 0.7
    turns = torch.randint(0, 2, (rows, width), generator=gen).cumsum(1)
    return {"rewards": rewards, "values": values, "mask": mask, "turns": turns}


def pad(x: torch.Tensor, extra: int, junk: float) -> torch.Tensor:
    return torch.cat([x, x.new_full((len(x), extra), junk)], dim=1)


@few
@given(GROUPS, LEVELS, LEVELS, st.booleans(), SEEDS, st.integers(1, 4))
def test_padding_does_not_change_normalisation(groups, mean, std, leave1out, seed, extra):
    x = batch(sum(groups), 3, seed)
    options = dict(group_sizes=groups, mean_level=mean, std_level=std, mean_leave1out=leave1out)
    plain = normalize(x["values"], x["mask"], **options)
    if not x["mask"].any():
        return
    wider = normalize(pad(x["values"], extra, 9.0), pad(x["mask"], extra, False), **options)
    torch.testing.assert_close(wider, pad(plain, extra, 0.0), rtol=1e-9, atol=1e-12)


@few
@given(GROUPS, LEVELS, LEVELS, st.booleans(), SEEDS)
def test_the_order_of_groups_and_of_their_samples_does_not_matter(
    groups, mean, std, leave1out, seed
):
    gen = torch.Generator().manual_seed(seed)
    rewards = torch.randn(sum(groups), generator=gen, dtype=torch.float64)
    rows = torch.arange(sum(groups)).split(groups)
    order = torch.randperm(len(groups), generator=gen).tolist()
    turned = torch.cat([rows[g][torch.randperm(groups[g], generator=gen)] for g in order])
    options = dict(mean_level=mean, std_level=std, mean_leave1out=leave1out)
    plain = normalize(rewards, group_sizes=groups, **options)
    other = normalize(rewards[turned], group_sizes=[groups[g] for g in order], **options)
    torch.testing.assert_close(other, plain[turned], rtol=1e-9, atol=1e-12)


@few
@given(st.integers(1, 4), st.integers(1, 7), SEEDS, st.integers(1, 4))
def test_padding_does_not_change_advantages(rows: int, width: int, seed: int, extra: int):
    x = batch(rows, width, seed)
    options = dict(discount=0.9, gae_lambda=0.8)
    args = x["rewards"], x["values"], x["mask"]
    wide = pad(x["rewards"], extra, 0.0), pad(x["values"], extra, 9.0), pad(x["mask"], extra, False)
    for plain, wider in (
        (gae(*args, **options), gae(*wide, **options)),
        (
            gae_by_turn(*args, x["turns"], **options),
            gae_by_turn(*wide, pad(x["turns"], extra, -1), **options),
        ),
    ):
        for one, other in zip(plain, wider, strict=True):
            torch.testing.assert_close(other, pad(one, extra, 0.0))
