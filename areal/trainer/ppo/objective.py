"""What the actor minimises on one packed micro-batch, put together as its config says.

    policy loss (ppo, gspo, sapo, cispo or a user's own) over w = pi_prox / pi_behave, M2PO's choice
    of tokens
    -> with a teacher its share of the distillation loss -> + KL from the reference model

Every part is a mean over the loss mask, so micro-batches add up to the whole batch. Statistics go
to `stats_tracker` in the scope of the caller. The object knows no engine: it travels to the ranks,
as its config, and finds functions there by their import paths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from areal.algorithm import KL_ESTIMATORS, POLICY_LOSSES
from areal.algorithm.calls import policy_loss_call
from areal.algorithm.distillation import distillation_loss
from areal.algorithm.kl import k2, kl_loss
from areal.algorithm.loss import LossInputs, own_loss
from areal.algorithm.off_policy import importance_weight, log_ratio, reject
from areal.algorithm.proximal import approximation_errors, loglinear_prox
from areal.api.config.ppo import PPOActorConfig
from areal.api.config.roles import TeacherConfig
from areal.utils import stats_tracker
from areal.utils.import_path import load_named
from areal.utils.signatures import signature_of

# What the loss reads of a batch; the last three are there when the config asks for them.
BATCH_KEYS = (
    "loss_mask",
    "logprobs",
    "versions",
    "advantages",
    "prox_logp",
    "ref_logp",
    "teacher_logp",
)


# What is recorded of every micro-batch besides the metrics of the loss.
_RECORDED = {
    "entropy",
    "advantages",
    "behave_weight",
    "behave_kl",
    "rejected_ratio",
    "teacher_kl",
    "kl_loss",
}


class PolicyObjective:
    def __init__(self, config: PPOActorConfig, teacher: TeacherConfig | None = None) -> None:
        self.config = config
        self.teacher = teacher
        self._policy_loss = _policy_loss(config)
        assert config.kl_estimator is not None  # by default the config chooses it
        self._kl_estimator = load_named(
            config.kl_estimator, KL_ESTIMATORS, key="actor.kl_estimator"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return PolicyObjective, (self.config, self.teacher)

    @property
    def is_zero_without_advantage(self) -> bool:
        """Whether a token of advantage 0 has a loss and a gradient of exactly 0."""
        is_known = self.config.policy_loss in POLICY_LOSSES
        return is_known and self.teacher is None and self.config.kl_loss_coef == 0

    def loss(
        self,
        logprobs_T: torch.Tensor,
        entropy_T: torch.Tensor,
        mb: dict[str, Any],
        *,
        version: int,
        share: float = 1.0,
    ) -> torch.Tensor:
        """`version` is that of the weights at the start of the step, `share` how much of the batch
        the rows that are computed stand for."""
        mask_T = mb["loss_mask"]
        stats_tracker.denominator(n_tokens=mask_T)
        stats_tracker.stat("n_tokens", entropy=entropy_T, advantages=mb["advantages"])
        prox_logp_T = self._prox_logp(logprobs_T, mb, version)
        loss, metrics = self._policy_loss(
            LossInputs(
                logprobs_T,
                prox_logp_T,
                mb["advantages"],
                mask_T,
                self._weight(prox_logp_T, mb),
                mb["cu_seqlens"],
                mb["logprobs"],
                mb["versions"],
            )
        )
        _record(metrics)
        return self._with_kl(self._with_teacher(loss, logprobs_T, mb), logprobs_T, mb) * share

    def _prox_logp(
        self, logprobs_T: torch.Tensor, mb: dict[str, Any], version: int
    ) -> torch.Tensor:
        """log of the policy the ratio is taken to; see `prox_logp_method`."""
        method = self.config.prox_logp_method
        behave = (mb["logprobs"], mb["versions"], version)
        if self.config.use_decoupled_loss and method == "loglinear":
            return loglinear_prox(logprobs_T, *behave)
        if self.config.use_decoupled_loss and method == "reuse_train_logp":
            return logprobs_T.detach()
        if method == "metrics":
            errors = approximation_errors(
                mb["prox_logp"], logprobs_T.detach(), *behave, mb["loss_mask"]
            )
            named = {f"prox/{name}": error_T for name, error_T in errors.items()}
            stats_tracker.stat("n_tokens", None, **named)
        return mb["prox_logp"]

    def _weight(self, prox_logp_T: torch.Tensor, mb: dict[str, Any]) -> torch.Tensor | None:
        """pi_prox / pi_behave of each token, 0 for those that teach nothing; None is 1."""
        if not self.config.use_decoupled_loss:
            return None
        mask_T, rejection = mb["loss_mask"], self.config.rejection_sampling
        if rejection is None:
            weight_T = importance_weight(prox_logp_T, mb["logprobs"], mask_T)
        else:
            weight_T = reject(
                prox_logp_T,
                mb["logprobs"],
                mask_T,
                mb["cu_seqlens"],
                level=rejection.level,
                action=rejection.action,
                metric=rejection.metric,
                agg=rejection.agg,
                upper=rejection.upper,
                lower=rejection.lower,
            )
        if "m2_keep" in mb:
            weight_T = weight_T.masked_fill(~mb["m2_keep"], 0.0)
        # Half the mean square of log w: the mean of w itself is 1 however far apart they are.
        drift_T = k2(log_ratio(prox_logp_T, mb["logprobs"], mask_T))
        stats_tracker.stat("n_tokens", behave_weight=weight_T, behave_kl=drift_T)
        rejected_T = (weight_T == 0) & mask_T
        stats_tracker.stat("n_tokens", stats_tracker.ReduceType.AVG, rejected_ratio=rejected_T)
        return weight_T

    def _with_teacher(
        self, loss: torch.Tensor, logprobs_T: torch.Tensor, mb: dict[str, Any]
    ) -> torch.Tensor:
        if self.teacher is None:
            return loss
        teacher_logp_T = mb["teacher_logp"]
        stats_tracker.stat("n_tokens", teacher_kl=(logprobs_T - teacher_logp_T).detach())
        return distillation_loss(
            loss,
            logprobs_T,
            mb["logprobs"],
            teacher_logp_T,
            mb["loss_mask"],
            rl_loss_weight=self.teacher.rl_loss_weight,
            distill_loss_weight=self.teacher.distill_loss_weight,
        )

    def _with_kl(
        self, loss: torch.Tensor, logprobs_T: torch.Tensor, mb: dict[str, Any]
    ) -> torch.Tensor:
        if self.config.kl_loss_coef == 0:
            return loss
        kl, kl_T = kl_loss(
            logprobs_T, mb["ref_logp"], mb["loss_mask"], estimator=self._kl_estimator
        )
        stats_tracker.stat("n_tokens", kl_loss=kl_T)
        return loss + self.config.kl_loss_coef * kl


def _policy_loss(config: PPOActorConfig) -> Callable[[LossInputs], tuple[torch.Tensor, Any]]:
    """The loss the config names, with its options."""
    key, name = "actor.policy_loss", config.policy_loss
    assert name is not None  # by default the config chooses it
    fn = load_named(name, POLICY_LOSSES, key=key)
    if name in POLICY_LOSSES:
        return partial(fn, **_loss_options(config)[name])
    options = config.policy_loss_kwargs
    policy_loss_call(options).require(signature_of(fn), f"{key}: {name}")
    return partial(own_loss, fn=fn, name=f"{key} {name}", options=options)


def _loss_options(config: PPOActorConfig) -> dict[str, dict[str, Any]]:
    """The keys of the config that each shipped loss takes."""
    clip = {"eps_clip": config.eps_clip, "eps_clip_higher": config.eps_clip_higher}
    clip_and_dual = {**clip, "c_clip": config.c_clip}
    return {
        "ppo": clip_and_dual,
        "gspo": clip_and_dual,
        "sapo": {"tau_pos": config.sapo_tau_pos, "tau_neg": config.sapo_tau_neg},
        "cispo": clip,
    }


def _record(metrics: dict[str, torch.Tensor]) -> None:
    """Shares as means, everything else with its extremes; the loss itself the engine reports."""
    for name, value_T in metrics.items():
        if name in _RECORDED:
            raise ValueError(
                f"actor.policy_loss: the metric {name!r} has another meaning; rename it"
            )
        if name.endswith("_ratio"):
            stats_tracker.stat("n_tokens", stats_tracker.ReduceType.AVG, **{name: value_T})
        elif name != "loss":
            stats_tracker.stat("n_tokens", None, **{name: value_T})
