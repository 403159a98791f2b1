"""One PPO training step: the models it needs, the actor's update, and the actor's loss.

    learner = PPOLearner(config, open_engine)  # opens actor, and critic, reference, teacher if any
    data = learner.train(trajectories)         # one step of all trained models

`PPOLearner` is used by the training loop and by `areal replay`. Its result is a function of the
weights, the optimizers, `states()` and the trajectories in order.

    data = collect(trajectories)                   # trainer/ppo/batch.py
    data |= actor.compute_policies(data)           # then log-probs and values of the other models
    data |= actor.compute_advantages(data)
    data |= actor.ppo_update(data)                 # ppo_n_minibatches optimizer steps

`PPOActor` runs on any training engine. Its loss involves three policies. behave: the weights that
sampled a token, possibly several versions old and different per token. prox: the center of the
ratio clip. theta: being trained. Plain PPO uses prox = behave (or recomputes both); the decoupled
loss separates them and weights each token by prox / behave.

`PolicyObjective` is the loss on one packed micro-batch:

    policy loss (ppo, gspo, sapo, cispo or a user's own) with w = pi_prox / pi_behave, M2PO's tokens
    -> combined with the distillation loss of a teacher -> + KL from the reference model

Every part is a mean over the loss mask by credit, so micro-batches add up to the whole batch.
Statistics go to `stats_tracker` in the caller's scope. The objective holds no engine: it is pickled
to the ranks as its config, and loads functions there by import path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from areal.algorithm import KL_ESTIMATORS, POLICY_LOSSES, policy_loss_call
from areal.algorithm.kl import AdaptiveKlController, k2, kl_loss
from areal.algorithm.loss import LossInputs, distillation_loss, own_loss
from areal.algorithm.off_policy import (
    approximation_errors,
    importance_weight,
    log_ratio,
    loglinear_prox,
    m2po_keep,
    reject,
)
from areal.api.config.ppo import PPOActorConfig, TeacherConfig
from areal.api.engine_api import TrainEngine
from areal.api.routed_experts import ROUTED_KEY
from areal.trainer.ppo.advantages import AdvantageEstimator
from areal.trainer.ppo.batch import (
    TokenScorer,
    collect,
    loss_weight,
    minibatches,
    seen_values,
    token_outputs,
)
from areal.trainer.ppo.critic import PPOCritic
from areal.utils import row_values, stats_tracker
from areal.utils.data import MULTI_MODAL_KEY, select_rows
from areal.utils.import_path import load_named, signature_of
from areal.utils.perf_tracer import phase

if TYPE_CHECKING:
    from areal.algorithm.kl import AdaptiveKlController
    from areal.api.config.experiment import PPOConfig
    from areal.api.config.train_engine import TrainEngineConfig
    from areal.api.engine_api import TrainEngine

# Batch keys that the model and the loss read; the last six are not in every batch.
BATCH_KEYS = (
    "loss_mask",
    "logprobs",
    "versions",
    "advantages",
    "prox_logp",
    "ref_logp",
    "teacher_logp",
    "credit",
    ROUTED_KEY,
    MULTI_MODAL_KEY,
)
# Statistics of every micro-batch besides the metrics of the loss.
_RECORDED = {
    "entropy",
    "advantages",
    "behave_weight",
    "behave_kl",
    "rejected_ratio",
    "teacher_kl",
    "kl_loss",
}


class OpenEngine(Protocol):
    """Opens the model of one role; without `trained` it is frozen."""

    def __call__(
        self, role: str, config: TrainEngineConfig, *, trained: bool = True
    ) -> TrainEngine: ...


class PPOLearner:
    def __init__(
        self,
        config: PPOConfig,
        open_engine: OpenEngine,
        open_served: Callable[[], TokenScorer] | None = None,
    ) -> None:
        """`open_served` opens the teacher of `teacher.engine_type: rollout`."""
        self.engine = open_engine("actor", config.actor)
        self.actor = PPOActor(config.actor, self.engine, config.teacher)
        self.critic: PPOCritic | None = None
        if config.critic is not None:
            self.critic = PPOCritic(config.critic, open_engine("critic", config.critic))
        # Frozen models (ref, teacher): batch key -> engine.
        self._advisers: dict[str, TokenScorer] = {}
        for role, section in (("ref", config.ref), ("teacher", config.teacher)):
            if role in config.served_models():
                assert open_served is not None, "the caller opens servers"
                self._advisers[f"{role}_logp"] = open_served()
            elif section is not None:
                frozen = section.engine_config(config.actor)
                self._advisers[f"{role}_logp"] = open_engine(role, frozen, trained=False)

    def states(self) -> dict[str, AdaptiveKlController]:
        """State of training besides the engines, by its name in recover points."""
        control = self.actor.kl_control
        return {} if control is None else {"kl_control": control}

    def train(self, trajectories: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Train on one trajectory per prompt; returns all samples with the computed tensors.

        Statistics go to `stats_tracker` under `actor/` and `critic/`.
        """
        with phase("forward"):
            data = self._ask_models(trajectories)
        with phase("advantages"):
            data |= self.actor.compute_advantages(data)
        with phase("train"):
            data |= self.actor.ppo_update(data)
            if self.critic is not None:
                self.critic.ppo_update(data)
        return data

    def _ask_models(self, trajectories: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """All samples as one batch, with the per-token outputs of every model."""
        data = collect(trajectories)
        data |= self.actor.compute_policies(data)
        for key, engine in self._advisers.items():
            data[key] = token_outputs(engine, data)
        if self.critic is not None:
            data["values"] = self.critic.compute_values(data)
        return data


class PPOActor:
    def __init__(
        self, config: PPOActorConfig, engine: TrainEngine, teacher: TeacherConfig | None = None
    ) -> None:
        """`teacher` holds the loss weights of distillation, if there is a teacher."""
        self.config = config
        self.engine = engine
        self._estimator = AdvantageEstimator(config)
        self._objective = PolicyObjective(config, teacher)

    @property
    def kl_control(self) -> AdaptiveKlController | None:
        """The adaptive KL coefficient, if any: state that must survive a kill."""
        return self._estimator.kl_control

    def compute_logp(self, data: Mapping[str, Any]) -> torch.Tensor:
        """log pi of the current weights `[B, S]`, aligned to predictions."""
        return token_outputs(self.engine, data, replay=True)

    def compute_policies(self, data: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """`prox_logp`, unless the loss computes it, and `logprobs` if recomputed too. Where a
        forward pass finds them, also the `entropy` of each token, which no loss reads."""
        decoupled = self.config.use_decoupled_loss
        if not decoupled and not self.config.recompute_logprob:
            return {"prox_logp": data["logprobs"]}
        if decoupled and self.config.prox_logp_method in ("loglinear", "reuse_train_logp"):
            return {}
        logp_BS, entropy_BS = token_outputs(
            self.engine, data, replay=True, with_entropy=True
        ).unbind(dim=-1)
        found = {"prox_logp": logp_BS.contiguous(), "entropy": entropy_BS.contiguous()}
        return found if decoupled else {**found, "logprobs": found["prox_logp"]}

    def compute_advantages(self, data: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Inputs of `ppo_update` of actor and critic: advantages, returns, rewards."""
        with stats_tracker.scope("actor"):
            return self._estimator.estimate(data)

    def ppo_update(self, data: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """One optimizer step per minibatch and one step of the learning-rate schedule.

        Statistics go to `stats_tracker` under `actor/`. Returns `entropy` and `train_logp` of each
        token of the first group, as the loss saw them, which are shown (trainer/samples.py), as far
        as its rows were computed; nothing if a pass before training found them for `data`.
        """
        wants = "entropy" not in data
        batch = row_values.numbered(data, data["group_ids"] == 0) if wants else data
        keys = (*BATCH_KEYS, row_values.ROW_KEY)
        with stats_tracker.scope("actor"):
            for minibatch in minibatches(batch, keys, self.config.ppo_n_minibatches):
                self._update(minibatch)
        self.engine.step_lr_scheduler()
        return seen_values(data, row_values.take(), ("entropy", "train_logp")) if wants else {}

    def _update(self, minibatch: dict[str, Any]) -> None:
        """One optimizer step of the minibatch that skips rows without gradient.

        Groups with equal rewards have advantages of 0. If the loss is 0 without an advantage, such
        rows count in the mean and are not computed.
        """
        if self.config.m2_threshold is not None:
            minibatch["m2_keep"] = _m2_keep(minibatch, self.config.m2_threshold)
        num_rows = len(minibatch["loss_mask"])
        rows = list(range(num_rows))
        if self._objective.is_zero_without_advantage:
            rows = _rows_that_teach(minibatch)
        kept = select_rows(minibatch, rows)
        share = loss_weight(kept).item() / (loss_weight(minibatch).item() or 1)
        version = self.engine.get_version()
        loss_fn = partial(self._objective.loss, version=version, share=share)
        stats = self.engine.train_batch(kept, loss_fn, loss_weight)
        stats_tracker.scalar(**stats, computed_seqs_ratio=len(rows) / num_rows)


def _m2_keep(minibatch: Mapping[str, Any], threshold: float) -> torch.Tensor:
    """M2PO's tokens `[B, S]`, chosen over the whole minibatch: micro-batches must not matter."""
    return m2po_keep(
        minibatch["prox_logp"], minibatch["logprobs"], minibatch["loss_mask"], threshold=threshold
    )


def _rows_that_teach(minibatch: Mapping[str, Any]) -> list[int]:
    """Rows with a nonzero advantage; if there are none, one row to take the step with."""
    mask_BS = minibatch["loss_mask"]
    teaches_B = ((minibatch["advantages"] != 0) & mask_BS).any(dim=1)
    rows = teaches_B.nonzero().flatten().tolist()
    return rows or [int(mask_BS.any(dim=1).int().argmax())]


class PolicyObjective:
    def __init__(self, config: PPOActorConfig, teacher: TeacherConfig | None = None) -> None:
        self.config = config
        self.teacher = teacher
        self._policy_loss = _policy_loss(config)
        assert config.kl_estimator is not None  # set by the config
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
        share: float,
    ) -> torch.Tensor:
        """`version` is that of the weights at the start of the step, `share` the fraction of the
        minibatch's loss weight that is in the computed rows."""
        row_values.keep(mb, entropy=entropy_T, train_logp=logprobs_T)
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
                mb.get("credit"),
            )
        )
        _record(metrics)
        return self._with_kl(self._with_teacher(loss, logprobs_T, mb), logprobs_T, mb) * share

    def _prox_logp(
        self, logprobs_T: torch.Tensor, mb: dict[str, Any], version: int
    ) -> torch.Tensor:
        """log pi_prox, the denominator of the ratio; see `prox_logp_method`."""
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
        """pi_prox / pi_behave of each token, 0 for rejected ones; None is 1."""
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
        # k2, half the square of log w: the mean of w itself is 1 for any two policies.
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
            credit_T=mb.get("credit"),
        )

    def _with_kl(
        self, loss: torch.Tensor, logprobs_T: torch.Tensor, mb: dict[str, Any]
    ) -> torch.Tensor:
        if self.config.kl_loss_coef == 0:
            return loss
        kl, kl_T = kl_loss(
            logprobs_T,
            mb["ref_logp"],
            mb["loss_mask"],
            estimator=self._kl_estimator,
            credit_T=mb.get("credit"),
        )
        stats_tracker.stat("n_tokens", kl_loss=kl_T)
        return loss + self.config.kl_loss_coef * kl


