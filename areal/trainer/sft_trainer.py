"""Supervised fine-tuning: rows with `input_ids` and `loss_mask`, one optimizer step per batch.

The loop is in trainer/offline.py, what one batch means in trainer/learners.py.
"""

from __future__ import annotations

from contextlib import ExitStack

from areal.run.run import StepObserver
from areal.trainer.base import Trainer
from areal.trainer.learners import LMLearner
from areal.trainer.offline import train_on_rows


class SFTTrainer(Trainer):
    """Fine-tunes a model on given text.

    with SFTTrainer(config, train_rows, valid_rows) as trainer:
        trainer.train()
    """

    def _open(self, stack: ExitStack) -> None:
        self.engine = self._open_engine("actor", self.config.actor, stack)
        self.learner = LMLearner(self.engine)

    def train(self, on_step: StepObserver | None = None) -> None:
        train_on_rows(self, self.learner, on_step)
