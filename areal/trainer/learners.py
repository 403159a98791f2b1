"""Language modelling on any training engine: what SFTTrainer does with one batch.

A batch is padded `[B, S]` with `input_ids`, `attention_mask` and `loss_mask` (1 on the tokens to
learn). The loss is the mean cross-entropy over those tokens, however the batch is cut.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from areal.algorithm.advantage import shift_left
from areal.algorithm.sft import sft_loss
from areal.api.engine_api import TrainEngine
from areal.trainer.batches import EvalLoss, Rows, text_batch


class LMLearner:
    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine

    def collate(self, rows: Rows) -> dict[str, torch.Tensor]:
        return text_batch(rows)

    def train(self, batch: dict[str, Any]) -> dict[str, float]:
        """The engine's report and the perplexity."""
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
