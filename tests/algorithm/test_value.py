"""The clipped value loss by hand and by gradient."""

from __future__ import annotations

import pytest
import torch

from areal.algorithm.loss import HUBER_DELTA, huber_error, squared_error, value_loss

ONES = torch.ones(3, dtype=torch.bool)


def test_the_larger_of_plain_and_clipped_error():
    values = torch.tensor([2.0, 0.0, 0.3], requires_grad=True)
    old, returns = torch.zeros(3), torch.tensor([2.0, 2.0, 1.0])
    loss, metrics = value_loss(values, old, returns, ONES, eps_clip=0.5)
    # Moved 2 of 2: judged as if it stood at 0.5. Not moved, moved within the bound: as they are.
    expected = [1.5**2 / 2, 2.0**2 / 2, 0.7**2 / 2]
    assert metrics["loss"].tolist() == pytest.approx(expected)
    assert metrics["clip_ratio"].tolist() == [True, False, False]
    assert loss.item() == pytest.approx(sum(expected) / 3)
    loss.backward()
    assert values.grad.tolist() == pytest.approx([0.0, -2.0 / 3, -0.7 / 3])


def test_moving_away_from_the_return_is_never_forgiven():
    _, metrics = value_loss(
        torch.tensor([-3.0]), torch.zeros(1), torch.ones(1), ONES[:1], eps_clip=0.5
    )
    assert metrics["loss"].item() == pytest.approx(8.0)


def test_huber_is_squared_near_and_linear_far():
    near, far = HUBER_DELTA / 2, 3 * HUBER_DELTA
    out = huber_error(torch.tensor([near, far]), torch.zeros(2))
    assert out.tolist() == pytest.approx([near**2 / 2, HUBER_DELTA * (far - HUBER_DELTA / 2)])


@pytest.mark.parametrize("error", [squared_error, huber_error])
def test_gradient_matches_finite_differences(error):
    gen = torch.Generator().manual_seed(5)
    old, returns = 20 * torch.randn(2, 8, generator=gen, dtype=torch.float64)
    values = (old + torch.randn(8, generator=gen, dtype=torch.float64)).requires_grad_()
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1])
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, old, returns, mask, eps_clip=0.7, error=error)[0], values
    )


def test_junk_off_the_mask_reaches_nothing():
    values = torch.tensor([1.0, float("nan")], requires_grad=True)
    junk = torch.tensor([0.0, float("inf")])
    loss, _ = value_loss(values, junk, junk, torch.tensor([1, 0]), eps_clip=0.5)
    loss.backward()
    assert loss.item() == 0.5 and values.grad.tolist() == [1.0, 0.0]
    assert value_loss(values, junk, junk, torch.tensor([0, 0]), eps_clip=0.5)[0].item() == 0
