"""What do SFT, reward modelling and DPO do with one batch, on any training engine?

`LMLearner` (SFT): a batch is padded `[B, S]` with `input_ids`, `attention_mask` and `loss_mask` (1
on the tokens to learn). The loss is the mean cross-entropy over those tokens.

`RWLearner`, `DPOLearner`: rows 2i and 2i + 1 of a batch are the chosen and the rejected answer to
one prompt. `PAIR` makes the engine keep such rows together, so a micro-batch holds whole pairs. The
loss is the mean over pairs. Statistics per pair go to `stats_tracker`.

Both means are independent of the micro-batches. `text_batch` and `pair_batch` collate rows: text
rows have `input_ids` and `loss_mask`, with images also `multi_modal_input`; preference rows have
`chosen_ids` and `rejected_ids`, which start with the same `prompt_len` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from areal.algorithm import PREFERENCE_LOSSES
from areal.algorithm.advantage import shift_left
from areal.algorithm.loss import sft_loss
from areal.algorithm.preference import reward_model_loss
from areal.api.config.offline import DPOActorConfig
from areal.api.engine_api import TrainEngine
from areal.utils import stats_tracker
from areal.utils.data import MULTI_MODAL_KEY
from areal.utils.import_path import load_named

PAIR = 2  # rows_per_unit of a preference batch
Rows = Sequence[dict[str, Any]]


class LMLearner:
    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine

    def collate(self, rows: Rows) -> dict[str, Any]:
        return text_batch(rows)

    def train(self, batch: dict[str, Any]) -> dict[str, float]:
        """One optimizer step; the engine's statistics and the perplexity."""
        stats = self.engine.train_batch(_aligned(batch), _loss, _loss_tokens)
        self.engine.step_lr_scheduler()
        return {**stats, "ppl": _perplexity(stats["loss"])}

    def evaluate(self, batch: dict[str, Any]) -> EvalLoss:
        """Mean cross-entropy of the learned tokens, in nats."""
        batch = _aligned(batch)
        loss = self.engine.eval_batch(batch, _loss, _loss_tokens).item()
        return EvalLoss(loss, _loss_tokens(batch).item())

    def summary(self, loss: float) -> dict[str, float]:
        return {"loss": loss, "ppl": _perplexity(loss)}


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # beyond 709 exp overflows


def _aligned(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "loss_mask": shift_left(batch["loss_mask"]).bool()}


def _loss(logprobs_T: torch.Tensor, entropy_T: torch.Tensor, mb: dict[str, Any]) -> torch.Tensor:
    return sft_loss(logprobs_T, mb["loss_mask"])


def _loss_tokens(mb: dict[str, Any]) -> torch.Tensor:
    return mb["loss_mask"].sum()


class RWLearner:
    """A reward model: scores the chosen answer above the rejected one, at their last tokens."""

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
    """A policy trained to prefer the chosen answer more than the reference model does."""

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
        """The batch aligned to predictions, with the reference model's log-probabilities."""
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
    """Means over pairs; the engine reports the loss itself."""
    stats_tracker.denominator(n_pairs=torch.ones_like(metrics["loss"], dtype=torch.bool))
    means = {name: value_P for name, value_P in metrics.items() if name != "loss"}
    stats_tracker.stat("n_pairs", stats_tracker.ReduceType.AVG, **means)


def text_batch(rows: Rows) -> dict[str, Any]:
    batch: dict[str, Any] = _padded(
        [row["input_ids"] for row in rows], [row["loss_mask"] for row in rows]
    )
    if any(row.get(MULTI_MODAL_KEY) for row in rows):
        batch[MULTI_MODAL_KEY] = [row.get(MULTI_MODAL_KEY) or {} for row in rows]
    return batch


def pair_batch(rows: Rows) -> dict[str, torch.Tensor]:
    """The loss mask is 1 on the answers, that is after the prompt."""
    ids = [answer for row in rows for answer in (row["chosen_ids"], row["rejected_ids"])]
    prompt_lens = [row["prompt_len"] for row in rows for _ in range(PAIR)]
    masks = [
        [0] * prompt_len + [1] * (len(answer) - prompt_len)
        for answer, prompt_len in zip(ids, prompt_lens, strict=True)
    ]
    return _padded(ids, masks)


def _padded(ids: list[list[int]], masks: list[list[int]]) -> dict[str, torch.Tensor]:
    def pad(rows: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
        return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)

    return {
        "input_ids": pad(ids, torch.int32),
        "loss_mask": pad(masks, torch.int32),
        "attention_mask": pad([[True] * len(row) for row in ids], torch.bool),
    }


class EvalLoss(NamedTuple):
    """The loss of a batch, and its weight in a mean over batches."""

    mean: float
    weight: float  # tokens or pairs
