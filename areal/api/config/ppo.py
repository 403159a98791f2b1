"""The `actor` section of reinforcement learning: from rewards to advantages to the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from areal.api.config.checks import (
    require,
    require_above,
    require_at_least,
    require_finite,
    require_fraction,
)
from areal.api.config.train_engine import NormConfig, TrainEngineConfig


@dataclass(kw_only=True)
class RejectionSamplingConfig:
    """What happens to tokens whose behaviour policy is too far from the proximal one."""

    level: Literal["token", "sequence"] = "token"
    """Judge each token, or each sequence as a whole."""
    action: Literal["mask", "clamp"] = "mask"
    """Drop what lies outside the bounds, or clamp its weight to them."""
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"] = "ratio"
    """What is compared with the bounds."""
    agg: Literal["sum", "mean", "max"] = "mean"
    """How the tokens of a sequence make its metric; used at level `sequence`."""
    upper: float = 5.0
    """Largest accepted metric."""
    lower: float | None = None
    """Smallest accepted metric."""

    def __post_init__(self) -> None:
        require_above(0, upper=self.upper)
        if self.lower is not None:
            require(
                self.lower < self.upper, f"lower must be below upper ({self.upper})", self.lower
            )
        if self.action == "clamp":
            require(
                self.metric == "ratio", "metric must be 'ratio' with action 'clamp'", self.metric
            )


@dataclass(kw_only=True)
class PPOActorConfig(TrainEngineConfig):
    """The trained policy. GRPO is PPO with `reward_norm` by group and no critic."""

    ppo_n_minibatches: int = 4
    """Optimizer steps per batch."""
    eps_clip: float = 0.2
    """The probability ratio is clipped to [1 - eps_clip, 1 + eps_clip]."""
    eps_clip_higher: float | None = None
    """Another bound above 1. Default: eps_clip."""
    c_clip: float | None = None
    """Dual clip: bounds the loss of tokens with negative advantage; above 1."""
    reward_norm: NormConfig | None = None
    """Normalisation of rewards; `mean_level: group, std_level: group` is GRPO."""
    reward_scaling: float = 1.0
    """Rewards become (reward + reward_bias) * reward_scaling."""
    reward_bias: float = 0.0
    """Added to every reward before scaling."""
    reward_clip: float = 20.0
    """Scaled rewards are clipped to +- this."""
    overlong_reward_penalty: bool = False
    """Take reward away as the answer comes near max_new_tokens (DAPO)."""
    overlong_tokens: int | None = None
    """The penalty grows over the last this many tokens."""
    overlong_penalty_factor: float | None = None
    """Penalty of an answer of full length."""
    max_new_tokens: int | None = None
    """Full length of an answer, for the penalty. Default: gconfig.max_new_tokens."""
    mask_no_eos_with_zero: bool = False
    """Answers cut off by length get reward 0."""
    discount: float = 1.0
    """Discount of rewards per token."""
    gae_lambda: float = 1.0
    """Decay of generalised advantage estimation."""
    adv_norm: NormConfig | None = None
    """Normalisation of advantages over the loss tokens."""
    recompute_logprob: bool = False
    """Compute the batch's log-probabilities again with the weights at the start of the step."""
    use_decoupled_loss: bool = False
    """Clip around the weights at the start of the step and weight tokens by their own policy."""
    rejection_sampling: RejectionSamplingConfig | None = None
    """Bounds on that weight; needs use_decoupled_loss."""
    prox_logp_method: Literal["recompute", "loglinear"] = "recompute"
    """How log-probabilities at the start of the step are found: a forward pass, or an estimate."""
    importance_sampling_level: Literal["token"] = "token"
    """Ratios per token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, ppo_n_minibatches=self.ppo_n_minibatches)
        require_at_least(0, eps_clip=self.eps_clip, eps_clip_higher=self.eps_clip_higher)
        require_above(1, c_clip=self.c_clip)
        require_above(0, reward_clip=self.reward_clip)
        require_finite(reward_scaling=self.reward_scaling, reward_bias=self.reward_bias)
        require_fraction(discount=self.discount, gae_lambda=self.gae_lambda)
        self._check_overlong()
        if self.rejection_sampling is not None:
            require(
                self.use_decoupled_loss,
                "use_decoupled_loss must be true for rejection_sampling to act",
                self.use_decoupled_loss,
            )

    def _check_overlong(self) -> None:
        require_at_least(
            1, overlong_tokens=self.overlong_tokens, max_new_tokens=self.max_new_tokens
        )
        require_at_least(0, overlong_penalty_factor=self.overlong_penalty_factor)
        if self.overlong_reward_penalty:
            for name in ("overlong_tokens", "overlong_penalty_factor"):
                require(
                    getattr(self, name) is not None,
                    f"{name} must be set with overlong_reward_penalty",
                    None,
                )
