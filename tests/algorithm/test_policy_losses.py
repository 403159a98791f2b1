"""GSPO, SAPO and CISPO by hand, and what all policy losses have in common."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from areal.algorithm.loss import LossInputs, cispo_loss, gspo_loss, ppo_clip_loss, sapo_loss
from areal.algorithm.off_policy import m2po_keep

LOSSES = {
    "ppo": partial(ppo_clip_loss, eps_clip=0.2, eps_clip_higher=0.28, c_clip=3.0),
    "gspo": partial(gspo_loss, eps_clip=0.2, c_clip=3.0),
    "sapo": partial(sapo_loss, tau_pos=1.0, tau_neg=1.05),
    "cispo": partial(cispo_loss, eps_clip=1.0, eps_clip_higher=0.5),
}


def inputs(ratios: list[float], advantages: list[float], **changes) -> LossInputs:
    logp = torch.tensor([math.log(r) for r in ratios], dtype=torch.float64, requires_grad=True)
    fields = dict(
        logprobs_T=logp,
        prox_logp_T=torch.zeros(len(ratios), dtype=torch.float64),
        advantages_T=torch.tensor(advantages, dtype=torch.float64),
        mask_T=torch.ones(len(ratios), dtype=torch.bool),
        cu_seqlens=torch.tensor([0, len(ratios)]),
    )
    return LossInputs(**fields | changes)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_gspo_shares_ratio_and_advantage_within_a_sequence():
    x = inputs([2.0, 8.0, 1.0, 0.5], [1.0, 3.0, -1.0, -1.0], cu_seqlens=torch.tensor([0, 2, 4]))
    loss, metrics = gspo_loss(x, eps_clip=0.2)
    assert metrics["importance_weight"].tolist() == pytest.approx([4, 4, 0.5**0.5, 0.5**0.5])
    assert metrics["loss"].tolist() == pytest.approx([-2.4, -2.4, 0.8, 0.8])
    assert loss.item() == pytest.approx((-2.4 * 2 + 0.8 * 2) / 4)


def test_gspo_averages_over_learned_tokens_only_and_wants_the_bounds():
    mask = torch.tensor([True, False, True])
    x = inputs([1.1, 1e9, 1.1], [1.0, 50.0, 3.0], mask_T=mask, cu_seqlens=torch.tensor([0, 3]))
    loss, metrics = gspo_loss(x, eps_clip=0.2)
    assert metrics["loss"].tolist() == pytest.approx([-2.2, 0.0, -2.2])
    loss.backward()  # each of the two tokens moves the ratio of both
    assert x.logprobs_T.grad.tolist() == pytest.approx([-1.1, 0.0, -1.1])
    with pytest.raises(ValueError, match="cu_seqlens"):
        gspo_loss(inputs([1.0], [1.0], cu_seqlens=None), eps_clip=0.2)


def test_sapo_by_hand():
    x = inputs([1.5, 1.5, 1.0], [2.0, -2.0, 0.0])
    loss, metrics = sapo_loss(x, tau_pos=1.0, tau_neg=2.0)
    good, bad = -4 * sigmoid(0.5) * 2, 4 / 2 * sigmoid(2 * 0.5) * 2
    assert metrics["loss"].tolist() == pytest.approx([good, bad, 0.0])
    assert loss.item() == pytest.approx((good + bad) / 3)


def test_sapo_starts_with_the_plain_policy_gradient():
    """At r = 1 the slope of the gate is 1 for any temperature."""
    x = inputs([1.0, 1.0], [2.0, -3.0])
    sapo_loss(x, tau_pos=0.7, tau_neg=5.0)[0].backward()
    assert x.logprobs_T.grad.tolist() == pytest.approx([-1.0, 1.5])


def test_cispo_by_hand_keeps_the_gradient_of_clipped_tokens():
    x = inputs([8.0, 1.5, 0.25], [1.0, -2.0, 3.0])
    loss, metrics = cispo_loss(x, eps_clip=0.5, eps_clip_higher=4.0)
    clipped = [5.0, 1.5, 0.5]
    values = zip(clipped, [1.0, -2.0, 3.0], [8.0, 1.5, 0.25], strict=True)
    terms = [-c * a * math.log(r) for c, a, r in values]
    assert metrics["loss"].tolist() == pytest.approx(terms)
    assert metrics["clip_ratio"].tolist() == [True, False, True]
    loss.backward()
    assert x.logprobs_T.grad.tolist() == pytest.approx([-5 / 3, 3 / 3, -1.5 / 3])


@pytest.mark.parametrize("name", ["ppo", "gspo", "sapo"])
def test_gradient_matches_finite_differences(name: str):
    gen = torch.Generator().manual_seed(3)
    prox, adv = torch.randn(2, 9, generator=gen, dtype=torch.float64)
    weight = torch.rand(9, generator=gen, dtype=torch.float64)
    mask = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    logp = (prox + 0.3 * torch.randn(9, generator=gen, dtype=torch.float64)).requires_grad_()
    cu = torch.tensor([0, 4, 9])
    assert torch.autograd.gradcheck(
        lambda x: LOSSES[name](LossInputs(x, prox, adv, mask, weight, cu))[0], logp
    )


def test_the_gradient_of_cispo_is_that_of_its_weight_held_still():
    """Its ratio is a constant of the gradient, so prox moves along to keep it still."""
    gen = torch.Generator().manual_seed(3)
    log_ratio, adv = torch.randn(2, 5, generator=gen, dtype=torch.float64)
    logp = torch.randn(5, generator=gen, dtype=torch.float64).requires_grad_()
    mask = torch.tensor([1, 1, 0, 1, 1], dtype=torch.bool)
    assert torch.autograd.gradcheck(
        lambda x: LOSSES["cispo"](LossInputs(x, x.detach() - log_ratio, adv, mask))[0], logp
    )


@pytest.mark.parametrize("name", LOSSES)
def test_dropped_tokens_stay_in_the_denominator(name: str):
    """M2PO and rejection both work by a weight of 0, so parts of a batch add up to the whole."""
    ratios, advantages = [1.1, 0.9, 1.05, 0.95], [1.0, 1.0, -1.0, 2.0]
    behave = torch.tensor([0.0, 3.0, 0.1, 0.0], dtype=torch.float64)
    zeros, ones = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.bool)
    keep = m2po_keep(zeros, behave, ones, threshold=0.04)
    assert keep.tolist() == [True, False, True, True]
    _, plain = LOSSES[name](inputs(ratios, advantages))
    loss, _ = LOSSES[name](inputs(ratios, advantages, weight_T=keep.double()))
    assert loss.item() == pytest.approx((plain["loss"] * keep).sum().item() / 4)


@pytest.mark.parametrize("name", LOSSES)
def test_junk_off_the_mask_reaches_neither_loss_nor_gradient(name: str):
    x = LossInputs(
        logprobs_T=torch.tensor([-1.0, -math.inf, -1.0], requires_grad=True),
        prox_logp_T=torch.tensor([-1.0, math.nan, -1.0]),
        advantages_T=torch.tensor([1.0, math.inf, 1.0]),
        mask_T=torch.tensor([True, False, True]),
        weight_T=torch.tensor([1.0, math.nan, 1.0]),
        cu_seqlens=torch.tensor([0, 3]),
    )
    loss, metrics = LOSSES[name](x)
    loss.backward()
    assert loss.isfinite() and metrics["loss"][1] == 0
    assert x.logprobs_T.grad.tolist() == pytest.approx([-0.5, 0.0, -0.5])


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_to_learn_is_zero_not_nan(name: str):
    x = inputs([1.0, 2.0], [1.0, 1.0], mask_T=torch.tensor([False, False]))
    loss, _ = LOSSES[name](x)
    loss.backward()
    assert loss.item() == 0 and x.logprobs_T.grad.tolist() == [0, 0]
