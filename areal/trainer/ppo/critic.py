"""The critic of PPO, on any engine whose model outputs values.

data["values"] = critic.compute_values(data)   # before the advantages, which use them
critic.ppo_update(data)                        # towards data["returns"]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from areal.algorithm import VALUE_ERRORS
from areal.algorithm.loss import value_loss
from areal.api.config.ppo import PPOCriticConfig
from areal.api.engine_api import TrainEngine
from areal.trainer.ppo.batch import loss_weight, minibatches, required, token_outputs
from areal.utils import stats_tracker
from areal.utils.import_path import load_named

_BATCH_KEYS = ("loss_mask", "values", "returns", "seq_no_eos", "credit")


class PPOCritic:
    def __init__(self, config: PPOCriticConfig, engine: TrainEngine) -> None:
        self.config = config
        self.engine = engine
        error = load_named(config.value_error, VALUE_ERRORS, key="critic.value_error")
        self._loss = partial(_loss, eps_clip=config.eps_clip, error=error)

    def compute_values(self, data: Mapping[str, Any]) -> torch.Tensor:
        """Values `[B, S]`; position t is before token t + 1."""
        return token_outputs(self.engine, data)

    def ppo_update(self, data: Mapping[str, Any]) -> None:
        """One optimizer step per minibatch and one step of the learning-rate schedule.

        Statistics go to `stats_tracker` under `critic/`.
        """
        with stats_tracker.scope("critic"):
            stats_tracker.scalar(explained_variance=_explained_variance(data))
            for minibatch in minibatches(data, _BATCH_KEYS, self.config.ppo_n_minibatches):
                self._update(minibatch)
        self.engine.step_lr_scheduler()

    def _update(self, minibatch: dict[str, Any]) -> None:
        if self.config.mask_no_eos_with_zero:
            cut_B = required(minibatch, "seq_no_eos", "critic.mask_no_eos_with_zero").bool()
            minibatch["loss_mask"] = minibatch["loss_mask"] & ~cut_B[:, None]
        if not bool(minibatch["loss_mask"].any()):
            return  # every answer in it was truncated
        stats = self.engine.train_batch(minibatch, self._loss, loss_weight)
        stats_tracker.scalar(**stats)


def _loss(
    values_T: torch.Tensor,
    mb: dict[str, Any],
    *,
    eps_clip: float,
    error: Callable[..., torch.Tensor],
) -> torch.Tensor:
    loss, metrics = value_loss(
        values_T,
        mb["values"],
        mb["returns"],
        mb["loss_mask"],
        eps_clip=eps_clip,
        error=error,
        credit_T=mb.get("credit"),
    )
    stats_tracker.denominator(n_tokens=mb["loss_mask"])
    stats_tracker.stat("n_tokens", values=values_T.detach(), returns=mb["returns"])
    clipped_T = metrics["clip_ratio"]
    stats_tracker.stat("n_tokens", stats_tracker.ReduceType.AVG, clip_ratio=clipped_T)
    return loss


def _explained_variance(data: Mapping[str, Any]) -> float:
    """1: values equal returns; 0: no better than their mean; negative: worse."""
    mask_BS = data["loss_mask"]
    returns_T = data["returns"][mask_BS].double()
    errors_T = returns_T - data["values"][mask_BS].double()
    spread = returns_T.var(unbiased=False)
    return (1 - errors_T.var(unbiased=False) / spread).item() if spread > 0 else 0.0
