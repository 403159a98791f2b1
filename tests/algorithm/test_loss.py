"""PPO clip, dual clip and the decoupled weight, by hand and by numerical gradient."""

from __future__ import annotations

import math

import pytest
import torch

from areal.algorithm.loss import LossInputs, ppo_clip_loss, sft_loss


def inputs(ratios: list[float], advantages: list[float], **changes) -> LossInputs:
    logp = torch.tensor([math.log(r) for r in ratios], dtype=torch.float64, requires_grad=True)
    fields = dict(
        logprobs_T=logp,
        prox_logp_T=torch.zeros(len(ratios), dtype=torch.float64),
        advantages_T=torch.tensor(advantages, dtype=torch.float64),
        mask_T=torch.ones(len(ratios), dtype=torch.bool),
    )
    return LossInputs(**fields | changes)


def test_clip_by_hand():
    x = inputs([1.5, 0.5, 1.5, 0.5, 1.1], [1.0, 1.0, -1.0, -1.0, 2.0])
    loss, metrics = ppo_clip_loss(x, eps_clip=0.2)
    assert metrics["loss"].tolist() == pytest.approx([-1.2, -0.5, 1.5, 0.8, -2.2])
    assert metrics["clip_ratio"].tolist() == [True, False, False, True, False]
    assert loss.item() == pytest.approx((-1.2 - 0.5 + 1.5 + 0.8 - 2.2) / 5)


def test_a_wider_upper_bound():
    loss, _ = ppo_clip_loss(inputs([1.5], [1.0]), eps_clip=0.2, eps_clip_higher=0.28)
    assert loss.item() == pytest.approx(-1.28)


def test_dual_clip_bounds_only_bad_tokens():
    x = inputs([10.0, 10.0], [-1.0, 1.0])
    _, metrics = ppo_clip_loss(x, eps_clip=0.2, c_clip=3.0)
    assert metrics["loss"].tolist() == pytest.approx([3.0, -1.2])
    assert metrics["dual_clip_ratio"].tolist() == [True, False]


def test_clipped_tokens_have_no_gradient_and_others_have_minus_r_a():
    x = inputs([1.5, 1.1], [1.0, 2.0])
    loss, _ = ppo_clip_loss(x, eps_clip=0.2)
    loss.backward()
    assert x.logprobs_T.grad.tolist() == pytest.approx([0.0, -1.1 * 2.0 / 2])


def test_gradient_matches_finite_differences():
    gen = torch.Generator().manual_seed(3)
    prox, adv = torch.randn(2, 9, generator=gen, dtype=torch.float64)
    weight = torch.rand(9, generator=gen, dtype=torch.float64)
    mask = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    logp = (prox + 0.3 * torch.randn(9, generator=gen, dtype=torch.float64)).requires_grad_()

    def loss(logp: torch.Tensor) -> torch.Tensor:
        return ppo_clip_loss(LossInputs(logp, prox, adv, mask, weight), eps_clip=0.1, c_clip=2.0)[0]

    assert torch.autograd.gradcheck(loss, logp)


def test_rejected_tokens_still_count_in_the_denominator():
    weight = torch.tensor([2.0, 0.0], dtype=torch.float64)
    loss, _ = ppo_clip_loss(inputs([1.0, 1.0], [1.0, 1.0], weight_T=weight), eps_clip=0.2)
    assert loss.item() == pytest.approx(-2.0 / 2)


def test_junk_off_the_mask_does_not_reach_loss_or_gradient():
    mask = torch.tensor([True, False])
    x = inputs(
        [1.0, 1.0],
        [1.0, 1.0],
        mask_T=mask,
        prox_logp_T=torch.tensor([0.0, -1e4], dtype=torch.float64),
    )
    loss, _ = ppo_clip_loss(x, eps_clip=0.2)
    loss.backward()
    assert loss.item() == -1.0 and x.logprobs_T.grad.tolist() == [-1.0, 0.0]


def test_nothing_to_learn_is_zero_not_nan():
    x = inputs([1.0], [1.0], mask_T=torch.tensor([False]))
    assert ppo_clip_loss(x, eps_clip=0.2)[0].item() == 0.0


def test_sft_loss_is_the_mean_over_the_mask():
    logp = torch.tensor([-1.0, -2.0, float("-inf")], requires_grad=True)
    loss = sft_loss(logp, torch.tensor([1, 1, 0]))
    loss.backward()
    assert loss.item() == 1.5 and logp.grad.tolist() == [-0.5, -0.5, 0.0]
