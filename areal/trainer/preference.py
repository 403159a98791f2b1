"""Learning from pairs on any training engine: what RWTrainer and DPOTrainer do with one batch.

Rows 2i and 2i + 1 of a batch are the chosen and the rejected answer to one prompt. The engine is
told to keep such rows together, so a micro-batch always holds whole pairs; the loss is the mean
over pairs, however the batch is cut. Statistics per pair go to `stats_tracker`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from areal.algorithm import PREFERENCE_LOSSES
from areal.algorithm.advantage import shift_left
from areal.algorithm.preference import reward_model_loss
from areal.api.config.offline import DPOActorConfig
from areal.api.engine_api import TrainEngine
from areal.trainer.batches import PAIR, EvalLoss, Rows, pair_batch
from areal.utils import stats_tracker
from areal.utils.import_path import load_named


class RWLearner:
    """A reward model: the score at the last token of the chosen answer above the other's."""

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine

    def collate(self, rows: Rows) -> dict[str, torch.Tensor]:
        return pair_batch(rows)

    def train(self, batch: dict[str, Any]) -> dict[str, float]:
        return _train(self.engine, batch, _score_loss)

    def evaluate(self, batch: dict[str, Any]) -> EvalLoss:
        return _evaluate(self.engine, batch, _score_loss)

    def summary(self, loss: float) -> dict[str, float]:
        return {"loss": loss}


class DPOLearner:
    """A policy that prefers the chosen answer more than the reference model does."""

    def __init__(self, config: DPOActorConfig, engine: TrainEngine, ref: TrainEngine) -> None:
        self.engine = engine
        self.ref = ref
        pair_loss = load_named(config.loss_type, PREFERENCE_LOSSES, key="actor.loss_type")
        self._loss = partial(_policy_loss, pair_loss=pair_loss, beta=config.beta)

    def collate(self, rows: Rows) -> dict[str, torch.Tensor]:
        return pair_batch(rows)

    def train(self, batch: dict[str, Any]) -> dict[str, float]:
        return _train(self.engine, self._with_reference(batch), self._loss)

    def evaluate(self, batch: dict[str, Any]) -> EvalLoss:
        return _evaluate(self.engine, self._with_reference(batch), self._loss)

    def summary(self, loss: float) -> dict[str, float]:
        return {"loss": loss}

    def _with_reference(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch aligned to predictions, with what the reference model says of its tokens."""
        learned_BS = shift_left(batch["loss_mask"]).bool()
        return {**batch, "loss_mask": learned_BS, "ref_logp": self.ref.forward_batch(batch)}


def _policy_loss(
    logprobs_T: torch.Tensor,
    entropy_T: torch.Tensor,
    mb: dict[str, Any],
    *,
    pair_loss: Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]],
    beta: float,
) -> torch.Tensor:
    loss, metrics = pair_loss(
        logprobs_T, mb["ref_logp"], mb["loss_mask"], mb["cu_seqlens"], beta=beta
    )
    _record(metrics)
    return loss


def _score_loss(values_T: torch.Tensor, mb: dict[str, Any]) -> torch.Tensor:
    loss, metrics = reward_model_loss(values_T, mb["cu_seqlens"])
    _record(metrics)
    return loss


def _train(engine: TrainEngine, batch: dict[str, Any], loss_fn: Any) -> dict[str, float]:
    stats = engine.train_batch(batch, loss_fn, _num_pairs, rows_per_unit=PAIR)
    engine.step_lr_scheduler()
    return stats


def _evaluate(engine: TrainEngine, batch: dict[str, Any], loss_fn: Any) -> EvalLoss:
    loss = engine.eval_batch(batch, loss_fn, _num_pairs, rows_per_unit=PAIR).item()
    return EvalLoss(loss, len(batch["input_ids"]) // PAIR)


def _num_pairs(mb: dict[str, Any]) -> torch.Tensor:
    return torch.tensor((len(mb["cu_seqlens"]) - 1) // PAIR)


def _record(metrics: dict[str, torch.Tensor]) -> None:
    """Means over pairs; the loss itself the engine reports."""
    stats_tracker.denominator(n_pairs=torch.ones_like(metrics["loss"], dtype=torch.bool))
    means = {name: value_P for name, value_P in metrics.items() if name != "loss"}
    stats_tracker.stat("n_pairs", stats_tracker.ReduceType.AVG, **means)
