"""Sections of the RL models: `ref`, `teacher` and `critic`, `actor.rejection_sampling`, `actor`.

`ref`, `teacher` and `critic` inherit what they leave out from the actor: `ref: {}` is the model
that training starts from.

`actor.rejection_sampling` selects tokens that are too far off-policy to learn from; TIS, IcePop,
KPop, sequence masks (MIS) and KL filters are settings of it. It bounds the weight pi_prox /
pi_behave, which the decoupled loss applies with or without this section.

`actor` covers rewards, advantages and the loss. An algorithm is a combination of its keys;
meaningless combinations are rejected, each with its reason.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import field, replace
from typing import Any, Literal

from areal.api.alloc_mode import ModelAllocation
from areal.api.config.section import (
    config_section,
    expand_path,
    require,
    require_above,
    require_at_least,
    require_finite,
    require_fraction,
)
from areal.api.config.train_engine import (
    ArchonEngineConfig,
    FSDPEngineConfig,
    MegatronEngineConfig,
    MicroBatchSpec,
    NormConfig,
    TrainEngineConfig,
    check_inference_backend,
    check_training_backend,
)
from areal.api.scheduler_api import SchedulingSpec, SchedulingStrategy


@config_section
class FrozenModelConfig:
    """A model that is asked for log-probabilities and never trained."""

    path: str | None = None
    """Hugging Face folder or hub name. Default: actor.path."""
    backend: str | None = None
    """Engine and parallel layout. Default: actor.backend."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of the model. Default: actor.dtype."""
    mb_spec: MicroBatchSpec | None = None
    """How a batch is split into micro-batches. Default: actor.mb_spec."""
    offload: bool = False
    """Keep the weights in host memory but while this model is used, as actor.offload."""
    scheduling_spec: list[SchedulingSpec] = field(default_factory=list)
    """What each rank needs of its machine: one entry for all ranks, or one for each."""
    scheduling_strategy: SchedulingStrategy = field(default_factory=SchedulingStrategy)
    """Worker processes of its own, or those of another role:
    `{type: colocation, target: actor}`."""

    def __post_init__(self) -> None:
        if self.path is not None:
            require(bool(self.path), "path must name a model folder", self.path)
            self.path = expand_path("path", self.path)
        if self.backend is not None:
            self._check_backend(self.backend)

    def _check_backend(self, backend: str) -> None:
        check_training_backend(backend)

    def inherit(self, actor: TrainEngineConfig) -> None:
        """Inherit what was left out from the actor."""
        self.path = self.path or actor.path
        self.backend = self.backend or actor.backend
        self.dtype = self.dtype or actor.dtype
        self.mb_spec = self.mb_spec or deepcopy(actor.mb_spec)

    @property
    def allocation(self) -> ModelAllocation:
        """Engine and parallel layout of `backend`."""
        if self.backend is None:
            raise RuntimeError("backend is not known yet: `inherit` takes it from the actor")
        return ModelAllocation.from_str(self.backend)

    @property
    def num_ranks(self) -> int:
        return self.allocation.parallel.world_size

    def engine_config(self, actor: TrainEngineConfig) -> TrainEngineConfig:
        """An engine without optimizer whose log-probabilities are comparable to the actor's."""
        backend = self.backend or actor.backend
        allocation = ModelAllocation.from_str(backend)
        engine = allocation.backend
        takes_trees = engine != "megatron" and allocation.parallel.pipeline_parallel_size == 1
        # Numbers of replicas and stages belong to the actor's layout; this one may differ.
        same_layout = backend == actor.backend
        replicas = {} if same_layout else {"num_replicas": 1}
        fsdp, archon = replace(actor.fsdp, **replicas), replace(actor.archon, **replicas)
        return TrainEngineConfig(
            path=self.path or actor.path,
            backend=backend,
            dtype=self.dtype,
            mb_spec=self.mb_spec or actor.mb_spec,
            temperature=actor.temperature,
            logprobs_chunk_size=actor.logprobs_chunk_size,
            fsdp=fsdp if engine == "fsdp" else FSDPEngineConfig(),
            archon=archon if engine == "archon" else ArchonEngineConfig(),
            megatron=actor.megatron if same_layout else MegatronEngineConfig(),
            enable_tree_training=actor.enable_tree_training and takes_trees,
            offload=self.offload,
            scheduling_spec=self.scheduling_spec,
            scheduling_strategy=self.scheduling_strategy,
            setup_timeout=actor.setup_timeout,
            request_timeout=actor.request_timeout,
        )


