"""Policy-gradient losses over packed tokens.

A loss is a function `(LossInputs, options) -> (loss, metrics)`: a scalar to minimise, the mean
over all tokens of the loss mask, and detached per-token tensors worth recording.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One packed micro-batch; position t speaks of the token at t + 1."""

    logprobs_T: torch.Tensor  # log pi_theta, with gradient
    prox_logp_T: torch.Tensor  # log of the policy the ratio is clipped around
    advantages_T: torch.Tensor
    mask_T: torch.Tensor  # bool, the tokens to learn from
    weight_T: torch.Tensor | None = None  # pi_prox / pi_behave, 0 where rejected; None is 1


def ppo_clip_loss(
    inputs: LossInputs,
    *,
    eps_clip: float,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-mean of min(r A, clip(r) A), r = pi_theta / pi_prox in [1 - eps_clip, 1 + eps_clip_higher].

    `c_clip` > 1 bounds the loss of a bad token (A < 0) at c_clip |A| (dual clip). With weights
    this is decoupled PPO. The mean divides by the mask's count: rejected tokens count as 0.
    """
    mask_T, advantages_T = inputs.mask_T, inputs.advantages_T
    # Off the mask the two log-probabilities are unrelated; exp of their difference may overflow
    # and inf * 0 would poison the sum.
    log_ratio_T = (inputs.logprobs_T - inputs.prox_logp_T.detach()).masked_fill(~mask_T, 0.0)
    ratio_T = log_ratio_T.exp()
    higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1.0 - eps_clip, 1.0 + higher)
    loss_T = torch.maximum(plain_T, clipped_T)
    metrics = {
        "importance_weight": ratio_T.detach(),
        "clip_ratio": (plain_T < clipped_T).detach() & mask_T,
    }
    if c_clip is not None:
        bound_T = advantages_T.sign() * c_clip * advantages_T
        metrics["dual_clip_ratio"] = (bound_T < loss_T).detach() & mask_T
        loss_T = torch.minimum(loss_T, bound_T)
    if inputs.weight_T is not None:
        loss_T = loss_T * inputs.weight_T.detach()
    loss_T = loss_T.masked_fill(~mask_T, 0.0)
    metrics["loss"] = loss_T.detach()
    return loss_T.sum() / mask_T.sum().clamp(min=1), metrics
