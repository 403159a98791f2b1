"""A user's function as a policy loss: what it gets, what it may return, and what it is told."""

from __future__ import annotations

import pytest
import sample_losses
import torch

from areal.algorithm.loss import LossInputs, own_loss, ppo_clip_loss

MASK = torch.tensor([False, True, True, True, False, True])


def inputs(**changes) -> LossInputs:
    gen = torch.Generator().manual_seed(0)
    logp, prox, advantages, behave = torch.randn(4, len(MASK), generator=gen).unbind()
    fields = dict(
        logprobs_T=logp.requires_grad_(),
        prox_logp_T=prox,
        advantages_T=advantages,
        mask_T=MASK,
        cu_seqlens=torch.tensor([0, 4, 6]),
        behave_logp_T=behave,
        versions_T=torch.arange(len(MASK)),
    )
    return LossInputs(**fields | changes)


def apply(fn, x: LossInputs, **options):
    return own_loss(x, fn=fn, name="actor.policy_loss m.f", options=options)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_per_token_becomes_the_mean_over_the_mask(weighted: bool):
    weight = torch.tensor([9.0, 0.0, 2.0, 1.0, 9.0, 0.5]) if weighted else None
    losses = []
    for of in (
        lambda x: ppo_clip_loss(x, eps_clip=0.2, eps_clip_higher=0.28),
        lambda x: apply(sample_losses.clipped, x),
    ):
        x = inputs(weight_T=weight)
        loss, _ = of(x)
        loss.backward()
        losses.append((loss.detach(), x.logprobs_T.grad))
    torch.testing.assert_close(losses[0], losses[1])


def test_the_mean_itself_is_taken_as_it_is():
    loss, metrics = apply(sample_losses.twice_the_shipped_one, inputs(), eps_clip=0.2)
    expected, _ = ppo_clip_loss(inputs(), eps_clip=0.2)
    torch.testing.assert_close(loss, 2 * expected)
    assert "clip_ratio" in metrics


def test_metrics_are_recorded_without_their_gradient():
    _, metrics = apply(sample_losses.clipped_with_metrics, inputs(), low=0.1)
    assert metrics["outside_ratio"].dtype == torch.bool
    assert not metrics["ratio"].requires_grad and metrics["ratio"].shape == MASK.shape


def test_off_the_mask_every_input_is_0_and_nothing_gets_a_gradient():
    """exp of what lies there would overflow, and 0 times infinity would poison the batch."""
    seen = {}

    def look(x):
        seen.update({key: getattr(x, key) for key in x.__dataclass_fields__})
        return -x.advantages_T * (x.logprobs_T - x.prox_logp_T).exp()

    wild = torch.where(MASK, 0.5, float("-inf"))
    x = inputs(prox_logp_T=wild, behave_logp_T=wild, weight_T=torch.ones(len(MASK)))
    loss, _ = apply(look, x)
    loss.backward()
    assert loss.isfinite() and x.logprobs_T.grad.isfinite().all()
    assert (x.logprobs_T.grad[~MASK] == 0).all()
    for key in ("logprobs_T", "prox_logp_T", "advantages_T", "behave_logp_T", "weight_T"):
        assert (seen[key][~MASK] == 0).all()
    assert seen["versions_T"].tolist() == list(range(len(MASK)))
    assert seen["cu_seqlens"].tolist() == [0, 4, 6]


def test_parts_of_a_batch_add_up_to_the_whole():
    x = inputs()
    whole, _ = apply(sample_losses.clipped, x)
    parts = 0.0
    for rows in (slice(0, 4), slice(4, 6)):
        part = LossInputs(
            x.logprobs_T[rows], x.prox_logp_T[rows], x.advantages_T[rows], x.mask_T[rows]
        )
        parts += apply(sample_losses.clipped, part)[0] * part.mask_T.sum() / MASK.sum()
    torch.testing.assert_close(whole, parts)


@pytest.mark.parametrize(
    "fn, says",
    [
        (
            sample_losses.not_a_tensor,
            "m.f returned float, expected a loss for each of the 6 tokens",
        ),
        (sample_losses.of_another_length, r"m.f returned \[5\], expected a loss for each of the 6"),
        (sample_losses.without_gradient, "m.f returned a loss without a gradient: compute it from"),
        (sample_losses.with_a_number_as_metric, "m.f returned float as the metric 'size'"),
        (lambda x: (-x.logprobs_T, [1]), "m.f returned list beside the loss, expected a dict"),
        (lambda x: (-x.logprobs_T, {"a": x.mask_T[:2]}), r"m.f returned \[2\] as the metric 'a'"),
    ],
)
def test_what_it_may_not_return(fn, says):
    with pytest.raises(ValueError, match=says):
        apply(fn, inputs())


def test_without_gradients_a_loss_needs_none():
    with torch.no_grad():
        loss, _ = apply(sample_losses.without_gradient, inputs())
    assert loss.isfinite()
