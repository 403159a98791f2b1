"""From one outcome reward per sequence to one advantage per token.

    rewards [B] -> overlong_penalty -> shape_rewards -> (normalize) -> place_outcome [B, S]
                -> (+ kl_rewards) -> gae or gae_by_turn -> advantages, returns [B, S]

GAE: delta_k = r_k + discount * V_{k+1} - V_k and A_k = delta_k + discount * lambda * A_{k+1} over
the time steps of a sequence. Positions off the mask (tool output, padding) are not steps: they are
skipped without discount, and a reward there belongs to the generated token before it. Without a
critic the values are 0.

Token tensors are aligned to predictions: position t belongs to the token at t + 1. `shift_left`
brings `loss_mask`, `logprobs`, `versions` and `turn_ids` to this alignment.

lambda may be a function of the trajectory, since long answers need one nearer to 1:
`fn(LambdaContext, **kwargs) -> [B]`, named in `LAMBDA_FUNCTIONS` or given by import path.
`evaluate_lambda` calls it and rejects anything but one number in [0, 1] per trajectory: above 1 the
errors of later steps would grow on their way to the first, below 0 they would change sign.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from areal.algorithm import lambda_call
from areal.utils.import_path import signature_of


def overlong_penalty(
    response_lens: torch.Tensor, *, max_new_tokens: int, overlong_tokens: int, factor: float
) -> torch.Tensor:
    """What to add to the rewards `[B]`: 0 up to `max_new_tokens - overlong_tokens` generated
    tokens, from there linearly down to `-factor` at `max_new_tokens` (the soft penalty of DAPO).
    """
    excess = response_lens - (max_new_tokens - overlong_tokens)
    return (-excess / overlong_tokens * factor).clamp(max=0.0)


def shape_rewards(
    rewards: torch.Tensor, *, bias: float, scaling: float, clip: float
) -> torch.Tensor:
    return ((rewards + bias) * scaling).clamp(-clip, clip)


def shift_left(x_BS: torch.Tensor, fill: float = 0) -> torch.Tensor:
    """Move the value of token t + 1 to position t; the last position has no next token."""
    out = torch.roll(x_BS, -1, dims=1)
    out[:, -1] = fill
    return out


def place_outcome(rewards: torch.Tensor, seqlens: torch.Tensor, width: int) -> torch.Tensor:
    """`[B, width]`, zero except at the position that predicts each sequence's last token."""
    last = (seqlens - 2).clamp(min=0)  # a sequence of one token predicts nothing: masked anyway
    out = rewards.new_zeros(len(rewards), width)
    return out.scatter_(1, last[:, None], rewards[:, None])


