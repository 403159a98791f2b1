"""Direct preference optimisation (DPO, IPO): pairs of answers and a reference model.

The loop is in trainer/offline.py, what one batch means in trainer/preference.py.
"""

from __future__ import annotations

from contextlib import ExitStack

from areal.run.run import StepObserver
from areal.trainer.base import Trainer
from areal.trainer.offline import train_on_rows
from areal.trainer.preference import DPOLearner


class DPOTrainer(Trainer):
    """Trains a policy to prefer the chosen answer of a pair, held near a reference model.

    with DPOTrainer(config, train_rows, valid_rows) as trainer:
        trainer.train()
    """

    def _open(self, stack: ExitStack) -> None:
        actor = self.config.actor
        self.engine = self._open_engine("actor", actor, stack)
        ref = self._open_engine("ref", self.config.ref.engine_config(actor), stack, trained=False)
        self.learner = DPOLearner(actor, self.engine, ref)

    def train(self, on_step: StepObserver | None = None) -> None:
        train_on_rows(self, self.learner, on_step)
