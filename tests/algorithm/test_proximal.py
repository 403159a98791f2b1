"""The guesses of log pi_prox by hand, and their errors against the real one."""

from __future__ import annotations

import math

import pytest
import torch

from areal.algorithm.off_policy import (
    approximation_errors,
    linear_prox,
    loglinear_prox,
    rollout_prox,
)

# Current version 7: the share of the way is 0, 0, 1/2, 3/4, and 0 for text of no version.
VERSIONS = torch.tensor([7, 6, 5, 3, -1])


def test_loglinear_by_hand():
    current = torch.full((5,), 1.0, requires_grad=True)
    out = loglinear_prox(current, torch.zeros(5), VERSIONS, version=7)
    assert out.tolist() == pytest.approx([0, 0, 1 / 2, 3 / 4, 0])
    assert not out.requires_grad


def test_linear_mixes_probabilities():
    current = torch.full((5,), math.log(0.8), requires_grad=True)
    out = linear_prox(current, torch.full((5,), math.log(0.4)), VERSIONS, version=7)
    assert out.exp().tolist() == pytest.approx([0.4, 0.4, 0.6, 0.7, 0.4])
    assert not out.requires_grad


def test_linear_survives_probabilities_below_float32():
    out = linear_prox(torch.tensor([-200.0]), torch.tensor([-200.0]), torch.tensor([3]), 7)
    assert out.item() == pytest.approx(-200)


def test_rollout_takes_the_sampling_policy():
    behave = torch.rand(5)
    assert torch.equal(rollout_prox(torch.rand(5), behave, VERSIONS, 7), behave)


def test_errors_of_each_guess():
    behave = torch.full((3,), math.log(0.4))
    current = torch.full((3,), math.log(0.8))
    prox = torch.full((3,), math.log(0.6))
    versions, mask = torch.tensor([5, 5, 5]), torch.tensor([1, 1, 0])
    errors = approximation_errors(prox, current, behave, versions, 7, mask)
    assert errors["linear/logp_error"].tolist() == pytest.approx([0, 0, 0], abs=1e-6)
    assert errors["rollout/logp_error"].tolist() == pytest.approx([math.log(1.5)] * 2 + [0])
    assert errors["rollout/ratio_error"].tolist() == pytest.approx([1 / 3, 1 / 3, 0])
    loglinear = 0.32**0.5 / 0.6
    assert errors["loglinear/ratio_error"][0].item() == pytest.approx(1 - loglinear)
    assert set(errors) == {
        f"{name}/{kind}_error"
        for name in ("loglinear", "linear", "rollout")
        for kind in ("logp", "ratio")
    }


def test_a_guess_is_exact_when_the_policy_has_not_moved():
    logp = torch.randn(5)
    for error in approximation_errors(logp, logp, logp, VERSIONS, 7, torch.ones(5)).values():
        assert error.max() < 1e-6