def gae(
    rewards_BS: torch.Tensor,
    values_BS: torch.Tensor,
    mask_BS: torch.Tensor,
    *,
    discount: float,
    gae_lambda: float | torch.Tensor,
    bootstrap_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One time step is one generated token; (advantages, returns), zero off the mask.

    lambda is a number, or one per sequence `[B]` (see `evaluate_lambda`). `bootstrap_B` is the
    value after the end of sequences truncated by length (`cut_off_values`).
    """
    batch, width = rewards_BS.shape
    rewards_SB, values_SB = rewards_BS.T.contiguous(), values_BS.T.contiguous()
    mask_SB = mask_BS.bool().T.contiguous()
    advantages_SB = torch.zeros_like(rewards_SB)
    running = rewards_BS.new_zeros(batch)
    pending = rewards_BS.new_zeros(batch)
    next_value = rewards_BS.new_zeros(batch) if bootstrap_B is None else bootstrap_B
    for t in range(width - 1, -1, -1):
        on = mask_SB[t]
        pending = pending + rewards_SB[t]
        delta = pending + discount * next_value - values_SB[t]
        running = torch.where(on, delta + discount * gae_lambda * running, running)
        next_value = torch.where(on, values_SB[t], next_value)
        pending = pending.masked_fill(on, 0.0)
        advantages_SB[t] = running
    off_BS = ~mask_BS.bool()
    advantages_BS = advantages_SB.T.contiguous().masked_fill(off_BS, 0.0)
    return advantages_BS, advantages_BS + values_BS.masked_fill(off_BS, 0.0)


def gae_by_turn(
    rewards_BS: torch.Tensor,
    values_BS: torch.Tensor,
    mask_BS: torch.Tensor,
    turn_ids_BS: torch.Tensor,
    *,
    discount: float,
    gae_lambda: float | torch.Tensor,
    bootstrap_B: torch.Tensor | None = None,
    token_rewards_BS: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One time step is one turn: consecutive generated tokens with the same turn id.

    A turn's reward is the sum over its tokens, its value the one at its first token; its advantage
    and return apply to each of its tokens. `token_rewards_BS` (the KL penalty) is not an outcome of
    a turn: it is added to the advantage of its own token only.
    """
    mask_BS = mask_BS.bool()
    check_turn_ids(turn_ids_BS, mask_BS)
    starts_BS = turn_starts(mask_BS, turn_ids_BS)
    step_BS = starts_BS.cumsum(1) - 1  # -1 before the first turn
    num_turns_B = starts_BS.sum(1)
    most = max(int(num_turns_B.max()), 1)
    place_BS = step_BS.clamp(min=0)

    def per_turn(x_BS: torch.Tensor, counts_BS: torch.Tensor) -> torch.Tensor:
        zeros_BK = x_BS.new_zeros(len(x_BS), most)
        return zeros_BK.scatter_add(1, place_BS, x_BS.masked_fill(~counts_BS, 0.0))

    advantages_BK, returns_BK = gae(
        per_turn(rewards_BS, step_BS >= 0),
        per_turn(values_BS, starts_BS),
        torch.arange(most, device=mask_BS.device) < num_turns_B[:, None],
        discount=discount,
        gae_lambda=gae_lambda,
        bootstrap_B=bootstrap_B,
    )
    advantages_BS = advantages_BK.gather(1, place_BS)
    if token_rewards_BS is not None:
        advantages_BS = advantages_BS + token_rewards_BS
    returns_BS = returns_BK.gather(1, place_BS)
    return advantages_BS.masked_fill(~mask_BS, 0.0), returns_BS.masked_fill(~mask_BS, 0.0)


def check_turn_ids(turn_ids_BS: torch.Tensor, mask_BS: torch.Tensor) -> None:
    """ValueError unless the turns of each row's generated tokens count up from 0 or more."""
    # In numpy, which is faster for one group; this runs for every one.
    mask, turns = mask_BS.numpy(force=True).astype(bool), turn_ids_BS.numpy(force=True)
    if not np.count_nonzero(mask * turns):  # one turn on every generated token
        return
    newest = np.maximum.accumulate(np.where(mask, turns, -1), axis=1)
    wrong = mask & ((turns < 0) | (turns < newest))
    if wrong.any():
        row, token = map(int, np.argwhere(wrong)[0])
        raise ValueError(
            "turn_ids must be at least 0 on generated tokens and never fall along a row; row "
            f"{row} has {int(turns[row, token])} at token {token}, after turn "
            f"{int(newest[row, :token].max()) if token else -1}"
        )


def turn_starts(mask_BS: torch.Tensor, turn_ids_BS: torch.Tensor) -> torch.Tensor:
    """True at each generated token whose turn id differs from the previous generated token's."""
    mask_BS = mask_BS.bool()
    positions = torch.arange(mask_BS.shape[1], device=mask_BS.device).expand(mask_BS.shape)
    last_BS = torch.where(mask_BS, positions, -1).cummax(1).values  # latest generated token up to t
    before_BS = last_BS.roll(1, dims=1)
    before_BS[:, :1] = -1
    same_turn_BS = turn_ids_BS.gather(1, before_BS.clamp(min=0)) == turn_ids_BS
    return mask_BS & ((before_BS < 0) | ~same_turn_BS)


def cut_off_values(
    values_BS: torch.Tensor, seqlens: torch.Tensor, no_eos_B: torch.Tensor
) -> torch.Tensor:
    """The bootstrap `[B]`: the value after the last token if truncated by length, else 0."""
    last_B = values_BS.gather(1, (seqlens - 1)[:, None]).squeeze(1)
    return last_B.masked_fill(~no_eos_B.bool(), 0.0)


@dataclass(frozen=True, slots=True)
class LambdaContext:
    """Inputs of a lambda function, per trajectory; all float `[B]`."""

    num_tokens_B: torch.Tensor  # generated tokens
    num_turns_B: torch.Tensor  # turns with a generated token; 1 if turns are unknown
    num_steps_B: torch.Tensor  # the one of the two that is GAE's time step


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
    """The lambda of each trajectory `[B]`; ValueError for an invalid result of `fn`."""
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
