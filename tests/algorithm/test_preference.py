"""DPO, IPO and the reward model on interleaved pairs, by hand and by gradient."""

from __future__ import annotations

import math

import pytest
import torch

from areal.algorithm.preference import dpo_loss, ipo_loss, reward_model_loss

# chosen 0 (3 tokens, 2 learned), rejected 0 (2, 1), chosen 1 (1, 1), rejected 1 (2, 2)
CU = torch.tensor([0, 3, 5, 6, 8])
MASK = torch.tensor([0, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
REF = torch.tensor([-9.0, -1.0, -2.0, -9.0, -1.0, -1.0, -1.0, -1.0])
GAIN = torch.tensor([5.0, 0.5, 0.1, 5.0, -0.2, -0.3, 0.2, 0.6])
LOGP = REF + GAIN


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def test_dpo_by_hand():
    loss, metrics = dpo_loss(LOGP, REF, MASK, CU, beta=0.5)
    margins = [0.5 * (0.6 + 0.2), 0.5 * (-0.3 - 0.8)]
    expected = [-log_sigmoid(margin) for margin in margins]
    assert metrics["loss"].tolist() == pytest.approx(expected, rel=1e-6)
    assert loss.item() == pytest.approx(sum(expected) / 2)
    assert metrics["chosen_reward"].tolist() == pytest.approx([0.3, -0.15], rel=1e-6)
    assert metrics["reward_margin"].tolist() == pytest.approx(margins, rel=1e-6)
    assert metrics["reward_accuracy"].tolist() == [True, False]


def test_ipo_by_hand():
    loss, _ = ipo_loss(LOGP, REF, MASK, CU, beta=0.5)
    gaps = [0.6 / 2 + 0.2, -0.3 - 0.8 / 2]
    assert loss.item() == pytest.approx(sum((gap - 1.0) ** 2 for gap in gaps) / 2)


def test_reward_model_reads_the_last_token_of_each():
    values = torch.tensor([9.0, 9.0, 1.0, 9.0, 0.5, -1.0, 9.0, 2.0], requires_grad=True)
    loss, metrics = reward_model_loss(values, CU)
    assert loss.item() == pytest.approx(-(log_sigmoid(0.5) + log_sigmoid(-3.0)) / 2)
    assert metrics["reward_accuracy"].tolist() == [True, False]
    loss.backward()
    assert (values.grad != 0).tolist() == [False, False, True, False, True, True, False, True]


@pytest.mark.parametrize("loss_fn", [dpo_loss, ipo_loss])
def test_gradient_matches_finite_differences(loss_fn):
    logp = LOGP.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss_fn(x, REF.double(), MASK, CU, beta=0.5)[0], logp)
    assert torch.autograd.gradcheck(lambda x: reward_model_loss(x, CU)[0], logp)


def test_long_sums_keep_their_difference():
    """Two gains of 2000 nats over 20,000 tokens that differ by 1e-3: float32 sums would lose it."""
    length = 20_000
    logp, ref = torch.full((2 * length,), -1.0), torch.full((2 * length,), -1.1)
    ref[0] -= 1e-3
    cu, mask = torch.tensor([0, length, 2 * length]), torch.ones(2 * length)
    _, metrics = dpo_loss(logp, ref, mask, cu, beta=1.0)
    assert metrics["reward_margin"].item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("loss_fn", [dpo_loss, ipo_loss])
def test_an_untouched_policy_starts_at_the_known_value(loss_fn):
    loss, _ = loss_fn(REF, REF, MASK, CU, beta=0.5)
    assert loss.item() == pytest.approx(math.log(2) if loss_fn is dpo_loss else 1.0)


@pytest.mark.parametrize("loss_fn", [dpo_loss, ipo_loss])
@pytest.mark.parametrize("seed", range(5))
def test_what_rounding_alone_can_rank_is_a_tie(loss_fn, seed: int):
    """A policy that equals its reference, as two passes of float32 in another order find it."""
    noise = 3e-7 * torch.randn(len(REF), generator=torch.Generator().manual_seed(seed))
    _, metrics = loss_fn(REF + noise, REF, MASK, CU, beta=0.5)
    assert metrics["reward_accuracy"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("loss_fn", [dpo_loss, ipo_loss])
@pytest.mark.parametrize("beta", [0.01, 1.0])
def test_a_small_difference_that_rounding_cannot_make_is_no_tie(loss_fn, beta: float):
    gain = torch.tensor([0.0, 1e-3, 0.0, 0.0, 0.0, 0.0, 1e-3, 0.0])
    _, metrics = loss_fn(REF + gain, REF, MASK, CU, beta=beta)
    assert metrics["reward_accuracy"].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("size", [0.0, 1.0, 1e4])
def test_scores_of_a_reward_model_tie_within_rounding(size: float):
    values = torch.full((8,), size)
    values[2] += 1e-6 * size
    _, metrics = reward_model_loss(values, CU)
    assert metrics["reward_accuracy"].tolist() == [0.5, 0.5]
    values[2] += 1e-3 * max(size, 1.0)
    values[7] += 1e-3 * max(size, 1.0)
    _, metrics = reward_model_loss(values, CU)
    assert metrics["reward_accuracy"].tolist() == [1.0, 0.0]


def test_the_mean_over_pairs_adds_up_from_parts():
    whole, _ = dpo_loss(LOGP, REF, MASK, CU, beta=0.5)
    first, _ = dpo_loss(LOGP[:5], REF[:5], MASK[:5], CU[:3], beta=0.5)
    second, _ = dpo_loss(LOGP[5:], REF[5:], MASK[5:], CU[2:] - 5, beta=0.5)
    assert whole.item() == pytest.approx((first + second).item() / 2)


def test_half_a_pair_is_refused():
    with pytest.raises(ValueError, match="got 3 sequences"):
        dpo_loss(LOGP[:6], REF[:6], MASK[:6], CU[:4], beta=0.5)
