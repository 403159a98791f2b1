"""What every trainer has: the durable side of one run, and the steps it goes through.

In: the experiment config. Out: the run's folder, its database (locked for this process),
statistics, traces, savers and recover points. Trainers differ in what they do inside a step; when
a step is saved, evaluated, recorded and recovered from is decided here, once.

    with Run(config, dataset_size=len(rows)) as run:
        first = run.resume(engine)               # 0 for a fresh run
        for step in run.steps(first):
            ...                                  # train
            run.finish_step(step, engine, tokenizer, stats)
        run.finish(engine, tokenizer)
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.cli_args import dump_yaml
from areal.api.config.timers import TimerConfig
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta, StepInfo
from areal.utils import logging, perf_tracer, stats_tracker
from areal.utils.fs import atomic_write_text
from areal.utils.perf_tracer import phase
from areal.utils.recover import RecoverStore
from areal.utils.run_db import RunDatabase
from areal.utils.run_paths import RunPaths
from areal.utils.saver import Saver, save_checkpoint
from areal.utils.stats_logger import StatsLogger
from areal.utils.timers import FrequencyTimer
from areal.utils.trackers import open_trackers

if TYPE_CHECKING:
    from areal.api.config.experiment import BaseExperimentConfig
    from areal.api.engine_api import TrainEngine

logger = logging.getLogger("Run")

# Called after every step with (steps done, steps in all, its statistics).
StepObserver = Callable[[int, int, Mapping[str, float]], None]


class Run:
    """One run of one experiment. Close it, or use it as a context manager."""

    def __init__(self, config: BaseExperimentConfig, *, dataset_size: int) -> None:
        self.paths = RunPaths.of(config)
        self.ft_spec = _finetune_spec(config, dataset_size)
        self._resumes = config.recover.mode == "on"
        self._committed_at = time.perf_counter()
        with ExitStack() as stack:
            self.database = stack.enter_context(_open_database(self.paths, self._resumes))
            stack.enter_context(logging.log_to_file(self.paths.logs / "main.log"))
            atomic_write_text(self.paths.config, dump_yaml(config))
            trackers = open_trackers(
                config.stats_logger,
                experiment_name=config.experiment_name,
                trial_name=config.trial_name,
                logs=self.paths.logs,
                run_config=asdict(config),
            )
            self.stats_logger = StatsLogger(self.database, trackers, total_steps=self.total_steps)
            stack.callback(self.stats_logger.close)
            if config.perf_tracer.enabled:
                perf_tracer.start(self.paths.trace("controller"), process="controller")
                stack.callback(perf_tracer.stop)
            self._closing = stack.pop_all()
        self._trace_interval = config.perf_tracer.save_interval
        self.saver = Saver(self.paths.checkpoints, "actor", _timer(config.saver))
        self._evaluation_timer = _timer(config.evaluator)
        self._evaluates = config.evaluator.ever_fires or config.evaluator.eval_before_train
        self._recover_timer = _timer(config.recover)
        self._recover = RecoverStore(
            self.paths.recover, identity=_identity(config), keep=config.recover.keep
        )

    @property
    def total_steps(self) -> int:
        return self.ft_spec.total_train_steps

    def resume(self, engine: TrainEngine) -> int:
        """Load the newest recover point into `engine`; the first step still to do, 0 if none."""
        point = self._recover.latest() if self._resumes else None
        if point is None:
            self.database.record_event("started", "step 0")
            return 0
        state = point.load()
        engine.load(SaveLoadMeta(path=str(point.path), weight_format="dcp", with_optim=True))
        for name, timer in self._timers().items():
            timer.load_state_dict(state["timers"][name])
        first = point.global_step + 1
        self.database.record_event("resumed", f"step {first}")
        logger.info("resumed after step %d of %d", first, self.total_steps)
        return first

    def steps(self, first: int) -> Iterator[StepInfo]:
        """The steps from number `first` (counted from 0) to the last."""
        per_epoch = self.ft_spec.steps_per_epoch
        self._committed_at = time.perf_counter()
        for number in range(first, self.total_steps):
            yield StepInfo(
                epoch=number // per_epoch,
                epoch_step=number % per_epoch,
                global_step=number,
                steps_per_epoch=per_epoch,
            )

    def evaluation_due(self, step: StepInfo) -> bool:
        """Once per step: whether to evaluate now. A run that evaluates at all ends with one."""
        due = self._evaluation_timer.tick(step)
        return due or (self._evaluates and self._is_last(step))

    def finish_step(
        self, step: StepInfo, engine: TrainEngine, tokenizer: Any, stats: Mapping[str, float]
    ) -> dict[str, float]:
        """Save what is due and record the step's statistics; returns them all.

        `stats["tokens"]` is what the step trained on. The recover point comes last, so that a run
        resumed from it repeats nothing before it.
        """
        with phase("save", "io"):
            self.saver.save_if_due(engine, step, tokenizer)
        recorded = {**stats_tracker.export_all(), **stats, **self._speed(stats["tokens"])}
        self.stats_logger.commit(step.global_step, recorded)
        due = self._recover_timer.tick(step) or self._is_last(step)
        if self._resumes and due:
            with phase("recover", "io"):
                self._write_recover_point(step, engine)
        if (step.global_step + 1) % self._trace_interval == 0:
            perf_tracer.save()
        return recorded

    def oldest_recoverable_step(self) -> int | None:
        """The step of the oldest recover point: trajectories trained by then are not needed."""
        return self._recover.oldest_step()

    def finish(self, engine: TrainEngine, tokenizer: Any) -> Path:
        """Export the trained model to the run's `model/` folder."""
        save_checkpoint(engine, self.paths.model, tokenizer)
        self.database.record_event("finished", f"step {self.total_steps}")
        return self.paths.model

    def close(self) -> None:
        self._closing.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _speed(self, tokens: float) -> dict[str, float]:
        """From commit to commit, so that no part of the loop goes uncounted."""
        now = time.perf_counter()
        seconds, self._committed_at = now - self._committed_at, now
        return {"timeperf/step": seconds, "tokens_per_second": tokens / seconds}

    def _is_last(self, step: StepInfo) -> bool:
        return step.global_step == self.total_steps - 1

    def _write_recover_point(self, step: StepInfo, engine: TrainEngine) -> None:
        def write(folder: Path) -> None:
            engine.save(SaveLoadMeta(path=str(folder), weight_format="dcp", with_optim=True))

        timers = {name: timer.state_dict() for name, timer in self._timers().items()}
        self._recover.save(step.global_step, write, {"timers": timers})

    def _timers(self) -> dict[str, FrequencyTimer]:
        return {
            "saver": self.saver.timer,
            "evaluator": self._evaluation_timer,
            "recover": self._recover_timer,
        }


