"""Importance weights with their masks and clamps, and the tokens M2PO keeps, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from areal.algorithm.off_policy import METRICS, importance_weight, m2po_keep, reject

# Two sequences: ratios (2, 8, junk) and (0.5, 1); the third token is off the mask.
RATIOS = torch.tensor([2.0, 8.0, 1e9, 0.5, 1.0])
BEHAVE = torch.full((5,), math.log(0.05))
PROX = BEHAVE + RATIOS.log()
MASK = torch.tensor([1, 1, 0, 1, 1], dtype=torch.bool)
CU = torch.tensor([0, 3, 5])
BOTH = torch.ones(2, dtype=torch.bool)
TIS = dict(level="token", action="clamp", metric="ratio", agg="mean", upper=5.0, lower=None)


def weights(**changes) -> list[float]:
    return reject(PROX, BEHAVE, MASK, CU, **TIS | changes).tolist()


def test_plain_weight_is_the_ratio_and_zero_off_the_mask():
    assert importance_weight(PROX, BEHAVE, MASK).tolist() == pytest.approx([2, 8, 0, 0.5, 1])


def test_a_broken_log_probability_weighs_one():
    out = importance_weight(
        torch.tensor([float("nan"), -1.0]), torch.tensor([-1.0, -math.inf]), BOTH
    )
    assert out.tolist() == [1.0, 1.0]


def test_token_clamp():
    assert weights() == pytest.approx([2, 5, 0, 0.5, 1])
    assert weights(lower=0.8) == pytest.approx([2, 5, 0, 0.8, 1])


def test_token_mask():
    assert weights(action="mask") == pytest.approx([2, 0, 0, 0.5, 1])
    assert weights(action="mask", lower=0.8) == pytest.approx([2, 0, 0, 0, 1])


@pytest.mark.parametrize(
    ("agg", "upper", "kept"),
    [("sum", 15.0, False), ("sum", 17.0, True), ("mean", 3.9, False), ("mean", 4.1, True)]
    + [("max", 7.9, False), ("max", 8.1, True)],
)
def test_sequence_mask_decides_for_all_its_tokens(agg: str, upper: float, kept: bool):
    first = [4, 4, 0] if kept else [0, 0, 0]  # the geometric mean of 2 and 8
    out = weights(level="sequence", action="mask", agg=agg, upper=upper)
    assert out == pytest.approx([*first, 0.5**0.5, 0.5**0.5])


def test_sequence_clamp():
    out = weights(level="sequence", upper=3.0)
    assert out == pytest.approx([3, 3, 0, 0.5**0.5, 0.5**0.5])


@pytest.mark.parametrize(
    ("metric", "score"),
    [
        # d = log(pi_prox / pi_behave) = log 2, log 8, -log 2, 0
        ("kl_k1", [math.log(2), math.log(8), -math.log(2), 0]),
        ("kl_k2", [math.log(2) ** 2 / 2, math.log(8) ** 2 / 2, math.log(2) ** 2 / 2, 0]),
        # exp(-d) - 1 + d
        ("kl_k3", [1 / 2 - 1 + math.log(2), 1 / 8 - 1 + math.log(8), 2 - 1 - math.log(2), 0]),
    ],
)
def test_kl_filters_keep_token_weights(metric: str, score: list[float]):
    for bound in (-1.0, 0.1, 0.3, 1.0, 4.0):
        kept = [w if s <= bound else 0 for w, s in zip([2, 8, 0.5, 1], score, strict=True)]
        out = weights(action="mask", metric=metric, upper=bound)
        assert out[:2] + out[3:] == pytest.approx(kept)


def test_an_upper_bound_on_k1_cuts_what_became_likelier_and_a_lower_one_what_became_rarer():
    """Tokens 2, 8, 0.5 and 1 times as likely as when they were sampled."""
    kl = dict(action="mask", metric="kl_k1")
    assert weights(**kl, upper=1.0) == pytest.approx([2, 0, 0, 0.5, 1])
    assert weights(**kl, upper=5.0, lower=-0.5) == pytest.approx([2, 8, 0, 0, 1])
    # By sequence: means log 4 and -log(2) / 2.
    assert weights(**kl, level="sequence", upper=1.0) == pytest.approx([0, 0, 0, 0.5, 1])
    assert weights(**kl, level="sequence", upper=2.0, lower=-0.1) == pytest.approx([2, 8, 0, 0, 0])


def test_k3_rejects_a_token_that_became_rarer_sooner_than_one_that_became_likelier():
    """0.125 times as likely: 8 - 1 - log 8 = 4.92; 8 times as likely: 1/8 - 1 + log 8 = 1.20."""
    behave = torch.full((2,), math.log(0.05))
    prox = behave + torch.tensor([8.0, 1 / 8]).log()
    options = TIS | dict(action="mask", metric="kl_k3", upper=2.0)
    out = reject(prox, behave, BOTH, torch.tensor([0, 2]), **options)
    assert out.tolist() == pytest.approx([8.0, 0.0])


def test_binary_kl_takes_the_larger_direction():
    p, q = 0.05, 0.4  # behave and prox of the second token

    def kl(a: float, b: float) -> float:
        return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

    worst = max(kl(p, q), kl(q, p))
    assert weights(action="mask", metric="binary_kl", upper=worst * 1.01)[1] == pytest.approx(8)
    assert weights(action="mask", metric="binary_kl", upper=worst * 0.99)[1] == 0


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_keeps_what_is_on_policy(metric: str):
    out = reject(
        BEHAVE, BEHAVE, MASK, CU, **TIS | dict(action="mask", metric=metric, level="sequence")
    )
    assert torch.equal(out, MASK.float())


def test_refusals_name_the_key():
    with pytest.raises(ValueError, match="rejection_sampling.metric"):
        weights(metric="kl")
    with pytest.raises(ValueError, match="set metric=ratio or action=mask"):
        weights(metric="kl_k1")


def test_binary_kl_keeps_certain_tokens_and_drops_lost_ones():
    """Probability 1 under both policies is most of any answer; in float32 its 1 - p is 0."""
    prox, behave = torch.tensor([0.0, -1e-9, -30.0]), torch.tensor([-1e-9, 0.0, -1e-9])
    out = reject(
        prox,
        behave,
        torch.ones(3, dtype=torch.bool),
        torch.tensor([0, 3]),
        **TIS | dict(action="mask", metric="binary_kl", upper=2.0),
    )
    assert out.tolist() == pytest.approx([1.0, 1.0, 0.0])


def test_binary_kl_of_a_sequence_is_the_mean_of_its_tokens():
    """0.021 and 0.556 for the first two tokens: the second is far, the sequence is not."""
    kpop = dict(action="mask", metric="binary_kl")
    assert weights(**kpop, upper=0.4) == pytest.approx([2, 0, 0, 0.5, 1])
    assert weights(**kpop, level="sequence", upper=0.4) == pytest.approx([2, 8, 0, 0.5, 1])
    assert weights(**kpop, level="sequence", upper=0.25) == pytest.approx([0, 0, 0, 0.5, 1])


def test_a_masked_token_with_an_infinite_ratio_weighs_zero():
    out = reject(
        torch.tensor([100.0, 0.0]),
        torch.tensor([0.0, 0.0]),
        BOTH,
        torch.tensor([0, 2]),
        **TIS | dict(action="mask"),
    )
    assert out.tolist() == [0.0, 1.0]


def test_weights_carry_no_gradient():
    prox = PROX.clone().requires_grad_()
    assert not importance_weight(prox, BEHAVE, MASK).requires_grad
    assert not reject(prox, BEHAVE, MASK, CU, **TIS).requires_grad


@pytest.mark.parametrize(
    ("threshold", "kept"),
    [
        (1e-9, [1, 0, 0, 0]),  # at least one stays, the nearest
        (2.6, [1, 1, 0, 0]),  # squares 1, 4, 9, 16: means 1, 2.5, 4.67, 7.5
        (4.7, [1, 1, 1, 0]),
        (7.5, [1, 1, 1, 0]),  # below the threshold, not at it
        (7.6, [1, 1, 1, 1]),
    ],
)
def test_m2po_drops_the_largest_until_the_mean_is_below(threshold: float, kept: list[int]):
    prox = torch.tensor([1.0, 4.0, 99.0, -2.0, 3.0])
    mask = torch.tensor([1, 1, 0, 1, 1])
    out = m2po_keep(prox, torch.zeros(5), mask, threshold=threshold)
    nearest_first = out[torch.tensor([0, 3, 4, 1])]
    assert nearest_first.int().tolist() == kept and not out[2]


def test_m2po_works_on_any_shape_and_on_nothing():
    prox = torch.tensor([[0.0, 3.0], [-1.0, 2.0]])
    out = m2po_keep(prox, torch.zeros(2, 2), torch.ones(2, 2), threshold=0.6)
    assert out.tolist() == [[True, False], [True, False]]
    nothing = m2po_keep(prox, torch.zeros(2, 2), torch.zeros(2, 2), threshold=0.6)
    assert not nothing.any()
