"""The `actor` section of reinforcement learning: from rewards to advantages to the loss.

An algorithm is a combination of these keys. Combinations without a meaning are refused here, each
with its reason.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from areal.api.config.checks import (
    require,
    require_above,
    require_at_least,
    require_finite,
    require_fraction,
)
from areal.api.config.rejection import RejectionSamplingConfig
from areal.api.config.section import config_section
from areal.api.config.train_engine import NormConfig, TrainEngineConfig

_CHOSEN_BY = {
    "ppo": "default: leave policy_loss out",
    "gspo": "importance_sampling_level: sequence",
    "sapo": "use_sapo_loss: true",
    "cispo": "use_cispo_loss: true",
}
_KEYS_OF_SHIPPED_LOSSES = (
    "use_sapo_loss",
    "use_cispo_loss",
    "importance_sampling_level",
    "eps_clip",
    "eps_clip_higher",
    "c_clip",
    "sapo_tau_pos",
    "sapo_tau_neg",
)


@config_section
class PPOActorConfig(TrainEngineConfig):
    """The trained policy. GRPO is PPO with `reward_norm` by group and no critic."""

    ppo_n_minibatches: int = 4
    """Optimizer steps per batch."""
    eps_clip: float = 0.2
    """The probability ratio is clipped to [1 - eps_clip, 1 + eps_clip]."""
    eps_clip_higher: float | None = None
    """Another bound above 1 (DAPO). Default: eps_clip."""
    c_clip: float | None = None
    """Dual clip: bounds the loss of tokens with negative advantage; above 1."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratios per token, or one per sequence: the geometric mean of its tokens' (GSPO)."""
    use_sapo_loss: bool = False
    """A smooth gate around ratio 1 in place of the clip (SAPO)."""
    sapo_tau_pos: float = 1.0
    """Steepness of SAPO's gate for tokens with positive advantage."""
    sapo_tau_neg: float = 1.05
    """Steepness of SAPO's gate for the others."""
    use_cispo_loss: bool = False
    """Weight log-probabilities by the clipped ratio, so that no token loses its gradient (CISPO).
    Needs eps_clip_higher."""
    policy_loss: str | None = None
    """Import path of a loss of your own, `my_package.losses.my_loss`, in place of those above.
    Default: the shipped one that they choose (ppo, gspo, sapo or cispo)."""
    policy_loss_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of that function."""
    m2_threshold: float | None = None
    """Drop the most off-policy tokens until the mean squared log-ratio of the rest lies below this
    (M2PO). Needs use_decoupled_loss."""
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
    """Answers cut off by length get reward 0; with a critic, its value of their last token."""
    discount: float = 1.0
    """Discount of rewards per step of gae_timestep_unit."""
    gae_lambda: float | str = 1.0
    """Decay of generalised advantage estimation: a number, or a function of the trajectory by name
    or import path."""
    gae_lambda_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of that function."""
    gae_timestep_unit: Literal["token", "turn"] = "token"
    """What one step of advantage estimation is: a token, or a whole turn of the model."""
    adv_norm: NormConfig | None = None
    """Normalisation of advantages over the loss tokens."""
    kl_ctl: float = 0.0
    """Coefficient of the KL divergence from `ref`, taken off the reward of every token."""
    kl_loss_coef: float = 0.0
    """Coefficient of the KL divergence from `ref`, added to the loss."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """How the divergence is estimated from sampled tokens: d, d^2 / 2 or exp(-d) - 1 + d, with d =
    log pi - log ref. Default: k1, or k3 when kl_loss_coef is used."""
    kl_target: float | None = None
    """Adapt kl_ctl so that the divergence stays near this many nats per answer. Default: kl_ctl is
    constant."""
    kl_horizon: int = 10_000
    """Samples over which kl_ctl adapts; a smaller number adapts faster."""
    recompute_logprob: bool = False
    """Compute the batch's log-probabilities again with the weights at the start of the step."""
    use_decoupled_loss: bool = False
    """Clip around the weights at the start of the step and weight every token by pi_prox /
    pi_behave: those weights over the ones that sampled it."""
    prox_logp_method: Literal["recompute", "loglinear", "metrics", "reuse_train_logp"] = "recompute"
    """How log-probabilities at the start of the step are found: a forward pass, an estimate, a
    forward pass that also measures the estimates' errors, or those of the training pass itself."""
    rejection_sampling: RejectionSamplingConfig | None = None
    """Bounds on that weight; needs use_decoupled_loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, ppo_n_minibatches=self.ppo_n_minibatches)
        require_at_least(0, eps_clip=self.eps_clip, eps_clip_higher=self.eps_clip_higher)
        require_above(1, c_clip=self.c_clip)
        require_above(0, sapo_tau_pos=self.sapo_tau_pos, sapo_tau_neg=self.sapo_tau_neg)
        require_above(0, reward_clip=self.reward_clip)
        require_finite(reward_scaling=self.reward_scaling, reward_bias=self.reward_bias)
        require_fraction(discount=self.discount)
        self._check_policy_loss()
        self.policy_loss = self._chosen_loss()
        self._check_proximal_policy()
        self._check_overlong()
        self._check_lambda()
        self._check_kl()

    @property
    def needs_ref(self) -> bool:
        """Whether the loss or the rewards ask a reference model."""
        return self.kl_ctl > 0 or self.kl_loss_coef > 0

    def _check_policy_loss(self) -> None:
        require(
            not (self.use_sapo_loss and self.use_cispo_loss),
            "use_sapo_loss and use_cispo_loss are two losses: set one of them",
            None,
        )
        for name in ("use_sapo_loss", "use_cispo_loss"):
            if getattr(self, name):
                require(
                    self.importance_sampling_level == "token",
                    f"importance_sampling_level must be 'token' with {name}, a loss of tokens",
                    self.importance_sampling_level,
                )
                require(
                    self.c_clip is None,
                    f"c_clip must be left out with {name}: only the clipped PPO loss has a dual",
                    self.c_clip,
                )
        if self.use_sapo_loss:
            require(
                self.eps_clip_higher is None,
                "eps_clip_higher must be left out with use_sapo_loss: its gate replaces the clip",
                self.eps_clip_higher,
            )
            require(
                not self.use_decoupled_loss,
                "use_decoupled_loss must be false with use_sapo_loss: its gate is defined around "
                "the policy that sampled",
                self.use_decoupled_loss,
            )
        if self.use_cispo_loss:
            require(
                self.eps_clip_higher is not None,
                "eps_clip_higher must be set with use_cispo_loss (the usual bounds are eps_clip 1 "
                "and eps_clip_higher 4)",
                None,
            )
            require(
                (self.eps_clip_higher or 0) > 0,
                "eps_clip_higher must be above 0 with use_cispo_loss: at 0 no token could ever "
                "weigh more than 1",
                self.eps_clip_higher,
            )

    def _chosen_loss(self) -> str:
        """A row of `areal.algorithm.POLICY_LOSSES`, or an import path."""
        shipped = "gspo" if self.importance_sampling_level == "sequence" else "ppo"
        if self.use_sapo_loss or self.use_cispo_loss:
            shipped = "sapo" if self.use_sapo_loss else "cispo"
        if self.policy_loss in (None, shipped):
            require(
                not self.policy_loss_kwargs,
                "policy_loss_kwargs are arguments of a function: name it in policy_loss",
                self.policy_loss_kwargs,
            )
            return shipped
        chosen = _CHOSEN_BY.get(self.policy_loss)
        require(
            chosen is None,
            f"policy_loss {self.policy_loss} is chosen by {chosen}",
            self.policy_loss,
        )
        require(
            "." in self.policy_loss,
            "policy_loss must be the import path of a function, like my_package.losses.my_loss",
            self.policy_loss,
        )
        for name in _KEYS_OF_SHIPPED_LOSSES:
            value, default = getattr(self, name), getattr(PPOActorConfig, name)
            require(
                value == default,
                f"{name} must be left out with policy_loss {self.policy_loss}, which gets its "
                "options from policy_loss_kwargs",
                value,
            )
        return self.policy_loss

    def _check_proximal_policy(self) -> None:
        """What needs the policy at the start of the step beside the one that sampled."""
        if not self.use_decoupled_loss:
            require(
                self.rejection_sampling is None,
                "use_decoupled_loss must be true for rejection_sampling to act",
                self.use_decoupled_loss,
            )
            require(
                self.m2_threshold is None,
                "use_decoupled_loss must be true for m2_threshold to act: it compares the "
                "proximal policy with the one that sampled, which are otherwise the same",
                self.use_decoupled_loss,
            )
            require(
                self.prox_logp_method == "recompute",
                f"use_decoupled_loss must be true for prox_logp_method {self.prox_logp_method!r} "
                "to act",
                self.use_decoupled_loss,
            )
        require_above(0, m2_threshold=self.m2_threshold)
        if self.prox_logp_method in ("loglinear", "reuse_train_logp"):
            require(
                self.m2_threshold is None,
                f"m2_threshold needs prox_logp_method 'recompute': {self.prox_logp_method!r} finds "
                "the proximal policy too late to choose tokens by it",
                self.m2_threshold,
            )
            require(
                not self.recompute_logprob,
                f"recompute_logprob must be false with prox_logp_method {self.prox_logp_method!r}, "
                "which does without that forward pass",
                self.recompute_logprob,
            )
        if self.prox_logp_method == "reuse_train_logp":
            require(
                self.ppo_n_minibatches == 1,
                "ppo_n_minibatches must be 1 with prox_logp_method 'reuse_train_logp': later "
                "minibatches are trained on other weights than those at the start of the step",
                self.ppo_n_minibatches,
            )

    def _check_overlong(self) -> None:
        require_at_least(
            1, overlong_tokens=self.overlong_tokens, max_new_tokens=self.max_new_tokens
        )
        require_at_least(0, overlong_penalty_factor=self.overlong_penalty_factor)
        for name in ("overlong_tokens", "overlong_penalty_factor"):
            given = getattr(self, name) is not None
            if self.overlong_reward_penalty:
                require(given, f"{name} must be set with overlong_reward_penalty", None)
            else:
                require(
                    not given,
                    f"overlong_reward_penalty must be true for {name} to act",
                    self.overlong_reward_penalty,
                )

    def _check_lambda(self) -> None:
        if isinstance(self.gae_lambda, str):
            require(bool(self.gae_lambda), "gae_lambda must be a number or a name", "")
            return
        require_fraction(gae_lambda=self.gae_lambda)
        require(
            not self.gae_lambda_kwargs,
            "gae_lambda_kwargs are arguments of a function: name it in gae_lambda, which is "
            f"{self.gae_lambda}",
            self.gae_lambda_kwargs,
        )

    def _check_kl(self) -> None:
        require_at_least(0, kl_ctl=self.kl_ctl, kl_loss_coef=self.kl_loss_coef)
        require_above(0, kl_target=self.kl_target)
        require_at_least(1, kl_horizon=self.kl_horizon)
        if self.kl_target is not None:
            require(
                self.kl_ctl > 0,
                "kl_ctl must be above 0 with kl_target, which adapts it from there",
                self.kl_ctl,
            )
        if self.kl_loss_coef > 0:
            require(
                self.kl_estimator != "k1",
                "kl_estimator must be k2 or k3 with kl_loss_coef: the gradient of k1 does not "
                "depend on the reference model",
                self.kl_estimator,
            )
        self.kl_estimator = self.kl_estimator or ("k3" if self.kl_loss_coef > 0 else "k1")
