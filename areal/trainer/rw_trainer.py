"""Reward modelling: pairs of answers, one optimizer step per batch of them.

The loop is in trainer/offline.py, what one batch means in trainer/preference.py. The trained model
is saved so that transformers loads it as a classifier with one label.
"""

from __future__ import annotations

from contextlib import ExitStack

from areal.run.run import StepObserver
from areal.trainer.base import Trainer
from areal.trainer.offline import train_on_rows
from areal.trainer.preference import RWLearner


class RWTrainer(Trainer):
    """Trains a model to score the chosen answer of a pair above the rejected one.

    with RWTrainer(config, train_rows, valid_rows) as trainer:
        trainer.train()
    """

    def _open(self, stack: ExitStack) -> None:
        self.engine = self._open_engine("actor", self.config.actor, stack)
        self.learner = RWLearner(self.engine)

    def train(self, on_step: StepObserver | None = None) -> None:
        train_on_rows(self, self.learner, on_step)
