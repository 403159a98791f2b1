"""Off-policy correction: the weights that sampled a token are older than those being trained.

`importance_weight` returns w = pi_prox / pi_behave per token; `reject` masks or clamps it where the
two policies are too far apart:

    TIS       level token, action clamp          IcePop   level token, action mask, metric ratio
    MIS       level sequence, metric ratio       KPop     action mask, metric binary_kl
    filters   action mask, metric kl_k1, kl_k2 or kl_k3 of d = log pi_prox - log pi_behave

`m2po_keep` drops the tokens with the largest second moment instead.

Everything is detached float32 over packed tokens `[T]`. Masking a token sets its weight to 0; the
loss still divides by the number of tokens before any masking.

The `*_prox` functions estimate log pi_prox, the policy at the start of the step, without a forward
pass. Known per token: log pi_behave with the version v_b that sampled it, and log pi_theta of the
version v being trained. The estimates target version v - 1:

    loglinear   log pi_behave + a (log pi_theta - log pi_behave)
    linear      log of the same mixture of the probabilities themselves
    rollout     log pi_behave

with a = (v - 1 - v_b) / (v - v_b), assuming an even drift per version. a is 0 for tokens of the
last two versions and for text the model did not write (version -1). `approximation_errors` compares
all of them with a recomputed log pi_prox.
"""

from __future__ import annotations

import torch

from areal.algorithm.kl import k1, k2, k3
from areal.algorithm.segments import sequence_max, sequence_mean, sequence_sum, spread

KL_METRICS = ("kl_k1", "kl_k2", "kl_k3", "binary_kl")
METRICS = ("ratio", *KL_METRICS)
_AGGREGATES = {"sum": sequence_sum, "mean": sequence_mean, "max": sequence_max}
_ESTIMATORS = {"kl_k1": k1, "kl_k2": k2, "kl_k3": k3}


def log_ratio(
    prox_logp_T: torch.Tensor, behave_logp_T: torch.Tensor, mask_T: torch.Tensor
) -> torch.Tensor:
    """log(pi_prox / pi_behave), 0 off the mask and where it is not finite."""
    ratio_T = prox_logp_T.detach().float() - behave_logp_T.float()
    return ratio_T.masked_fill(~mask_T.bool() | ~ratio_T.isfinite(), 0.0)


def importance_weight(
    prox_logp_T: torch.Tensor, behave_logp_T: torch.Tensor, mask_T: torch.Tensor
) -> torch.Tensor:
    return log_ratio(prox_logp_T, behave_logp_T, mask_T).exp() * mask_T


def reject(
    prox_logp_T: torch.Tensor,
    behave_logp_T: torch.Tensor,
    mask_T: torch.Tensor,
    cu_seqlens: torch.Tensor,
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
    The KL metrics are those of `areal.algorithm.kl` with d = log pi_prox - log pi_behave: an upper
    bound on kl_k1 drops tokens that have become likelier, kl_k3 gives more weight to those that
    have become rarer.
    """
    _check_choices(level, action, metric, agg)
    mask_T = mask_T.bool()
    ratio_T = log_ratio(prox_logp_T, behave_logp_T, mask_T)
    if metric == "ratio":
        score_T = ratio_T
    elif metric == "binary_kl":
        score_T = _binary_kl(prox_logp_T, behave_logp_T, mask_T)
    else:
        score_T = _ESTIMATORS[metric](ratio_T)
    if level == "sequence":
        score_T = spread(_AGGREGATES[agg](score_T, mask_T, cu_seqlens), cu_seqlens)
        if metric == "ratio":
            ratio_T = spread(sequence_mean(ratio_T, mask_T, cu_seqlens), cu_seqlens)
    weight_T = ratio_T.exp()
    if action == "clamp":
        return weight_T.clamp(0.0 if lower is None else lower, upper) * mask_T
    if metric == "ratio":  # aggregated as a logarithm, bounded as a ratio
        score_T = score_T.exp()
    keep_T = mask_T & (score_T <= upper)
    if lower is not None:
        keep_T &= score_T >= lower
    return weight_T.masked_fill(~keep_T, 0.0)  # an infinite weight times 0 would be nan


def m2po_keep(
    prox_logp: torch.Tensor,
    behave_logp: torch.Tensor,
    mask: torch.Tensor,
    *,
    threshold: float,
) -> torch.Tensor:
    """Tokens that M2PO learns from: the largest set whose mean of log(pi_prox / pi_behave)^2 is
    below `threshold`, dropping the largest first; at least one stays.

    Any shape; call it on a whole minibatch, since the mean is over all of it. The result multiplies
    the weight of the loss and never narrows the loss mask: the denominator stays.
    """
    mask = mask.bool()
    squares = log_ratio(prox_logp, behave_logp, mask).double().square()[mask]
    if not len(squares):
        return mask
    ascending, order = squares.sort(stable=True)
    means = ascending.cumsum(0) / torch.arange(1, len(squares) + 1, device=mask.device)
    num_kept = (means < threshold).sum().clamp(min=1)  # the means are non-decreasing
    kept = torch.empty_like(order, dtype=torch.bool)
    kept[order] = torch.arange(len(squares), device=mask.device) < num_kept
    return torch.zeros_like(mask).masked_scatter(mask, kept)


def _check_choices(level: str, action: str, metric: str, agg: str) -> None:
    found = {"level": level, "action": action, "metric": metric, "agg": agg}
    allowed = {
        "level": ("token", "sequence"),
        "action": ("mask", "clamp"),
        "metric": METRICS,
        "agg": tuple(_AGGREGATES),
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


def _binary_kl(
    prox_logp_T: torch.Tensor, behave_logp_T: torch.Tensor, mask_T: torch.Tensor
) -> torch.Tensor:
    """The larger of both KLs between "this token" and "any other" under the two policies.

    In float64: most tokens are nearly certain, and 1 - p of a float32 p = 1 - 1e-8 is 0.
    """
    prox_T, behave_T = prox_logp_T.detach().double(), behave_logp_T.double()
    known_T = mask_T & prox_T.isfinite() & behave_T.isfinite()
    tiny = 1e-8
    p_T, q_T = behave_T.exp().clamp(tiny, 1 - tiny), prox_T.exp().clamp(tiny, 1 - tiny)
    kl_T = torch.maximum(_bernoulli_kl(p_T, q_T), _bernoulli_kl(q_T, p_T))
    return kl_T.masked_fill(~known_T, 0.0).float()


def _bernoulli_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


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
    """Per token, 0 off the mask, for each estimate: `<name>/logp_error` |estimate - log pi_prox|
    and `<name>/ratio_error` |pi_estimate / pi_prox - 1|, the importance weight's relative error.
    """
    errors: dict[str, torch.Tensor] = {}
    for name, guess in PROX_GUESSES.items():
        guess_T = guess(logp_T, behave_logp_T, versions_T, version)
        difference_T = (guess_T - prox_logp_T.detach()).masked_fill(~mask_T.bool(), 0.0)
        errors[f"{name}/logp_error"] = difference_T.abs()
        errors[f"{name}/ratio_error"] = torch.expm1(difference_T).abs()
    return errors


def _share(versions_T: torch.Tensor, version: int) -> torch.Tensor:
    """The fraction a of the way from pi_behave to pi_theta at version - 1."""
    behind_T = (version - versions_T).float()
    share_T = ((behind_T - 1) / behind_T.clamp(min=1)).clamp(0.0, 1.0)
    return torch.where(versions_T < 0, 0.0, share_T)
