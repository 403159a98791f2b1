"""Trajectories: what is refused, which versions wrote them, and their bytes."""

from __future__ import annotations

import logging

import pytest
import safetensors.torch
import torch
from rollout_world import trajectory

from areal.api.interaction import InteractionWithTokenLogpReward
from areal.api.io_struct import ModelResponse
from areal.rollout.trajectory import (
    as_tensors,
    check_trajectory_format,
    decode,
    encode,
    mean_reward,
    normalize_rewards,
    number_episodes,
    version_span,
)
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
        check_trajectory_format(bad)


def interaction(output: list[int], reward: float) -> InteractionWithTokenLogpReward:
    reply = ModelResponse([1, 2], output, [-0.5] * len(output), [3] * len(output), "stop")
    return InteractionWithTokenLogpReward(reply, reward=reward)


def test_what_is_no_single_trajectory_but_in_order():
    assert check_trajectory_format(None)
    assert check_trajectory_format({"a": interaction([5], 1.0)})
    assert check_trajectory_format(trajectory([1]), batch_size=1, expected_keys=["rewards"])
    with pytest.raises(TypeError, match="non-empty dict"):
        check_trajectory_format({})
    with pytest.raises(ValueError, match="needs"):
        check_trajectory_format({"a": interaction([5], 1.0), "b": torch.ones(1)})


def test_expected_keys_are_required():
    with pytest.raises(ValueError, match="needs .'values'."):
        check_trajectory_format(trajectory([1]), expected_keys=["rewards", "values"])


def test_other_shapes_are_warned_of_where_there_is_a_logger(caplog):
    odd = trajectory([1]) | {"rewards": torch.ones(2)}
    assert check_trajectory_format(odd, batch_size=3, logger=logging.getLogger("test"))
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "1 rows, expected 3" in caplog.text and "rewards" in caplog.text
    with pytest.raises(ValueError, match="1 rows, expected 3; .*rewards"):
        check_trajectory_format(odd, batch_size=3)


@pytest.mark.parametrize(
    ("images", "error"),
    [
        ([{}, {}], ValueError),
        ({"pixel_values": torch.ones(2)}, ValueError),
        ([{"pixel_values": [1.0]}], TypeError),
    ],
)
def test_images_are_one_dict_of_tensors_per_row(images, error):
    assert check_trajectory_format(trajectory([1]) | {"multi_modal_input": [{}]})
    with pytest.raises(error, match="multi_modal_input"):
        check_trajectory_format(trajectory([1]) | {"multi_modal_input": images})


@pytest.mark.parametrize("turn_ids", [[-1, 1, 0], [-1, -1, 0]])
def test_turns_count_up_on_generated_tokens(turn_ids):
    sample = trajectory([1, 1])
    assert check_trajectory_format(sample | {"turn_ids": torch.tensor([[-1, 0, 1]])})
    with pytest.raises(ValueError, match="turn_ids must be at least 0 on generated tokens"):
        check_trajectory_format(sample | {"turn_ids": torch.tensor([turn_ids])})


def test_images_come_back_from_their_bytes_row_by_row():
    images = [{}, {"pixel_values": torch.randn(2, 3), "image_grid_thw": torch.ones(1, 3).long()}]
    group = concat_padded_tensors([trajectory([1]), trajectory([2, 2])])
    back = decode(encode(group | {"multi_modal_input": images}))
    assert [sorted(row) for row in back["multi_modal_input"]] == [[], sorted(images[1])]
    assert torch.equal(back["multi_modal_input"][1]["pixel_values"], images[1]["pixel_values"])
    assert torch.equal(back["input_ids"], group["input_ids"])


def test_interactions_become_rows():
    tensors = as_tensors({"a": interaction([5], 0.5), "b": interaction([5, 6], 1.0)})
    assert tensors["input_ids"].tolist() == [[1, 2, 5, 0], [1, 2, 5, 6]]
    assert tensors["rewards"].tolist() == [0.5, 1.0]
    assert check_trajectory_format(tensors)
    assert as_tensors(None) is None


def test_normalised_rewards_by_hand():
    """Episodes worth 1, 2 and 3 (the second in three rows): mean 2, biased std sqrt(2/3)."""
    agent = as_tensors({name: interaction([5], 2.0) for name in "abc"})
    members = normalize_rewards([trajectory([1], 1.0), agent, trajectory([1], 3.0)])
    z = (3 / 2) ** 0.5
    assert members[0]["rewards"].tolist() == pytest.approx([-z])
    assert members[1]["rewards"].tolist() == pytest.approx([0.0] * 3)
    assert members[2]["rewards"].tolist() == pytest.approx([z])
    assert [m["original_rewards"].tolist() for m in members] == [[1.0], [2.0] * 3, [3.0]]
    assert agent["rewards"].tolist() == [2.0] * 3, "the workflow's own tensor is left alone"


def test_every_row_of_an_episode_is_normalised():
    """Rows 0 and 1 of one episode, 1 of another: means 0.5 and 1, squares 5/16 and 1/16."""
    agent = as_tensors({"a": interaction([5], 0.0), "b": interaction([5], 1.0)})
    members = normalize_rewards([agent, trajectory([1], 1.0)])
    std = ((5 / 16 + 1 / 16) / 2) ** 0.5
    assert members[0]["rewards"].tolist() == pytest.approx([-0.75 / std, 0.25 / std])
    assert members[1]["rewards"].tolist() == pytest.approx([0.25 / std])


def test_the_mean_reward_of_a_group_is_that_of_its_episodes():
    agent = as_tensors({name: interaction([5], 1.0) for name in "abc"})
    other = as_tensors({"a": interaction([5], 0.0)})
    group = concat_padded_tensors(number_episodes([agent, None, other]))
    assert group["episode_ids"].tolist() == [0, 0, 0, 2]
    assert mean_reward(group) == 0.5
    assert decode(encode(group))["episode_ids"].tolist() == [0, 0, 0, 2]


def test_normalised_rewards_of_equals_are_0_and_the_mean_is_told_of_the_raw_ones():
    members = normalize_rewards([trajectory([1], 0.25), trajectory([1], 0.25)])
    group = concat_padded_tensors(members)
    assert group["rewards"].tolist() == [0.0, 0.0]
    assert mean_reward(group) == 0.25
    with pytest.raises(ValueError, match="reward_normalization needs 'rewards'"):
        normalize_rewards([{"input_ids": torch.ones(1, 1)}])
