"""Trajectories: what is refused, which versions wrote them, and their bytes."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from rollout_world import trajectory

from areal.rollout.trajectory import check_trajectory, decode, encode, mean_reward, version_span
from areal.utils.data import concat_padded_tensors


def test_span_and_reward():
    group = trajectory([3, 4, 5], reward=0.5)
    assert version_span(group) == (3, 5)
    assert mean_reward(group) == 0.5
    assert version_span(trajectory([])) is None
    del group["versions"], group["rewards"]
    assert version_span(group) is None
    assert mean_reward(group) is None


def test_padding_of_a_group_is_no_version():
    group = concat_padded_tensors([trajectory([7, 7, 8]), trajectory([7])])
    assert (group["versions"] == 0).any()  # the padding
    assert version_span(group) == (7, 8)


@pytest.mark.parametrize("extra", [{}, {"values": torch.randn(1, 3).to(torch.bfloat16)}])
def test_bytes_round_trip_and_are_safetensors(extra):
    group = trajectory([1, 2]) | extra | {"view": torch.arange(6).reshape(3, 2).T[:1]}
    back = decode(encode(group))
    assert list(back) == sorted(group)
    assert all(torch.equal(back[key], group[key]) for key in group)
    assert set(safetensors.torch.load(encode(group))) == set(group)


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (0.5, TypeError, "non-empty dict"),
        ({}, TypeError, "non-empty dict"),
        ({"input_ids": torch.zeros(1, 2)}, ValueError, "attention_mask"),
        (trajectory([1]) | {"rewards": 1.0}, TypeError, "rewards.*float"),
        (trajectory([1]) | {"rewards": torch.tensor(1.0)}, ValueError, "rewards"),
        (trajectory([1]) | {"rewards": torch.ones(2)}, ValueError, "rewards"),
        (trajectory([1]) | {"logprobs": torch.ones(1, 9)}, ValueError, "logprobs"),
        ({k: v[0] for k, v in trajectory([1]).items()}, ValueError, r"\[B, S\]"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(bad, error, words):
    with pytest.raises(error, match=words):
        check_trajectory(bad)
