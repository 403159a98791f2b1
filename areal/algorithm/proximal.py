"""log pi_prox without a forward pass: the policy the step began with, guessed from its neighbours.

Known of each token: log pi_behave with the version v_b that sampled it, and log pi_theta of the
version v being trained. The guesses target version v - 1:

    loglinear   log pi_behave + a (log pi_theta - log pi_behave)
    linear      log of the same mixture of the probabilities themselves
    rollout     log pi_behave

with a = (v - 1 - v_b) / (v - v_b): policies are taken to drift evenly per version. a is 0 for
tokens of the last two versions and for text the model did not write (version -1).
`approximation_errors` compares all of them with a recomputed log pi_prox.
"""

from __future__ import annotations

import torch


def loglinear_prox(
    logp_T: torch.Tensor, behave_logp_T: torch.Tensor, versions_T: torch.Tensor, version: int
) -> torch.Tensor:
    share_T = _share(versions_T, version)
    return behave_logp_T + share_T * (logp_T.detach() - behave_logp_T)


def linear_prox(
    logp_T: torch.Tensor, behave_logp_T: torch.Tensor, versions_T: torch.Tensor, version: int
) -> torch.Tensor:
    """log((1 - a) pi_behave + a pi_theta), by logaddexp so that small probabilities survive."""
    share_T = _share(versions_T, version)
    mixed_T = torch.logaddexp(
        torch.log1p(-share_T) + behave_logp_T, share_T.log() + logp_T.detach()
    )
    return torch.where(share_T > 0, mixed_T, behave_logp_T)


def rollout_prox(
    logp_T: torch.Tensor, behave_logp_T: torch.Tensor, versions_T: torch.Tensor, version: int
) -> torch.Tensor:
    return behave_logp_T


PROX_GUESSES = {"loglinear": loglinear_prox, "linear": linear_prox, "rollout": rollout_prox}


def approximation_errors(
    prox_logp_T: torch.Tensor,
    logp_T: torch.Tensor,
    behave_logp_T: torch.Tensor,
    versions_T: torch.Tensor,
    version: int,
    mask_T: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Per token, 0 off the mask, for each guess: `<guess>/logp_error` |guess - log pi_prox| and
    `<guess>/ratio_error` |pi_guess / pi_prox - 1|, the relative error of the importance weight.
    """
    errors: dict[str, torch.Tensor] = {}
    for name, guess in PROX_GUESSES.items():
        guess_T = guess(logp_T, behave_logp_T, versions_T, version)
        difference_T = (guess_T - prox_logp_T.detach()).masked_fill(~mask_T.bool(), 0.0)
        errors[f"{name}/logp_error"] = difference_T.abs()
        errors[f"{name}/ratio_error"] = torch.expm1(difference_T).abs()
    return errors


def _share(versions_T: torch.Tensor, version: int) -> torch.Tensor:
    """How much of the way from pi_behave to pi_theta version - 1 had gone."""
    behind_T = (version - versions_T).float()
    share_T = ((behind_T - 1) / behind_T.clamp(min=1)).clamp(0.0, 1.0)
    return torch.where(versions_T < 0, 0.0, share_T)
