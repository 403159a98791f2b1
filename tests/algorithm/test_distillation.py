"""Both ways to learn from a teacher, by hand and by gradient."""

from __future__ import annotations

import math

import pytest
import torch

from areal.algorithm.loss import distillation_loss, reverse_kl_loss, teacher_policy_loss

MASK = torch.tensor([1, 1, 0])


def test_alone_it_is_a_policy_gradient_towards_the_teacher():
    old = torch.tensor([-1.0, -2.0, -9.0])
    logp = torch.tensor([-1.0 + math.log(1.5), -2.0, -1.0], requires_grad=True)
    teacher = torch.tensor([-0.2, -3.0, -math.inf])
    rl_loss = torch.tensor(float("nan"))  # not read
    loss = distillation_loss(
        rl_loss, logp, old, teacher, MASK, rl_loss_weight=0.0, distill_loss_weight=2.0
    )
    gain = [-0.2 - logp[0].item(), -3.0 + 2.0]
    assert loss.item() == pytest.approx(2.0 * -(1.5 * gain[0] + gain[1]) / 2)
    loss.backward()  # no gradient through the gain itself
    assert logp.grad.tolist() == pytest.approx([-1.5 * gain[0], -gain[1], 0.0])


def test_beside_rl_the_reverse_kl_is_added():
    logp = torch.tensor([-1.0, -2.0, -math.inf], requires_grad=True)
    teacher = torch.tensor([-0.5, -4.0, -1.0])
    loss = distillation_loss(
        torch.tensor(3.0),
        logp,
        logp.detach(),
        teacher,
        MASK,
        rl_loss_weight=0.5,
        distill_loss_weight=0.1,
    )
    assert loss.item() == pytest.approx(0.5 * 3.0 + 0.1 * (-0.5 + 2.0) / 2)
    loss.backward()
    assert logp.grad.tolist() == pytest.approx([0.05, 0.05, 0.0])


def test_gradients_match_finite_differences():
    gen = torch.Generator().manual_seed(4)
    old, teacher = torch.randn(2, 3, generator=gen, dtype=torch.float64)
    logp = torch.randn(3, generator=gen, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: reverse_kl_loss(x, teacher, MASK), logp)
    # The gain is a constant of the gradient, so the teacher is moved along with the student.
    gain = torch.randn(3, generator=gen, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: teacher_policy_loss(x, old, x.detach() + gain, MASK), logp
    )


def test_a_student_equal_to_its_teacher_learns_nothing():
    logp = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    loss = teacher_policy_loss(logp, logp.detach(), logp.detach(), MASK)
    loss.backward()
    assert loss.item() == 0 and logp.grad.tolist() == [0, 0, 0]
