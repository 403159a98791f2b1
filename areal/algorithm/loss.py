"""Losses over packed tokens: policy gradient, critic, supervised fine-tuning, distillation.

A policy loss is a function `(LossInputs, options) -> (loss, metrics)`: a scalar to minimise, the
mean over all tokens of the loss mask by their credit, and detached per-token tensors worth
recording. With r = pi_theta / pi_prox, A the advantage and w the weight of a token:

    ppo     -w min(r A, clip(r) A)
    gspo    the same with r and A averaged over the sequence (r geometrically)
    sapo    -w (4 / tau) sigmoid(tau (r - 1)) A        a soft gate in place of the clip
    cispo   -w stop_gradient(clip(r)) A log pi_theta   every token keeps its gradient

Every mean divides by the credit of the mask, whatever the weights are: a token that was rejected
(w = 0, by rejection sampling or M2PO) counts as a loss of 0, so parts of a batch add up to the
whole. Credit is 1 / (rows of the token's episode): an episode weighs as one row, however many it
has.
`own_loss` makes such a loss of a user's function, which may return a loss per token instead.

`value_loss` moves the critic's values towards returns, clipped around the values of the rollout.
`sft_loss` is the mean cross-entropy of the tokens under the loss mask. `distillation_loss` learns
from a teacher's log-probabilities t of the student's own tokens; with N the tokens to learn:

    distillation alone   w_d * -sum (pi / pi_old) (t - sg log pi) / N    a policy gradient whose
    (rl_loss_weight 0)   reward is the teacher's advantage over the student (sg: no gradient)
    beside RL            w_rl * loss_rl + w_d * sum (log pi - t) / N     the reverse KL added
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from areal.algorithm.segments import sequence_mean, spread, token_mean

Metrics = dict[str, torch.Tensor]
HUBER_DELTA = 10.0  # the gradient is constant above this error; rewards are of order 1


@dataclass(frozen=True, slots=True)
class LossInputs:
    """One packed micro-batch; position t belongs to the token at t + 1."""

    logprobs_T: torch.Tensor  # log pi_theta, with gradient
    prox_logp_T: torch.Tensor  # log of the policy the ratio is clipped around
    advantages_T: torch.Tensor
    mask_T: torch.Tensor  # bool, the tokens to learn from
    weight_T: torch.Tensor | None = None  # pi_prox / pi_behave, 0 where rejected; None is 1
    cu_seqlens: torch.Tensor | None = None  # [B + 1], start of each sequence; for gspo
    behave_logp_T: torch.Tensor | None = None  # log of the policy that sampled
    versions_T: torch.Tensor | None = None  # its version, -1 on text the model did not write
    credit_T: torch.Tensor | None = None  # 1 / (rows of the token's episode); None is 1


def ppo_clip_loss(
    inputs: LossInputs,
    *,
    eps_clip: float,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """r is clipped to [1 - eps_clip, 1 + eps_clip_higher], the latter eps_clip by default.

    `c_clip` > 1 bounds the loss of a bad token (A < 0) at c_clip |A| (dual clip). With weights
    this is decoupled PPO.
    """
    ratio_T = _log_ratio(inputs).exp()
    return _clipped(inputs, ratio_T, inputs.advantages_T, eps_clip, eps_clip_higher, c_clip)


def gspo_loss(
    inputs: LossInputs,
    *,
    eps_clip: float,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """PPO on sequences: all tokens of one share r = exp(mean log r) and A = mean A."""
    if inputs.cu_seqlens is None:
        raise ValueError("gspo needs cu_seqlens, the bounds of the packed sequences")
    mask_T, cu_seqlens = inputs.mask_T, inputs.cu_seqlens
    ratio_B = sequence_mean(_log_ratio(inputs), mask_T, cu_seqlens).exp()
    advantage_B = sequence_mean(inputs.advantages_T, mask_T, cu_seqlens)
    ratio_T, advantages_T = spread(ratio_B, cu_seqlens), spread(advantage_B, cu_seqlens)
    return _clipped(inputs, ratio_T, advantages_T, eps_clip, eps_clip_higher, c_clip)


def sapo_loss(
    inputs: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> tuple[torch.Tensor, Metrics]:
    """The gate falls off smoothly on both sides of r = 1, faster for bad tokens (A <= 0)."""
    ratio_T = _log_ratio(inputs).exp()
    tau_T = torch.where(inputs.advantages_T > 0, tau_pos, tau_neg)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T
    metrics = {"importance_weight": ratio_T.detach(), "sapo_gate": gate_T.detach()}
    return _masked_mean(-gate_T * inputs.advantages_T, inputs, metrics)


def cispo_loss(
    inputs: LossInputs, *, eps_clip: float, eps_clip_higher: float
) -> tuple[torch.Tensor, Metrics]:
    """A clipped ratio is only a weight here; eps_clip 1 leaves the lower side open."""
    ratio_T = _log_ratio(inputs).exp().detach()
    clipped_T = ratio_T.clamp(1.0 - eps_clip, 1.0 + eps_clip_higher)
    metrics = {
        "importance_weight": ratio_T,
        "clip_ratio": (clipped_T != ratio_T) & inputs.mask_T,
    }
    # Off the mask log pi may be -inf, and 0 * inf has no gradient.
    logprobs_T = inputs.logprobs_T.masked_fill(~inputs.mask_T, 0.0)
    return _masked_mean(-clipped_T * inputs.advantages_T * logprobs_T, inputs, metrics)


def own_loss(
    inputs: LossInputs, *, fn: Callable[..., Any], name: str, options: dict[str, Any]
) -> tuple[torch.Tensor, Metrics]:
    """A user's `fn(inputs, **options)` as a policy loss; `name` is used in errors.

    It returns a loss per token `[T]`, of which areal takes the weighted mean over the mask, or that
    mean itself, as the losses above do (`token_mean` with `inputs.credit_T`); alone or with a dict
    of metrics `[T]`. Off the mask every input is 0, so that nothing a function computes there can
    overflow.
    """
    found: tuple[Any, ...] | torch.Tensor = fn(_zero_off_mask(inputs), **options)
    loss, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, Metrics())
    num_tokens = len(inputs.mask_T)
    if not isinstance(loss, torch.Tensor) or list(loss.shape) not in ([num_tokens], []):
        kind = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(
            f"{name} returned {kind}, expected a loss for each of the {num_tokens} tokens, or "
            "their mean, alone or with a dict of metrics"
        )
    if torch.is_grad_enabled() and inputs.logprobs_T.requires_grad and not loss.requires_grad:
        raise ValueError(
            f"{name} returned a loss without a gradient: compute it from inputs.logprobs_T, and "
            "not from what detach() gives"
        )
    metrics = _checked_metrics(metrics, num_tokens, name)
    if loss.ndim == 1:
        return _masked_mean(loss, inputs, metrics)
    return loss, metrics


def _zero_off_mask(inputs: LossInputs) -> LossInputs:
    off_T = ~inputs.mask_T
    per_token = ("logprobs_T", "prox_logp_T", "advantages_T", "weight_T", "behave_logp_T")
    given = {key: getattr(inputs, key) for key in per_token}
    return replace(
        inputs,
        **{key: x_T.masked_fill(off_T, 0.0) for key, x_T in given.items() if x_T is not None},
    )


def _checked_metrics(metrics: object, num_tokens: int, name: str) -> Metrics:
    if not isinstance(metrics, dict):
        kind = type(metrics).__name__
        raise ValueError(f"{name} returned {kind} beside the loss, expected a dict of metrics")
    given: dict[Any, Any] = {**metrics}
    for key, value_T in given.items():
        if not isinstance(value_T, torch.Tensor) or list(value_T.shape) != [num_tokens]:
            kind = getattr(value_T, "shape", None)
            kind = type(value_T).__name__ if kind is None else list(kind)
            raise ValueError(
                f"{name} returned {kind} as the metric {key!r}, expected a number for each of the "
                f"{num_tokens} tokens"
            )
    return {str(key): value_T.detach() for key, value_T in given.items()}


def _log_ratio(inputs: LossInputs) -> torch.Tensor:
    """log(pi_theta / pi_prox), 0 off the mask: there the two are unrelated, exp of the difference
    may overflow, and inf * 0 would poison the sum.
    """
    difference_T = inputs.logprobs_T - inputs.prox_logp_T.detach()
    return difference_T.masked_fill(~inputs.mask_T, 0.0)


def _clipped(
    inputs: LossInputs,
    ratio_T: torch.Tensor,
    advantages_T: torch.Tensor,
    eps_clip: float,
    eps_clip_higher: float | None,
    c_clip: float | None,
) -> tuple[torch.Tensor, Metrics]:
    higher = eps_clip if eps_clip_higher is None else eps_clip_higher
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1.0 - eps_clip, 1.0 + higher)
    loss_T = torch.maximum(plain_T, clipped_T)
    metrics = {
        "importance_weight": ratio_T.detach(),
        "clip_ratio": (plain_T < clipped_T).detach() & inputs.mask_T,
    }
    if c_clip is not None:
        bound_T = c_clip * advantages_T.abs()
        metrics["dual_clip_ratio"] = (bound_T < loss_T).detach() & inputs.mask_T
        loss_T = torch.minimum(loss_T, bound_T)
    return _masked_mean(loss_T, inputs, metrics)


def _masked_mean(
    loss_T: torch.Tensor, inputs: LossInputs, metrics: Metrics
) -> tuple[torch.Tensor, Metrics]:
    off_T = ~inputs.mask_T
    if inputs.weight_T is not None:
        loss_T = loss_T * inputs.weight_T.detach().masked_fill(off_T, 0.0)
    loss_T = loss_T.masked_fill(off_T, 0.0)
    metrics["loss"] = loss_T.detach()
    return token_mean(loss_T, inputs.mask_T, inputs.credit_T), metrics


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
    credit_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean over the mask of the larger error, of V and of V clipped to V_old +- eps_clip.

    A value that has already moved by more than eps_clip towards its return gets no gradient.
    """
    mask_T = mask_T.bool()
    # Values off the mask are arbitrary, possibly not finite.
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
    return token_mean(loss_T, mask_T, credit_T), metrics


