"""Learn from a teacher's log-probabilities of the student's own tokens.

With t the teacher's log-probability of a sampled token, pi the student and N the tokens to learn:

    distillation alone   w_d * -sum (pi / pi_old) (t - sg log pi) / N    a policy gradient whose
                         reward is the teacher's advantage over the student (sg: no gradient)
    beside RL            w_rl * loss_rl + w_d * sum (log pi - t) / N     the reverse KL added

The first is chosen by rl_loss_weight 0.
"""

from __future__ import annotations

import torch


def distillation_loss(
    rl_loss: torch.Tensor,
    logprobs_T: torch.Tensor,
    old_logp_T: torch.Tensor,
    teacher_logp_T: torch.Tensor,
    mask_T: torch.Tensor,
    *,
    rl_loss_weight: float,
    distill_loss_weight: float,
) -> torch.Tensor:
    """`rl_loss` is the policy loss of the same micro-batch; with rl_loss_weight 0 it is not read.

    `old_logp_T` is of the policy that sampled the tokens.
    """
    if rl_loss_weight == 0:
        alone = teacher_policy_loss(logprobs_T, old_logp_T, teacher_logp_T, mask_T)
        return distill_loss_weight * alone
    beside = reverse_kl_loss(logprobs_T, teacher_logp_T, mask_T)
    return rl_loss_weight * rl_loss + distill_loss_weight * beside


def teacher_policy_loss(
    logprobs_T: torch.Tensor,
    old_logp_T: torch.Tensor,
    teacher_logp_T: torch.Tensor,
    mask_T: torch.Tensor,
) -> torch.Tensor:
    off_T = ~mask_T.bool()
    ratio_T = (logprobs_T - old_logp_T.detach()).masked_fill(off_T, 0.0).exp()
    advantage_T = (teacher_logp_T - logprobs_T).detach().masked_fill(off_T, 0.0)
    return -(ratio_T * advantage_T).sum() / mask_T.sum().clamp(min=1)


def reverse_kl_loss(
    logprobs_T: torch.Tensor, teacher_logp_T: torch.Tensor, mask_T: torch.Tensor
) -> torch.Tensor:
    difference_T = (logprobs_T - teacher_logp_T.detach()).masked_fill(~mask_T.bool(), 0.0)
    return difference_T.sum() / mask_T.sum().clamp(min=1)
