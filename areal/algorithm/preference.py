"""Losses over pairs of a chosen and a rejected answer: DPO, IPO and the reward model.

Sequences are packed and interleaved: chosen 0, rejected 0, chosen 1, rejected 1, ... With
h = sum over a sequence's loss tokens of (log pi - log pi_ref):

    dpo            -log sigmoid(beta (h_chosen - h_rejected))
    ipo            (h_chosen / n_chosen - h_rejected / n_rejected - 1 / (2 beta))^2
    reward model   -log sigmoid(s_chosen - s_rejected), s the value at the last token

Every loss is a mean over pairs, so a micro-batch weighs as many pairs as it holds. Sums over tokens
run in float64: the difference of two long float32 sums loses most of its precision.

`reward_accuracy` is 1 where the chosen answer has the higher reward, 0 where it has the lower one,
and 1/2 for a tie: a difference within float32 rounding. A policy equal to its reference ties on
every pair, however its sums were rounded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from areal.algorithm.segments import sequence_count, sequence_sum

Metrics = dict[str, torch.Tensor]

# Bound on the difference of two float32 forward passes with equal weights: in nats for the
# log-probability of each token, relative (to at least 1) for a score.
ROUNDING = 1e-5


def dpo_loss(
    logprobs_T: torch.Tensor,
    ref_logp_T: torch.Tensor,
    mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    beta: float,
) -> tuple[torch.Tensor, Metrics]:
    gain_B = _gains(logprobs_T, ref_logp_T, mask_T, cu_seqlens)
    chosen_P, rejected_P = _pairs(gain_B)
    loss_P = -F.logsigmoid(beta * (chosen_P - rejected_P))
    num_chosen_P, num_rejected_P = _pairs(sequence_count(mask_T, cu_seqlens))
    tie_P = beta * ROUNDING * (num_chosen_P + num_rejected_P)
    metrics = _metrics(loss_P, beta * chosen_P, beta * rejected_P, tie_P)
    return loss_P.mean().to(logprobs_T.dtype), metrics


def ipo_loss(
    logprobs_T: torch.Tensor,
    ref_logp_T: torch.Tensor,
    mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    beta: float,
) -> tuple[torch.Tensor, Metrics]:
    """Per token, so that long answers are not further apart just for their length."""
    gain_B = _gains(logprobs_T, ref_logp_T, mask_T, cu_seqlens)
    gain_B = gain_B / sequence_count(mask_T, cu_seqlens).clamp(min=1)
    chosen_P, rejected_P = _pairs(gain_B)
    loss_P = (chosen_P - rejected_P - 1 / (2 * beta)).square()
    tie_P = torch.full_like(loss_P, beta * ROUNDING * 2)  # the error of two means
    metrics = _metrics(loss_P, beta * chosen_P, beta * rejected_P, tie_P)
    return loss_P.mean().to(logprobs_T.dtype), metrics


def reward_model_loss(
    values_T: torch.Tensor, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, Metrics]:
    """`values_T` is the value head's output; a sequence's score is the one at its last token."""
    chosen_P, rejected_P = _pairs(values_T[cu_seqlens[1:].long() - 1])
    loss_P = -F.logsigmoid(chosen_P - rejected_P)
    tie_P = ROUNDING * torch.maximum(chosen_P.abs(), rejected_P.abs()).clamp(min=1.0)
    return loss_P.mean(), _metrics(loss_P, chosen_P, rejected_P, tie_P.detach())


def _gains(
    logprobs_T: torch.Tensor,
    ref_logp_T: torch.Tensor,
    mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
) -> torch.Tensor:
    difference_T = logprobs_T.double() - ref_logp_T.detach().double()
    return sequence_sum(difference_T, mask_T, cu_seqlens)


def _pairs(x_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if len(x_B) % 2 or not len(x_B):
        raise ValueError(
            f"a batch of preferences holds pairs of chosen and rejected, got {len(x_B)} sequences: "
            "cut batches between pairs, never inside one"
        )
    return x_B[0::2], x_B[1::2]


def _metrics(
    loss_P: torch.Tensor,
    chosen_reward_P: torch.Tensor,
    rejected_reward_P: torch.Tensor,
    tie_P: torch.Tensor,
) -> Metrics:
    """Per pair; the rewards of DPO and IPO are the implicit ones, beta log(pi / pi_ref).

    `tie_P` is the largest margin that rounding explains.
    """
    chosen_P, rejected_P = chosen_reward_P.detach(), rejected_reward_P.detach()
    margin_P = chosen_P - rejected_P
    return {
        "loss": loss_P.detach(),
        "chosen_reward": chosen_P,
        "rejected_reward": rejected_P,
        "reward_margin": margin_P,
        "reward_accuracy": torch.where(margin_P.abs() <= tie_P, 0.5, (margin_P > 0).float()),
    }
