"""Supervised fine-tuning: batches in a seeded order, one optimizer step each.

In: rows with `input_ids` and `loss_mask`. Out: a trained model in the run's folder. The row order
is a function of the step number, so a resumed run goes on with the rows it would have seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from areal.engine.archon_engine import ArchonEngine
from areal.rollout.source import PromptSource
from areal.trainer.lm import eval_lm, train_lm
from areal.trainer.run import Run, StepObserver
from areal.utils.perf_tracer import phase
from areal.utils.tokenizer import load_hf_tokenizer

if TYPE_CHECKING:
    from areal.api.config.experiment import SFTConfig

Rows = Sequence[dict[str, Any]]


class SFTTrainer:
    """Fine-tunes a model on given text.

    with SFTTrainer(config, train_rows, valid_rows) as trainer:
        trainer.train()
    """

    def __init__(
        self, config: SFTConfig, train_dataset: Rows, valid_dataset: Rows | None = None
    ) -> None:
        self.config = config
        self.valid_dataset = valid_dataset or ()
        with ExitStack() as stack:
            self.run = stack.enter_context(Run(config, dataset_size=len(train_dataset)))
            self.tokenizer = load_hf_tokenizer(config.tokenizer_path)
            self.source = PromptSource(
                train_dataset,
                batch_size=config.train_dataset.batch_size,
                seed=config.seed,
                shuffle=config.train_dataset.shuffle,
                drop_last=config.train_dataset.drop_last,
            )
            self.engine = ArchonEngine(config.actor)
            stack.callback(self.engine.destroy)
            self.engine.initialize(self.run.ft_spec)
            self._closing = stack.pop_all()

    def train(self, on_step: StepObserver | None = None) -> None:
        first = self.run.resume(self.engine)
        if first == 0 and self.config.evaluator.eval_before_train:
            self.run.stats_logger.commit(-1, {"eval/loss": self.evaluate()})
        for step in self.run.steps(first):
            with phase("train"):
                batch = self._batch(step.global_step)
                stats = train_lm(self.engine, batch)
                self.engine.step_lr_scheduler()
            stats["tokens"] = batch["attention_mask"].sum().item()
            if self.run.evaluation_due(step):
                with phase("evaluate"):
                    stats["eval/loss"] = self.evaluate()
            recorded = self.run.finish_step(step, self.engine, self.tokenizer, stats)
            if on_step is not None:
                on_step(step.global_step + 1, self.run.total_steps, recorded)
        self.run.finish(self.engine, self.tokenizer)

    def evaluate(self) -> float:
        """Mean token loss over the validation rows."""
        return eval_lm(self.engine, collate(self.valid_dataset))

    def close(self) -> None:
        self._closing.close()

    def __enter__(self) -> SFTTrainer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _batch(self, number: int) -> dict[str, torch.Tensor]:
        size = self.source.batch_size
        return collate([self.source.prompt(number * size + i).data for i in range(size)])


def collate(rows: Rows) -> dict[str, torch.Tensor]:
    """Rows of token lists as one right-padded batch."""
    ids = [torch.tensor(row["input_ids"], dtype=torch.int32) for row in rows]
    masks = [torch.tensor(row["loss_mask"], dtype=torch.int32) for row in rows]
    real = [torch.ones(len(row), dtype=torch.bool) for row in ids]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "loss_mask": pad_sequence(masks, batch_first=True),
        "attention_mask": pad_sequence(real, batch_first=True),
    }