def sft_loss(logprobs_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """`mask_T` is aligned to predictions: True at t when the token at t + 1 is to be learned."""
    mask_T = mask_T.bool()
    return -token_mean(logprobs_T.masked_fill(~mask_T, 0.0), mask_T)


def distillation_loss(
    rl_loss: torch.Tensor,
    logprobs_T: torch.Tensor,
    old_logp_T: torch.Tensor,
    teacher_logp_T: torch.Tensor,
    mask_T: torch.Tensor,
    *,
    rl_loss_weight: float,
    distill_loss_weight: float,
    credit_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rl_loss` is the policy loss of the same micro-batch; with rl_loss_weight 0 it is not read.

    `old_logp_T` is of the policy that sampled the tokens.
    """
    if rl_loss_weight == 0:
        alone = teacher_policy_loss(logprobs_T, old_logp_T, teacher_logp_T, mask_T, credit_T)
        return distill_loss_weight * alone
    beside = reverse_kl_loss(logprobs_T, teacher_logp_T, mask_T, credit_T)
    return rl_loss_weight * rl_loss + distill_loss_weight * beside


def teacher_policy_loss(
    logprobs_T: torch.Tensor,
    old_logp_T: torch.Tensor,
    teacher_logp_T: torch.Tensor,
    mask_T: torch.Tensor,
    credit_T: torch.Tensor | None = None,
) -> torch.Tensor:
    off_T = ~mask_T.bool()
    ratio_T = (logprobs_T - old_logp_T.detach()).masked_fill(off_T, 0.0).exp()
    advantage_T = (teacher_logp_T - logprobs_T).detach().masked_fill(off_T, 0.0)
    return -token_mean(ratio_T * advantage_T, mask_T, credit_T)


def reverse_kl_loss(
    logprobs_T: torch.Tensor,
    teacher_logp_T: torch.Tensor,
    mask_T: torch.Tensor,
    credit_T: torch.Tensor | None = None,
) -> torch.Tensor:
    difference_T = (logprobs_T - teacher_logp_T.detach()).masked_fill(~mask_T.bool(), 0.0)
    return token_mean(difference_T, mask_T, credit_T)
