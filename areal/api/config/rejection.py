"""The `actor.rejection_sampling` section: which tokens are too far off-policy to learn from.

TIS, IcePop, KPop, sequence masks (MIS) and KL filters are settings of it. The weight it bounds is
pi_prox / pi_behave, which the decoupled loss applies with or without this section.
"""

from __future__ import annotations

from typing import Literal

from areal.api.config.checks import require, require_above
from areal.api.config.section import config_section

# Never below 0, and 0 where the two policies agree.
_DISTANCES = ("kl_k2", "kl_k3", "binary_kl")


@config_section
class RejectionSamplingConfig:
    """What happens to tokens whose behaviour policy is too far from the proximal one."""

    level: Literal["token", "sequence"] = "token"
    """Judge each token, or each sequence as a whole."""
    action: Literal["mask", "clamp"] = "mask"
    """Drop what lies outside the bounds, or clamp its weight to them."""
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"] = "ratio"
    """What is compared with the bounds: the ratio pi_prox / pi_behave, an estimate of their KL
    divergence from d = log pi_prox - log pi_behave (d, d^2 / 2 or exp(-d) - 1 + d), or the larger
    KL between "this token" and "any other" under the two."""
    agg: Literal["sum", "mean", "max"] = "mean"
    """How the tokens of a sequence make its metric; used at level `sequence`."""
    upper: float = 5.0
    """Largest accepted metric."""
    lower: float | None = None
    """Smallest accepted metric. Default: no bound."""

    def __post_init__(self) -> None:
        require_above(0, upper=self.upper)
        if self.level == "token":
            require(
                self.agg == "mean",
                "agg aggregates over a sequence: set level 'sequence' or leave agg out",
                self.agg,
            )
        if self.action == "clamp":
            require(
                self.metric == "ratio", "metric must be 'ratio' with action 'clamp'", self.metric
            )
        if self.metric == "ratio":
            require(
                self.upper >= 1,
                "upper must be at least 1 with metric 'ratio' (equal policies have ratio 1)",
                self.upper,
            )
        self._check_lower()

    def _check_lower(self) -> None:
        if self.lower is None:
            return
        require(self.lower < self.upper, f"lower must be below upper ({self.upper})", self.lower)
        if self.metric == "ratio":
            require(
                0 <= self.lower <= 1,
                "lower must lie between 0 and 1 with metric 'ratio' (equal policies have ratio 1)",
                self.lower,
            )
        require(
            self.metric not in _DISTANCES,
            f"lower must be left out with metric {self.metric!r}: it would reject the tokens on "
            "which the policies agree",
            self.lower,
        )
