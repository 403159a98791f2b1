"""The critic's loss: values towards returns, each step kept near the values of the rollout."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

HUBER_DELTA = 10.0  # above this error the pull stays constant; rewards are of order 1


def squared_error(values: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    return (values - returns).square() / 2


def huber_error(values: torch.Tensor, returns: torch.Tensor) -> torch.Tensor:
    return F.huber_loss(values, returns, reduction="none", delta=HUBER_DELTA)


def value_loss(
    values_T: torch.Tensor,
    old_values_T: torch.Tensor,
    returns_T: torch.Tensor,
    mask_T: torch.Tensor,
    *,
    eps_clip: float,
    error: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = squared_error,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean over the mask of the larger error, of V and of V clipped to V_old +- eps_clip.

    A value that has already moved by more than eps_clip towards its return gets no gradient.
    """
    mask_T = mask_T.bool()
    # Off the mask anything may lie, also what is not finite.
    values_T, old_values_T, returns_T = (
        x_T.masked_fill(~mask_T, 0.0)
        for x_T in (values_T, old_values_T.detach(), returns_T.detach())
    )
    near_T = old_values_T + (values_T - old_values_T).clamp(-eps_clip, eps_clip)
    plain_T, clipped_T = error(values_T, returns_T), error(near_T, returns_T)
    loss_T = torch.maximum(plain_T, clipped_T)
    metrics = {
        "loss": loss_T.detach(),
        "clip_ratio": (plain_T < clipped_T).detach() & mask_T,
    }
    return loss_T.sum() / mask_T.sum().clamp(min=1), metrics
