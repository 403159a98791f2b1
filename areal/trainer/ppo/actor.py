"""The policy's half of PPO, on any training engine: a batch in, updated weights out.

    data = collect(trajectories)                   # trainer/ppo/batch.py
    data |= actor.compute_policies(data)           # and what the other models say of its tokens
    data |= actor.compute_advantages(data)
    actor.ppo_update(data)                         # ppo_n_minibatches optimizer steps

Three policies meet in the loss. behave: the weights that sampled a token, perhaps several versions
old, perhaps another for each token. prox: what the ratio is clipped around. theta: being trained.
Plain PPO takes prox = behave (or recomputes both); the decoupled loss keeps them apart and weights
each token by prox / behave.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from areal.algorithm.kl_controller import AdaptiveKlController
from areal.algorithm.off_policy import m2po_keep
from areal.api.config.ppo import PPOActorConfig
from areal.api.config.roles import TeacherConfig
from areal.api.engine_api import TrainEngine
from areal.trainer.ppo.advantages import AdvantageEstimator
from areal.trainer.ppo.batch import minibatches, num_loss_tokens, token_outputs
from areal.trainer.ppo.objective import BATCH_KEYS, PolicyObjective
from areal.utils import stats_tracker
from areal.utils.data import select_rows


class PPOActor:
    def __init__(
        self, config: PPOActorConfig, engine: TrainEngine, teacher: TeacherConfig | None = None
    ) -> None:
        """`teacher` says how much the log-probabilities of a teacher count, when there is one."""
        self.config = config
        self.engine = engine
        self._estimator = AdvantageEstimator(config)
        self._objective = PolicyObjective(config, teacher)

    @property
    def kl_control(self) -> AdaptiveKlController | None:
        """The KL coefficient when it adapts: state that must survive a kill."""
        return self._estimator.kl_control

    def compute_logp(self, data: Mapping[str, Any]) -> torch.Tensor:
        """log pi of the current weights `[B, S]`, aligned to predictions."""
        return token_outputs(self.engine, data)

    def compute_policies(self, data: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """`prox_logp`, unless it is found in the loss, and `logprobs` when recomputed too."""
        if not self.config.use_decoupled_loss:
            if not self.config.recompute_logprob:
                return {"prox_logp": data["logprobs"]}
            logp_BS = self.compute_logp(data)
            return {"prox_logp": logp_BS, "logprobs": logp_BS}
        if self.config.prox_logp_method in ("loglinear", "reuse_train_logp"):
            return {}
        return {"prox_logp": self.compute_logp(data)}

    def compute_advantages(self, data: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What `ppo_update` of actor and critic need besides: advantages, returns, rewards."""
        with stats_tracker.scope("actor"):
            return self._estimator.estimate(data)

    def ppo_update(self, data: Mapping[str, Any]) -> None:
        """One optimizer step per minibatch and one step of the learning-rate schedule.

        Statistics go to `stats_tracker` under `actor/`.
        """
        with stats_tracker.scope("actor"):
            for minibatch in minibatches(data, BATCH_KEYS, self.config.ppo_n_minibatches):
                self._update(minibatch)
        self.engine.step_lr_scheduler()

    def _update(self, minibatch: dict[str, Any]) -> None:
        """The step of the whole minibatch, at the cost of the rows that have something to teach.

        Groups whose samples all earned the same have advantages of 0. When nothing but advantages
        teaches, such rows count in the mean and are not computed.
        """
        if self.config.m2_threshold is not None:
            minibatch["m2_keep"] = _m2_keep(minibatch, self.config.m2_threshold)
        num_rows = len(minibatch["loss_mask"])
        rows = list(range(num_rows))
        if self._objective.is_zero_without_advantage:
            rows = _rows_that_teach(minibatch)
        kept = select_rows(minibatch, rows)
        num_tokens = minibatch["loss_mask"].sum().item()
        share = kept["loss_mask"].sum().item() / max(num_tokens, 1)
        version = self.engine.get_version()
        loss_fn = partial(self._objective.loss, version=version, share=share)
        stats = self.engine.train_batch(kept, loss_fn, num_loss_tokens)
        stats_tracker.scalar(**stats, computed_seqs_ratio=len(rows) / num_rows)


def _m2_keep(minibatch: Mapping[str, Any], threshold: float) -> torch.Tensor:
    """M2PO's tokens `[B, S]`, chosen over the minibatch: how it is cut must not matter."""
    return m2po_keep(
        minibatch["prox_logp"], minibatch["logprobs"], minibatch["loss_mask"], threshold=threshold
    )


def _rows_that_teach(minibatch: Mapping[str, Any]) -> list[int]:
    """Rows with an advantage other than 0; when there are none, one row to take the step with."""
    mask_BS = minibatch["loss_mask"]
    teaches_B = ((minibatch["advantages"] != 0) & mask_BS).any(dim=1)
    rows = teaches_B.nonzero().flatten().tolist()
    return rows or [int(mask_BS.any(dim=1).int().argmax())]
