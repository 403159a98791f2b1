"""KL as reward and as loss, and the controller of its coefficient, by hand and by gradient."""

from __future__ import annotations

import math

import pytest
import torch

from areal.algorithm.kl import AdaptiveKlController, k1, k2, k3, kl_loss, kl_rewards

ESTIMATORS = [k1, k2, k3]


def test_estimators_by_hand():
    d = torch.tensor([0.0, math.log(2), -math.log(2)], dtype=torch.float64)
    log2 = math.log(2)
    assert k1(d).tolist() == [0, log2, -log2]
    assert k2(d).tolist() == pytest.approx([0, log2**2 / 2, log2**2 / 2])
    assert k3(d).tolist() == pytest.approx([0, -0.5 + log2, 1 - log2])


def test_k3_of_a_tiny_step_is_not_rounding_noise():
    assert k3(torch.tensor([1e-3])).item() == pytest.approx(5e-7, rel=1e-2)


def test_the_mean_of_samples_is_the_divergence():
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    exact = (p * (p / q).log()).sum()
    for estimator in (k1, k3):
        assert (p * estimator((p / q).log())).sum().item() == pytest.approx(exact.item())
    assert (p * k2((p / q).log())).sum().item() == pytest.approx(exact.item(), rel=0.1)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_reward_is_minus_the_scaled_estimate_masked_and_clamped(estimator):
    logp = torch.tensor([[-1.0, -1.0, -50.0, 0.0]], requires_grad=True)
    ref = torch.tensor([[-1.5, -1.0, 0.0, -math.inf]])
    mask = torch.tensor([[1, 1, 1, 0]])
    out = kl_rewards(logp, ref, mask, kl_ctl=0.1, estimator=estimator)
    far = 0.1 * (10 if estimator is k1 else -10)
    near = -0.1 * estimator(torch.tensor(0.5)).item()
    assert out.tolist()[0] == pytest.approx([near, 0.0, far, 0.0])
    assert not out.requires_grad


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_loss_is_the_mean_over_the_mask_with_the_right_gradient(estimator):
    gen = torch.Generator().manual_seed(1)
    ref = torch.randn(6, generator=gen, dtype=torch.float64)
    logp = torch.randn(6, generator=gen, dtype=torch.float64).requires_grad_()
    mask = torch.tensor([1, 0, 1, 1, 0, 1])
    loss, kl = kl_loss(logp, ref, mask, estimator=estimator)
    expected = estimator((logp - ref).detach())[mask.bool()].mean()
    assert loss.item() == pytest.approx(expected.item())
    assert kl[1] == 0 and not kl.requires_grad
    assert torch.autograd.gradcheck(lambda x: kl_loss(x, ref, mask, estimator=estimator)[0], logp)


def test_as_a_loss_k2_has_the_gradient_of_the_divergence():
    """Over all three tokens of a vocabulary, each with its probability as its share of samples."""
    logits = torch.tensor([0.2, -0.4, 0.9], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    logp = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)

    def expected_gradient(estimator):
        loss = (logp.detach().exp() * estimator(logp - ref)).sum()
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    torch.testing.assert_close(expected_gradient(k2), exact)
    torch.testing.assert_close(expected_gradient(k1), torch.zeros_like(exact))


def test_controller_follows_the_target():
    controller = AdaptiveKlController(0.1, target=6.0, horizon=1000)
    controller.update(6.6, 100)  # 10 % above
    assert controller.value == pytest.approx(0.1 * 1.01)
    controller.update(600.0, 100)  # no more than 20 % counts
    assert controller.value == pytest.approx(0.1 * 1.01 * 1.02)
    controller.update(0.0, 10**6)  # never to zero or below
    assert controller.value == pytest.approx(0.1 * 1.01 * 1.02 * 0.8)


def test_controller_survives_a_restart():
    one = AdaptiveKlController(0.1, target=6.0, horizon=1000)
    one.update(9.0, 500)
    other = AdaptiveKlController(0.1, target=6.0, horizon=1000)
    other.load_state_dict(one.state_dict())
    one.update(3.0, 500)
    other.update(3.0, 500)
    assert one.value == other.value != 0.1


def test_controller_refusals():
    with pytest.raises(ValueError, match="horizon must be above 0, got 0"):
        AdaptiveKlController(0.1, target=6.0, horizon=0)
    with pytest.raises(ValueError, match="finite, got nan"):
        AdaptiveKlController(0.1, target=6.0, horizon=10).update(math.nan, 1)
