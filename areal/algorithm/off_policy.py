"""Correct for the weights that sampled a token being older than those now trained.

`importance_weight` gives each token w = pi_prox / pi_behave; `reject` masks or clamps it where the
two policies are too far apart (TIS, IcePop, sequence masks, KL filters, KPop are all settings of
it); `loglinear_prox` guesses log pi_prox without another forward pass.

Everything is detached float32 over packed tokens `[T]`. Masking a token makes its weight 0; the
loss still divides by the number of tokens before any masking.
"""

from __future__ import annotations

import torch

KL_METRICS = ("kl_k1", "kl_k2", "kl_k3", "binary_kl")
METRICS = ("ratio", *KL_METRICS)


def log_ratio(
    prox_logp_T: torch.Tensor, behave_logp_T: torch.Tensor, mask_T: torch.Tensor
) -> torch.Tensor:
    """log(pi_prox / pi_behave), 0 off the mask and where it is not finite."""
    ratio = prox_logp_T.detach().float() - behave_logp_T.float()
    return torch.nan_to_num(ratio, nan=0.0, posinf=0.0, neginf=0.0) * mask_T


def importance_weight(
    prox_logp_T: torch.Tensor, behave_logp_T: torch.Tensor, mask_T: torch.Tensor
) -> torch.Tensor:
    return log_ratio(prox_logp_T, behave_logp_T, mask_T).exp() * mask_T


def reject(
    prox_logp_T: torch.Tensor,
    behave_logp_T: torch.Tensor,
    mask_T: torch.Tensor,
    seq_ids_T: torch.Tensor,
    *,
    level: str,
    action: str,
    metric: str,
    agg: str,
    upper: float,
    lower: float | None,
) -> torch.Tensor:
    """The importance weights `[T]`, masked or clamped where `metric` leaves [lower, upper].

    At level "sequence" the metric is aggregated over a sequence's masked tokens and decides for
    all of them; with metric "ratio" every token then carries the sequence's geometric mean ratio.
    """
    _check_choices(level, action, metric, agg)
    mask_T = mask_T.bool()
    ratio_T = log_ratio(prox_logp_T, behave_logp_T, mask_T)
    weight_T = ratio_T.exp()
    if metric == "ratio":
        score_T = ratio_T
    else:
        score_T = _divergence(metric, prox_logp_T.detach().float(), behave_logp_T.float(), ratio_T)
    if level == "sequence":
        score_T = _aggregate(score_T, mask_T, seq_ids_T, agg)
        if metric == "ratio":
            weight_T = _aggregate(ratio_T, mask_T, seq_ids_T, "mean").exp()
    if action == "clamp":
        return weight_T.clamp(0.0 if lower is None else lower, upper) * mask_T
    if metric == "ratio":  # aggregated as a logarithm, bounded as a ratio
        score_T = score_T.exp()
    keep_T = mask_T & (score_T <= upper)
    if lower is not None:
        keep_T &= score_T >= lower
    return weight_T * keep_T


def loglinear_prox(
    logp_T: torch.Tensor, behave_logp_T: torch.Tensor, versions_T: torch.Tensor, version: int
) -> torch.Tensor:
    """log pi of version - 1, interpolated between the sampling weights and the current ones.

    log pi_prox = log pi_b + a (log pi - log pi_b) with a = (version - 1 - v_b) / (version - v_b):
    policies are taken to drift evenly per version. Tokens of the last two versions, and text the
    model did not write (version -1), keep log pi_b.
    """
    behind = (version - versions_T).float()
    share = ((behind - 1) / behind.clamp(min=1)).clamp(0.0, 1.0)
    share = torch.where(versions_T < 0, 0.0, share)
    return behave_logp_T + share * (logp_T.detach() - behave_logp_T)


def _check_choices(level: str, action: str, metric: str, agg: str) -> None:
    found = {"level": level, "action": action, "metric": metric, "agg": agg}
    allowed = {
        "level": ("token", "sequence"),
        "action": ("mask", "clamp"),
        "metric": METRICS,
        "agg": ("sum", "mean", "max"),
    }
    for key, value in found.items():
        if value not in allowed[key]:
            raise ValueError(
                f"rejection_sampling.{key} must be one of {allowed[key]}, got {value!r}"
            )
    if action == "clamp" and metric != "ratio":
        raise ValueError(
            f"rejection_sampling.action=clamp bounds a ratio, so metric={metric!r} cannot be used "
            "with it: set metric=ratio or action=mask"
        )


def _divergence(
    metric: str, prox_T: torch.Tensor, behave_T: torch.Tensor, ratio_T: torch.Tensor
) -> torch.Tensor:
    """Per-token estimates of KL(behave || prox) from the sampled token."""
    if metric == "kl_k1":
        return -ratio_T
    if metric == "kl_k2":
        return ratio_T.square() / 2
    if metric == "kl_k3":
        return ratio_T.exp() - 1 - ratio_T
    tiny = 1e-8
    p, q = behave_T.exp().clamp(tiny, 1 - tiny), prox_T.exp().clamp(tiny, 1 - tiny)
    return torch.maximum(_bernoulli_kl(p, q), _bernoulli_kl(q, p))


def _bernoulli_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def _aggregate(
    x_T: torch.Tensor, mask_T: torch.Tensor, seq_ids_T: torch.Tensor, agg: str
) -> torch.Tensor:
    """Sum, mean or max over each sequence's masked tokens, given back to every token."""
    num_seqs = int(seq_ids_T[-1]) + 1
    if agg == "max":
        out = x_T.new_full((num_seqs,), float("-inf"))
        out.scatter_reduce_(0, seq_ids_T, x_T.masked_fill(~mask_T, float("-inf")), "amax")
        return out.masked_fill(out == float("-inf"), 0.0)[seq_ids_T]
    out = x_T.new_zeros(num_seqs).index_add_(0, seq_ids_T, x_T * mask_T)
    if agg == "mean":
        out /= x_T.new_zeros(num_seqs).index_add_(0, seq_ids_T, mask_T.to(x_T.dtype)).clamp(min=1)
    return out[seq_ids_T]
