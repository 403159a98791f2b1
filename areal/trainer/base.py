"""Base of all trainers: a run, a tokenizer, a row source, and models by role.

    class MyTrainer(Trainer):
        def _open(self, stack):                              # called once, by the constructor
            self.engine = self._open_engine("actor", self.config.actor, stack)

        def train(self, on_step=None): ...

Resources are closed in reverse order by `close`, by leaving the `with` block, and when a later part
of the constructor fails. The caller sees the first error: a later error while closing is logged.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Self, cast

from areal.api.config.train_engine import TrainEngineConfig
from areal.api.engine_api import TrainEngine
from areal.api.scheduler_api import Scheduler
from areal.engine import train_engine_class, train_engine_path
from areal.infra.jobs import all_jobs, model_job
from areal.infra.scheduler import open_scheduler
from areal.infra.train_controller import TrainController
from areal.rollout.source import PromptSource
from areal.run.run import Run
from areal.trainer.colocation import ModelRoom
from areal.utils import logging
from areal.utils.startup import stage
from areal.utils.tokenizer import load_hf_tokenizer

logger = logging.getLogger("Trainer")

Rows = Sequence[dict[str, Any]]


class Trainer(ABC):
    def __init__(self, config: Any, train_dataset: Rows, valid_dataset: Rows | None = None) -> None:
        """`config` is the experiment config of this trainer."""
        self.config = config
        self.train_dataset = train_dataset
        self.valid_dataset = list(valid_dataset or ())
        self.scheduler: Scheduler | None = None  # None while the run has no workers
        self.models: dict[str, TrainEngine] = {}  # by role
        sections = config.models()
        offloaded = [role for role, section in sections.items() if section.offload]
        self.room = ModelRoom(offloaded, config.hosts())
        self._closing = ExitStack()
        try:
            run = Run(
                config,
                dataset_size=len(train_dataset),
                can_evaluate=len(self.valid_dataset) > 0,
            )
            self.run = self._closing.enter_context(run)
            self.tokenizer = load_hf_tokenizer(config.tokenizer_path)
            self.source = _row_source(config, train_dataset)
            self._open(self._closing)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    @abstractmethod
    def _open(self, stack: ExitStack) -> None:
        """Open the models and other resources of `train`; `stack` closes them."""

    def close(self) -> None:
        """Idempotent."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        try:
            self._closing.__exit__(*exc_info)
        except Exception:
            if exc_info[1] is None:
                raise
            # The first error propagates to the caller.
            logger.exception("closing failed too")

    def _open_engine(
        self, role: str, config: TrainEngineConfig, stack: ExitStack, *, trained: bool = True
    ) -> TrainEngine:
        """The model of one role; a trained one has an optimizer and is saved and recovered.

        It runs in this process or on separate ranks, behind the same interface.
        """
        with stage(f"model of {role}, {config.backend}", limit_s=config.setup_timeout):
            if self.config.hosts()[role] == "controller":
                # TrainEngine does not define the constructor.
                make = cast(Callable[..., TrainEngine], train_engine_class(config.backend))
                engine = make(config, seed=self.config.seed)
            else:
                engine = self._open_ranks(role, config, stack)
            stack.callback(engine.destroy)
            engine.initialize(self.run.ft_spec if trained else None)
            engine = self.room.resident(role, engine)
        self.models[role] = engine
        if trained:
            self.run.roles.add(role, engine)
        return engine

    def _open_ranks(self, role: str, config: TrainEngineConfig, stack: ExitStack) -> TrainEngine:
        controller = TrainController(
            self._open_scheduler(stack),
            model_job(self.config, role),
            train_engine_path(config.backend),
            config.allocation.parallel,
            config,
            seed=self.config.seed,
            shares_prefixes=config.enable_tree_training,
            setup_timeout_s=config.setup_timeout,
            request_timeout_s=config.request_timeout,
        )
        return cast(TrainEngine, controller)  # it dispatches the marked methods of the contract

    def _open_scheduler(self, stack: ExitStack) -> Scheduler:
        """That of all workers of the run, opened with the first of them."""
        if self.scheduler is None:
            self.scheduler = open_scheduler(
                self.config.scheduler, all_jobs(self.config), logs=self.run.paths.logs
            )
            stack.callback(self.scheduler.delete_workers)
        return self.scheduler


def _row_source(config: Any, rows: Rows) -> PromptSource:
    dataset = config.train_dataset
    return PromptSource(
        rows,
        batch_size=dataset.batch_size,
        seed=config.seed,
        shuffle=dataset.shuffle,
        drop_last=dataset.drop_last,
    )