@config_section
class RefConfig(FrozenModelConfig):
    """The reference model a policy is kept near."""


@config_section
class TeacherConfig(FrozenModelConfig):
    """A model whose log-probabilities of the sampled tokens the policy learns."""

    engine_type: Literal["train", "rollout"] = "train"
    """Who computes its log-probabilities: `train`, an engine like the actor's; `rollout`, inference
    servers of its own, whose kind and layout `backend` says (default: rollout.backend)."""
    rl_loss_weight: float = 1.0
    """Weight of the policy's own loss; 0 learns from the teacher alone."""
    distill_loss_weight: float = 0.005
    """Weight of the distance from the teacher."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.path is not None, "path must be set: the model to learn from", None)
        require_at_least(0, rl_loss_weight=self.rl_loss_weight)
        require(
            self.distill_loss_weight != 0,
            "distill_loss_weight must be above 0, or the teacher has no effect: remove the section "
            f"to train without one (rl_loss_weight is {self.rl_loss_weight})",
            self.distill_loss_weight,
        )
        require_above(0, distill_loss_weight=self.distill_loss_weight)

    @property
    def is_served(self) -> bool:
        return self.engine_type == "rollout"

    def _check_backend(self, backend: str) -> None:
        if self.is_served:
            check_inference_backend(backend)
        else:
            check_training_backend(backend)

    def inherit_servers(self, actor: TrainEngineConfig, backend: str) -> None:
        """Inherit what was left out from the actor and from rollout.backend."""
        self.backend = self.backend or backend
        self.dtype = self.dtype or actor.dtype
        written = {
            "teacher.mb_spec": self.mb_spec,
            "teacher.offload": self.offload or None,
            "teacher.scheduling_strategy": self.scheduling_strategy.target,
        }
        for key, value in written.items():
            require(
                value is None,
                f"{key} must be left out when teacher.engine_type is rollout: its servers compute",
                value,
            )
        require(
            actor.temperature == 1,
            "actor.temperature must be 1 when teacher.engine_type is rollout: servers tell the "
            "log-probabilities of given tokens at temperature 1",
            actor.temperature,
        )


@config_section
class PPOCriticConfig(TrainEngineConfig):
    """The value model of PPO. Optimizer and precision it leaves out are the actor's."""

    path: str | None = None
    """Hugging Face folder or hub name of the model to start from. Default: actor.path."""
    is_critic: bool = True
    """A value head in place of the LM head; always true here."""
    ppo_n_minibatches: int = 4
    """Optimizer steps per batch."""
    eps_clip: float = 0.5
    """A value moves at most this far from its old one before its loss is clipped."""
    value_error: Literal["squared", "huber"] = "squared"
    """Loss of a value error: half its square, or Huber's, which is linear beyond an error of 10."""
    mb_spec: MicroBatchSpec | None = None
    """How a batch is split into micro-batches. Default: actor.mb_spec."""
    mask_no_eos_with_zero: bool = False
    """Leave answers cut off by length out of the value loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.is_critic, "is_critic must be true: a critic gives values", self.is_critic)
        require_at_least(1, ppo_n_minibatches=self.ppo_n_minibatches)
        require_above(0, eps_clip=self.eps_clip)

    def inherit(self, actor: TrainEngineConfig) -> None:
        """Inherit what was left out from the actor."""
        self.path = self.path or actor.path  # pyright: ignore[reportIncompatibleVariableOverride]  # None until here
        self.optimizer = self.optimizer or deepcopy(actor.optimizer)
        self.dtype = self.dtype or actor.dtype
        self.mb_spec = self.mb_spec or deepcopy(actor.mb_spec)  # pyright: ignore[reportIncompatibleVariableOverride]  # None until here


# Never negative, and 0 where the two policies agree.
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
    """Upper bound 1 + eps_clip_higher instead (DAPO). Default: eps_clip."""
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
    """Penalise answers that come near max_new_tokens (DAPO)."""
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
    """Coefficient of the KL divergence from `ref`, subtracted from the reward of every token."""
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
    """Recompute the batch's log-probabilities with the weights at the start of the step. Without
    use_decoupled_loss nothing then corrects for data of older weights."""
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
        """Whether the loss or the rewards use a reference model."""
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
                    f"c_clip must be left out with {name}: only the clipped PPO loss has a dual "
                    "clip",
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
        """A key of `areal.algorithm.POLICY_LOSSES`, or an import path."""
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
        """Options that need the policy at the start of the step in addition to the sampler's."""
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
