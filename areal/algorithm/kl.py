"""KL between policy and reference, as a penalty in the reward or a term of the loss.

Every estimator is a function of d = log pi - log pi_ref at tokens sampled from pi, and estimates
KL(pi || pi_ref) without bias (k1, k3) or nearly so (k2):

    k1 = d          may be negative, high variance
    k2 = d^2 / 2    its gradient is that of the KL on tokens of the current policy
    k3 = e^-d - 1 + d   never negative, low variance

As a loss, k1 has a gradient of mean 0 (no learning signal) and k3's is that of the reversed KL;
k2 is the sound choice there. As a reward any of them works.

`AdaptiveKlController` adjusts the KL coefficient towards a target divergence:

    controller = AdaptiveKlController(0.1, target=6.0, horizon=10_000)
    rewards = kl_rewards(..., kl_ctl=controller.value)
    controller.update(mean_kl, num_samples)     # once per step

Divergence above the target raises the coefficient, below lowers it, by at most 20 % of
num_samples / horizon per step (proportional control in log space, as in "Fine-Tuning Language
Models from Human Preferences"). Its state is part of a recover point.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from areal.algorithm.segments import token_mean

# A large estimate says little beyond "far away"; unbounded, one token would dominate a batch.
MAX_TOKEN_KL = 10.0
KlEstimator = Callable[[torch.Tensor], torch.Tensor]
MAX_RELATIVE_ERROR = 0.2


def k1(d: torch.Tensor) -> torch.Tensor:
    return d


def k2(d: torch.Tensor) -> torch.Tensor:
    return d.square() / 2


def k3(d: torch.Tensor) -> torch.Tensor:
    return torch.expm1(-d) + d  # expm1: near d = 0 the plain form is rounding noise


def kl_rewards(
    logp: torch.Tensor,
    ref_logp: torch.Tensor,
    mask: torch.Tensor,
    *,
    kl_ctl: float,
    estimator: KlEstimator,
) -> torch.Tensor:
    """The reward of each token for staying near the reference, 0 off the mask.

    `logp` is of the policy that sampled the tokens. Each estimate is clamped to +-MAX_TOKEN_KL.
    """
    kl = estimator(_difference(logp.detach(), ref_logp, mask))
    return -kl_ctl * kl.clamp(-MAX_TOKEN_KL, MAX_TOKEN_KL)


def kl_loss(
    logprobs_T: torch.Tensor,
    ref_logp_T: torch.Tensor,
    mask_T: torch.Tensor,
    *,
    estimator: KlEstimator,
    credit_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean over the mask with gradient, detached estimate per token), to be scaled and added to
    a policy loss. Not clamped: a clamp would stop the gradient where the policy is far away.
    """
    kl_T = estimator(_difference(logprobs_T, ref_logp_T, mask_T))
    return token_mean(kl_T, mask_T, credit_T), kl_T.detach()


def _difference(logp: torch.Tensor, ref_logp: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """d, and 0 off the mask, where every estimator is then 0 as well."""
    return (logp - ref_logp.detach()).masked_fill(~mask.bool(), 0.0)


class AdaptiveKlController:
    def __init__(self, init_value: float, *, target: float, horizon: float) -> None:
        for name, number in (("init_value", init_value), ("target", target), ("horizon", horizon)):
            if not (math.isfinite(number) and number > 0):
                raise ValueError(f"adaptive KL: {name} must be above 0, got {number}")
        self.value = init_value
        self.target = target
        self.horizon = horizon

    def update(self, mean_kl: float, num_samples: int) -> None:
        """`mean_kl` is the KL of the last batch in the unit of `target`."""
        if not math.isfinite(mean_kl):
            raise ValueError(f"adaptive KL: the measured KL must be finite, got {mean_kl}")
        error = mean_kl / self.target - 1
        error = min(max(error, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        # A batch of more samples than the horizon must not turn the factor negative.
        self.value *= 1 + error * min(num_samples / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]