def _finetune_spec(config: BaseExperimentConfig, dataset_size: int) -> FinetuneSpec:
    batch_size = config.train_dataset.batch_size
    if dataset_size == 0:
        raise ValueError(f"train_dataset {config.train_dataset.path} is empty: it has no rows")
    if dataset_size < batch_size:
        raise ValueError(
            f"train_dataset {config.train_dataset.path} has {dataset_size} rows, fewer than one "
            f"batch: lower train_dataset.batch_size (now {batch_size}) or use more data"
        )
    return FinetuneSpec(
        total_train_epochs=config.total_train_epochs,
        dataset_size=dataset_size,
        train_batch_size=batch_size,
        max_train_steps=config.total_train_steps,
    )


def _open_database(paths: RunPaths, resumes: bool) -> RunDatabase:
    """The run's database; refuses to write into an earlier run that is not to be resumed."""
    if paths.database.exists() and not resumes:
        raise ValueError(
            f"{paths.root} holds an earlier run: set recover.mode=on to go on with it, "
            "or choose another trial_name"
        )
    enough = 16 << 20
    paths.root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(paths.root).free
    if free < enough:
        raise RuntimeError(f"{paths.root}: only {free >> 20} MiB of disk are free")
    return RunDatabase(paths.database)


def _timer(config: TimerConfig) -> FrequencyTimer:
    return FrequencyTimer(
        freq_epochs=config.freq_epochs, freq_steps=config.freq_steps, freq_secs=config.freq_secs
    )


def _identity(config: BaseExperimentConfig) -> dict[str, Any]:
    """What must not change between a recover point and the run that goes on from it."""
    return {
        "trainer": config.trainer,
        "seed": config.seed,
        "actor.path": config.actor.path,
        "train_dataset.path": config.train_dataset.path,
        "train_dataset.batch_size": config.train_dataset.batch_size,
        "train_dataset.dataset_kwargs": config.train_dataset.dataset_kwargs,
    }
