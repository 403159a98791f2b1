"""Rewards to advantages, by hand."""

from __future__ import annotations

import torch

from areal.algorithm.advantage import (
    cut_off_values,
    gae,
    gae_by_turn,
    overlong_penalty,
    place_outcome,
    shape_rewards,
    shift_left,
)


def test_overlong_penalty_is_linear_in_the_last_stretch():
    lens = torch.tensor([10.0, 60.0, 80.0, 100.0])
    out = overlong_penalty(lens, max_new_tokens=100, overlong_tokens=40, factor=2.0)
    assert out.tolist() == [0.0, 0.0, -1.0, -2.0]


def test_bias_then_scale_then_clip():
    out = shape_rewards(torch.tensor([0.0, 1.0, 9.0]), bias=-0.5, scaling=10.0, clip=20.0)
    assert out.tolist() == [-5.0, 5.0, 20.0]


def test_shift_left_fills_the_last_position_and_leaves_the_input_alone():
    x = torch.tensor([[1, 2, 3]])
    assert shift_left(x, fill=-1).tolist() == [[2, 3, -1]]
    assert x.tolist() == [[1, 2, 3]]


def test_outcome_lies_where_the_last_token_is_predicted():
    out = place_outcome(torch.tensor([5.0, 7.0, 1.0]), torch.tensor([4, 2, 1]), width=5)
    assert out.tolist() == [[0, 0, 5, 0, 0], [7, 0, 0, 0, 0], [1, 0, 0, 0, 0]]


def test_without_critic_and_discount_every_generated_token_gets_the_outcome():
    rewards = place_outcome(torch.tensor([1.0, -2.0]), torch.tensor([5, 4]), width=5)
    mask = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 0, 0]])
    advantages, returns = gae(rewards, torch.zeros(2, 5), mask, discount=1.0, gae_lambda=1.0)
    assert advantages.tolist() == [[0, 1, 1, 1, 0], [0, 0, -2, 0, 0]]
    assert torch.equal(advantages, returns)


def test_gae_with_values_by_hand():
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    values = torch.tensor([[0.5, 0.25, 0.75]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3), discount=0.5, gae_lambda=0.5)
    a2 = 1 - 0.75
    a1 = 0.5 * 0.75 - 0.25 + 0.25 * a2
    a0 = 0.5 * 0.25 - 0.5 + 0.25 * a1
    torch.testing.assert_close(advantages, torch.tensor([[a0, a1, a2]]))
    torch.testing.assert_close(returns, torch.tensor([[a0 + 0.5, a1 + 0.25, a2 + 0.75]]))


def test_positions_off_the_mask_are_stepped_over():
    """[gen, tool, tool, gen] behaves as [gen, gen], whatever the value head says of tool text."""
    both = dict(discount=0.9, gae_lambda=0.8)
    short, _ = gae(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.3, 0.6]]), torch.ones(1, 2), **both)
    long, _ = gae(
        torch.tensor([[0.0, 0.0, 0.0, 1.0]]),
        torch.tensor([[0.3, 99.0, -99.0, 0.6]]),
        torch.tensor([[1, 0, 0, 1]]),
        **both,
    )
    torch.testing.assert_close(long[:, [0, 3]], short)
    assert long[0, 1:3].tolist() == [0, 0]


def test_a_reward_on_tool_text_belongs_to_the_generated_token_before_it():
    advantages, _ = gae(
        torch.tensor([[0.0, 0.0, 1.0]]),
        torch.zeros(1, 3),
        torch.tensor([[1, 1, 0]]),
        discount=0.5,
        gae_lambda=1.0,
    )
    assert advantages.tolist() == [[0.5, 1.0, 0.0]]


def test_bootstrap_is_the_value_after_a_sequence_cut_short():
    advantages, _ = gae(
        torch.zeros(1, 2),
        torch.zeros(1, 2),
        torch.ones(1, 2),
        discount=0.5,
        gae_lambda=1.0,
        bootstrap_B=torch.tensor([4.0]),
    )
    assert advantages.tolist() == [[1.0, 2.0]]


def test_each_sequence_may_have_its_own_lambda():
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]).repeat(2, 1), torch.rand(2, 3)
    options = dict(discount=0.9)
    both, _ = gae(rewards, values, torch.ones(2, 3), gae_lambda=torch.tensor([0.3, 0.8]), **options)
    for row, gae_lambda in ((0, 0.3), (1, 0.8)):
        one = slice(row, row + 1)
        alone, _ = gae(
            rewards[one], values[one], torch.ones(1, 3), gae_lambda=gae_lambda, **options
        )
        torch.testing.assert_close(both[one], alone)


def test_values_of_sequences_that_were_cut_off():
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    out = cut_off_values(values, torch.tensor([3, 2]), torch.tensor([False, True]))
    assert out.tolist() == [0.0, 5.0]


# Two turns of two tokens with tool text between them; the value head's opinion of everything but
# a turn's first token plays no part.
TURNS = dict(
    mask_BS=torch.tensor([[0, 1, 1, 0, 1, 1, 0]]),
    turn_ids_BS=torch.tensor([[-1, 0, 0, 0, 1, 1, -1]]),
    values_BS=torch.tensor([[9.0, 0.5, 9.0, 9.0, 0.25, 9.0, 9.0]]),
)


def test_gae_by_turn_by_hand():
    rewards = torch.tensor([[0.0, 0.125, 0.0, 0.0, 0.0, 1.0, 0.0]])
    advantages, returns = gae_by_turn(rewards, **TURNS, discount=0.5, gae_lambda=0.5)
    second = 1.0 - 0.25
    first = 0.125 + 0.5 * 0.25 - 0.5 + 0.25 * second
    assert advantages.tolist() == [[0, first, first, 0, second, second, 0]]
    returned = [first + 0.5, second + 0.25]
    assert returns.tolist() == [[0, returned[0], returned[0], 0, returned[1], returned[1], 0]]


def test_a_reward_on_the_tools_text_belongs_to_the_turn_before_it():
    on_tool = torch.tensor([[0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0]])
    on_turn = torch.tensor([[0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0]])
    options = dict(discount=0.5, gae_lambda=0.5)
    torch.testing.assert_close(
        gae_by_turn(on_tool, **TURNS, **options), gae_by_turn(on_turn, **TURNS, **options)
    )


def test_the_kl_of_a_token_goes_to_that_token_alone():
    rewards = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]])
    kl = torch.tensor([[7.0, -0.5, 0.0, 7.0, 0.0, -0.25, 7.0]])
    options = dict(discount=1.0, gae_lambda=1.0)
    plain, plain_returns = gae_by_turn(rewards, **TURNS, **options)
    out, returns = gae_by_turn(rewards, **TURNS, **options, token_rewards_BS=kl)
    torch.testing.assert_close(out, plain + kl * TURNS["mask_BS"])
    assert torch.equal(returns, plain_returns)


def test_turns_of_one_token_are_the_token_form():
    gen = torch.Generator().manual_seed(2)
    rewards, values = torch.randn(2, 3, 6, generator=gen)
    mask = torch.rand(3, 6, generator=gen) < 0.7
    mask[0] = False  # a row without anything generated
    ids = torch.arange(6).expand(3, 6)
    options = dict(discount=0.9, gae_lambda=torch.tensor([0.1, 0.5, 0.9]))
    bootstrap = torch.randn(3, generator=gen)
    torch.testing.assert_close(
        gae_by_turn(rewards, values, mask, ids, **options, bootstrap_B=bootstrap),
        gae(rewards, values, mask, **options, bootstrap_B=bootstrap),
    )
