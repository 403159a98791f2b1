"""lambda as a function of the trajectory: both shipped forms, and what a user's may return."""

from __future__ import annotations

import pytest
import torch

from areal.algorithm.lambdas import (
    LambdaContext,
    evaluate_lambda,
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
    ],
)
def test_what_is_not_one_finite_number_per_trajectory_is_refused(returned, message: str):
    with pytest.raises(ValueError, match=message):
        evaluate_lambda(lambda context: returned, of_lengths(10, 20))


def test_wrong_arguments_point_at_the_key():
    with pytest.raises(ValueError, match="gae_lambda_kwargs"):
        evaluate_lambda(vapo_lambda, of_lengths(10), beta=1)
    with pytest.raises(ValueError, match="'q'.*gae_lambda_kwargs"):
        evaluate_lambda(relative_position_lambda, of_lengths(10))