def _policy_loss(config: PPOActorConfig) -> Callable[[LossInputs], tuple[torch.Tensor, Any]]:
    """The loss named in the config, with its options."""
    key, name = "actor.policy_loss", config.policy_loss
    assert name is not None  # set by the config
    fn = load_named(name, POLICY_LOSSES, key=key)
    if name in POLICY_LOSSES:
        return partial(fn, **_loss_options(config)[name])
    options = config.policy_loss_kwargs
    policy_loss_call(options).require(signature_of(fn), f"{key}: {name}")
    return partial(own_loss, fn=fn, name=f"{key} {name}", options=options)


def _loss_options(config: PPOActorConfig) -> dict[str, dict[str, Any]]:
    """Options of each shipped loss, from the config."""
    clip = {"eps_clip": config.eps_clip, "eps_clip_higher": config.eps_clip_higher}
    clip_and_dual = {**clip, "c_clip": config.c_clip}
    return {
        "ppo": clip_and_dual,
        "gspo": clip_and_dual,
        "sapo": {"tau_pos": config.sapo_tau_pos, "tau_neg": config.sapo_tau_neg},
        "cispo": clip,
    }


def _record(metrics: dict[str, torch.Tensor]) -> None:
    """Ratios as means, everything else with min and max; the engine reports the loss itself."""
    for name, value_T in metrics.items():
        if name in _RECORDED:
            raise ValueError(f"actor.policy_loss: the metric {name!r} is reserved; rename it")
        if name.endswith("_ratio"):
            stats_tracker.stat("n_tokens", stats_tracker.ReduceType.AVG, **{name: value_T})
        elif name != "loss":
            stats_tracker.stat("n_tokens", None, **{name: value_T})
