"""lambda of GAE as a function of the trajectory: long answers want a lambda nearer to 1.

A lambda function is `fn(LambdaContext, **kwargs) -> [B]`, named in `LAMBDA_FUNCTIONS` or given by
import path; `evaluate_lambda` calls it and refuses anything but one number from 0 to 1 per
trajectory: above 1 the errors of later steps would grow on their way to the first, below 0 they
would change sign.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from areal.algorithm.advantage import check_turn_ids, turn_starts
from areal.algorithm.calls import lambda_call
from areal.utils.signatures import signature_of


@dataclass(frozen=True, slots=True)
class LambdaContext:
    """What a lambda function may know of each trajectory; all float `[B]`."""

    num_tokens_B: torch.Tensor  # generated tokens
    num_turns_B: torch.Tensor  # turns with a generated token; 1 where turns are not known
    num_steps_B: torch.Tensor  # whichever of the two is the time step of GAE


LambdaFunction = Callable[..., torch.Tensor]


def lambda_context(
    mask_BS: torch.Tensor, turn_ids_BS: torch.Tensor | None, *, unit: str
) -> LambdaContext:
    """`unit` is the time step of GAE, "token" or "turn"."""
    if unit not in ("token", "turn"):
        raise ValueError(f"gae_timestep_unit must be 'token' or 'turn', got {unit!r}")
    num_tokens_B = mask_BS.sum(1).float()
    if turn_ids_BS is None:
        num_turns_B = (num_tokens_B > 0).float()
    else:
        check_turn_ids(turn_ids_BS, mask_BS)
        num_turns_B = turn_starts(mask_BS, turn_ids_BS).sum(1).float()
    return LambdaContext(
        num_tokens_B, num_turns_B, num_tokens_B if unit == "token" else num_turns_B
    )


def vapo_lambda(context: LambdaContext, *, alpha: float = 0.05) -> torch.Tensor:
    """1 - 1 / (alpha * L), at least 0: the sum of its powers grows with the length (VAPO)."""
    if not 0 < alpha < float("inf"):
        raise ValueError(f"gae_lambda_kwargs.alpha must be above 0, got {alpha}")
    return (1 - 1 / (alpha * context.num_steps_B.clamp(min=1))).clamp(min=0.0)


def relative_position_lambda(context: LambdaContext, *, q: float) -> torch.Tensor:
    """q^(1 / (L - 1)): the last step's error reaches the first one with weight q at any length."""
    if not 0 <= q <= 1:
        raise ValueError(f"gae_lambda_kwargs.q must lie between 0 and 1, got {q}")
    return torch.pow(q, 1 / (context.num_steps_B - 1).clamp(min=1))


def evaluate_lambda(
    fn: Callable[..., object], context: LambdaContext, /, **kwargs: Any
) -> torch.Tensor:
    """The lambda of each trajectory `[B]`, or a ValueError that says what is wrong with `fn`."""
    expected = list(context.num_steps_B.shape)
    who = f"gae_lambda function {getattr(fn, '__qualname__', fn)}"  # any callable of the user
    lambda_call(kwargs).require(signature_of(fn), who)
    found = fn(context, **kwargs)
    if not isinstance(found, torch.Tensor) or not found.is_floating_point():
        kind = found.dtype if isinstance(found, torch.Tensor) else type(found).__name__
        raise ValueError(f"{who} returned {kind}, expected a float tensor of shape {expected}")
    if list(found.shape) != expected:
        raise ValueError(
            f"{who} returned shape {list(found.shape)}, expected {expected}: one number for each "
            "trajectory"
        )
    wrong_B = ~((found >= 0) & (found <= 1))  # NaN is neither
    if bool(wrong_B.any()):
        row = int(wrong_B.nonzero()[0])
        raise ValueError(
            f"{who} returned {found[row].item()} for a trajectory of "
            f"{context.num_steps_B[row].item():.0f} steps, expected a number from 0 to 1"
        )
    return found
