"""From one outcome reward per sequence to one advantage per token.

    rewards [B] -> overlong_penalty -> shape_rewards -> (normalize) -> place_outcome [B, S] -> gae

Token tensors here are aligned to predictions: position t belongs to the token at t + 1, which is
where `shift_left` brings `loss_mask`, `logprobs`, `versions` and `turn_ids`, all of them alike.
"""

from __future__ import annotations

import torch


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
    """Bring what is known of token t + 1 to position t; the last position has no next token."""
    out = torch.roll(x_BS, -1, dims=1)
    out[:, -1] = fill
    return out


def place_outcome(rewards: torch.Tensor, seqlens: torch.Tensor, width: int) -> torch.Tensor:
    """`[B, width]`, zero but for the position that predicts each sequence's last token."""
    last = (seqlens - 2).clamp(min=0)  # a sequence of one token predicts nothing: masked anyway
    out = rewards.new_zeros(len(rewards), width)
    return out.scatter_(1, last[:, None], rewards[:, None])


def gae(
    rewards_BS: torch.Tensor,
    values_BS: torch.Tensor,
    mask_BS: torch.Tensor,
    *,
    discount: float,
    gae_lambda: float,
    bootstrap_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) `[B, S]`, zero off the mask.

    One time step is one generated token: positions off the mask (tool output, padding) are
    stepped over without discount, and a reward found there belongs to the generated token
    before it. `bootstrap_B` is the value after the end, for sequences cut off by length.
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
    advantages_BS = advantages_SB.T.contiguous() * mask_BS
    return advantages_BS, advantages_BS + values_BS * mask_BS
