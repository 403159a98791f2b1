"""Training on given rows: one loop for SFT, reward modelling and DPO.

In: a trainer and a learner (trainer/learners.py), which defines what one batch means. Out: a
trained model in the run's folder. One optimizer step per batch. The row order is a function of the
step number, so a resumed run continues with the same rows.

    SFTTrainer   rows with `input_ids` and `loss_mask`
    RWTrainer    pairs of answers; saved as a transformers classifier with one label
    DPOTrainer   pairs of answers and a reference model (DPO, IPO)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

from areal.api.image_references import MULTI_MODAL_KEY
from areal.engine.train.fit import sees
from areal.planner.prediction import rows_predictor_of
from areal.run.fingerprint import trainer_name
from areal.run.model_paths import actor_section
from areal.run.run import StepObserver
from areal.trainer.base import Trainer
from areal.trainer.learners import DPOLearner, EvalLoss, LMLearner, RWLearner
from areal.utils import stats_tracker
from areal.utils.device import best_device
from areal.utils.perf_tracer import phase
from areal.workflow.chat import has_images

if TYPE_CHECKING:
    import torch

    from areal.rollout.source import PromptSource
    from areal.run.run import StepObserver
    from areal.trainer.base import Rows, Trainer

    Batch = dict[str, torch.Tensor]


class Learner(Protocol):
    """Trains and evaluates on batches of rows."""

    def collate(self, rows: Sequence[dict[str, Any]]) -> Batch:
        """Rows of the data set as one right-padded batch."""
        ...

    def train(self, batch: Batch) -> dict[str, float]:
        """One optimizer and schedule step; its statistics, with `loss`."""
        ...

    def evaluate(self, batch: Batch) -> EvalLoss:
        """The loss on `batch`; other statistics may go to `stats_tracker`."""
        ...

    def summary(self, loss: float) -> dict[str, float]:
        """Statistics of an evaluation whose mean loss is `loss`."""
        ...


def refuse_images(config: Any, section: str, rows: Rows) -> None:
    """ValueError if rows have images that would not be seen: pairs, rows of a model of text, and
    images that are not in `multi_modal_input`.

    Checks all rows of a list, but only the first of others, which are made when they are read.
    """
    name, model_sees = trainer_name(config), False
    looked_at = rows if isinstance(rows, list) else itertools.islice(rows, 1)
    for number, row in enumerate(looked_at):
        has_pixels = bool(row.get(MULTI_MODAL_KEY))
        if not has_pixels and not has_images(row):
            continue
        where = f"{section}: row {number} has images, and "
        if name != "sft":
            raise ValueError(f"{where}trainer {name} reads text only: use a data set of text")
        if not has_pixels:
            raise ValueError(
                f"{where}trainer sft reads them in {MULTI_MODAL_KEY!r}: use a loader that makes "
                "such rows (docs/vision.md)"
            )
        actor = actor_section(config)
        model_sees = model_sees or sees(actor)  # reads files: once
        if not model_sees:
            raise ValueError(
                f"{where}the model {actor.path!r} reads text only: name one with a vision tower in "
                "actor.path, or use a data set of text"
            )


def _refuse_images_of(trainer: Trainer) -> None:
    """Before a model is loaded."""
    refuse_images(trainer.config, "train_dataset", trainer.train_dataset)
    refuse_images(trainer.config, "valid_dataset", trainer.valid_dataset)


def train_on_rows(trainer: Trainer, learner: Learner, on_step: StepObserver | None) -> None:
    """Resume and run to the last step."""
    run = trainer.run
    predict = rows_predictor_of(trainer.config, has_gpu=best_device() == "cuda")
    first = run.resume()
    if first == 0 and run.evaluates_before:
        stats = _evaluate(trainer, learner)
        run.stats_logger.commit(-1, {**stats_tracker.export_all(), **stats})
    for step in run.steps(first):
        with phase("train"):
            batch = learner.collate(_rows(trainer.source, step.global_step))
            stats = learner.train(batch)
        lengths = batch["attention_mask"].sum(-1).tolist()
        stats |= {"tokens": sum(lengths), **predict(lengths)}
        if run.evaluation_due(step):
            with phase("evaluate"):
                stats |= _evaluate(trainer, learner)
        recorded = run.finish_step(step, trainer.tokenizer, stats)
        if on_step is not None:
            on_step(step.global_step + 1, run.total_steps, recorded)
    run.finish(trainer.tokenizer)


def evaluate_on_rows(learner: Learner, rows: Rows, batch_size: int) -> dict[str, float]:
    """The statistics of all `rows`, collated `batch_size` at a time."""
    batches = (rows[i : i + batch_size] for i in range(0, len(rows), batch_size))
    with stats_tracker.scope("eval"):
        losses = [learner.evaluate(learner.collate(batch)) for batch in batches]
    mean = sum(loss.mean * loss.weight for loss in losses) / sum(loss.weight for loss in losses)
    return {f"eval/{name}": value for name, value in learner.summary(mean).items()}


def _evaluate(trainer: Trainer, learner: Learner) -> dict[str, float]:
    config = trainer.config
    # A batch that fits in memory for training also fits for evaluation.
    sections = [config.train_dataset, *([config.valid_dataset] if config.valid_dataset else [])]
    batch_size = max(section.batch_size for section in sections)
    return evaluate_on_rows(learner, trainer.valid_dataset, batch_size)


def _rows(source: PromptSource, number: int) -> list[dict[str, Any]]:
    """The rows of step `number`."""
    size = source.batch_size
    return [source.prompt(number * size + i).data for i in range(size)]


class SFTTrainer(Trainer):
    """Fine-tunes a model on given text.

    with SFTTrainer(config, train_rows, valid_rows) as trainer:
        trainer.train()
    """

    def _open(self, stack: ExitStack) -> None:
        _refuse_images_of(self)
        self.engine = self._open_engine("actor", self.config.actor, stack)
        self.learner = LMLearner(self.engine)

    def train(self, on_step: StepObserver | None = None) -> None:
        train_on_rows(self, self.learner, on_step)


class RWTrainer(Trainer):
    """Trains a model to score the chosen answer of a pair above the rejected one.

    with RWTrainer(config, train_rows, valid_rows) as trainer:
        trainer.train()
    """

    def _open(self, stack: ExitStack) -> None:
        _refuse_images_of(self)
        self.engine = self._open_engine("actor", self.config.actor, stack)
        self.learner = RWLearner(self.engine)

    def train(self, on_step: StepObserver | None = None) -> None:
        train_on_rows(self, self.learner, on_step)


class DPOTrainer(Trainer):
    """Trains a policy to prefer the chosen answer of a pair, held near a reference model.

    with DPOTrainer(config, train_rows, valid_rows) as trainer:
        trainer.train()
    """

    def _open(self, stack: ExitStack) -> None:
        _refuse_images_of(self)
        actor = self.config.actor
        self.engine = self._open_engine("actor", actor, stack)
        ref = self._open_engine("ref", self.config.ref.engine_config(actor), stack, trained=False)
        self.learner = DPOLearner(actor, self.engine, ref)

    def train(self, on_step: StepObserver | None = None) -> None:
        train_on_rows(self, self.learner, on_step)
