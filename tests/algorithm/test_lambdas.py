"""lambda as a function of the trajectory: both shipped forms, and what a user's may return."""

from __future__ import annotations

import pytest
import torch

from areal.algorithm.advantage import (
    LambdaContext,
    evaluate_lambda,
    gae_by_turn,
    lambda_context,
    relative_position_lambda,
    vapo_lambda,
)

MASK = torch.tensor([[0, 1, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
TURN_IDS = torch.tensor([[-1, 0, 0, 0, 0, 1], [-1, -1, 4, -1, -1, -1], [-1] * 6])


def of_lengths(*lengths: float) -> LambdaContext:
    steps = torch.tensor(lengths)
    return LambdaContext(steps, torch.ones_like(steps), steps)


def test_context_counts_tokens_and_turns():
    context = lambda_context(MASK, TURN_IDS, unit="turn")
    assert context.num_tokens_B.tolist() == [4, 1, 0]
    assert context.num_turns_B.tolist() == context.num_steps_B.tolist() == [2, 1, 0]
    plain = lambda_context(MASK, None, unit="token")
    assert plain.num_steps_B.tolist() == [4, 1, 0] and plain.num_turns_B.tolist() == [1, 1, 0]
    with pytest.raises(ValueError, match="'turns'"):
        lambda_context(MASK, None, unit="turns")


def test_vapo_by_hand():
    out = evaluate_lambda(vapo_lambda, of_lengths(0, 10, 20, 40, 2000), alpha=0.05)
    assert out.tolist() == pytest.approx([0, 0, 0, 0.5, 0.99])


def test_relative_position_gives_the_first_step_the_same_share_at_any_length():
    lengths = of_lengths(1, 2, 5, 1001)
    out = evaluate_lambda(relative_position_lambda, lengths, q=0.25)
    assert out[1:].pow(lengths.num_steps_B[1:] - 1).tolist() == pytest.approx([0.25] * 3, rel=1e-3)
    assert 0 <= out[0] <= 1


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (0.5, "returned float, expected a float tensor"),
        (torch.tensor([1, 1]), "int64"),
        (torch.tensor([0.5]), r"shape \[1\], expected \[2\]"),
        (torch.tensor([0.5, float("nan")]), "nan for a trajectory of 20 steps"),
        (torch.tensor([0.5, float("inf")]), "inf for a trajectory of 20 steps"),
        (torch.tensor([1.25, 0.5]), "1.25 for a trajectory of 10 steps, expected a number from 0"),
        (torch.tensor([0.5, -0.25]), "-0.25 for a trajectory of 20 steps, expected a number"),
    ],
)
def test_what_is_not_one_number_from_0_to_1_per_trajectory_is_refused(returned, message: str):
    with pytest.raises(ValueError, match=message):
        evaluate_lambda(lambda context: returned, of_lengths(10, 20))


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_an_alpha_of_vapo_that_makes_no_lambda_is_refused(alpha: float):
    with pytest.raises(ValueError, match="gae_lambda_kwargs.alpha must be above 0"):
        evaluate_lambda(vapo_lambda, of_lengths(10), alpha=alpha)


@pytest.mark.parametrize("q", [1.1, -0.5, float("nan")])
def test_a_q_that_makes_no_lambda_is_refused(q: float):
    with pytest.raises(ValueError, match="gae_lambda_kwargs.q must lie between 0 and 1"):
        evaluate_lambda(relative_position_lambda, of_lengths(10), q=q)


@pytest.mark.parametrize(
    "ids, says",
    [
        ([[-1, 0, 1, 0]], "row 0 has 0 at token 3, after turn 1"),
        ([[-1, -1, 0, 0]], "row 0 has -1 at token 1, after turn -1"),
        ([[-1, 0, -2, 1]], "row 0 has -2 at token 2, after turn 0"),
    ],
)
def test_turns_that_fall_or_are_negative_are_refused(ids, says):
    mask = torch.tensor([[0, 1, 1, 1]])
    with pytest.raises(ValueError, match=says):
        lambda_context(mask, torch.tensor(ids), unit="turn")
    zeros = torch.zeros(1, 4)
    with pytest.raises(ValueError, match=says):
        gae_by_turn(zeros, zeros, mask, torch.tensor(ids), discount=1.0, gae_lambda=1.0)


def test_wrong_arguments_point_at_the_key():
    with pytest.raises(ValueError, match="gae_lambda_kwargs"):
        evaluate_lambda(vapo_lambda, of_lengths(10), beta=1)
    with pytest.raises(ValueError, match="'q'.*gae_lambda_kwargs"):
        evaluate_lambda(relative_position_lambda, of_lengths(10))
