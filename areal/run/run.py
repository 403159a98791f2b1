"""The durable side of one run, common to all trainers: folder, database, steps, recovery.

In: the experiment config. Out: the run's folder, its database (locked for this process),
statistics, traces, savers and recover points. Trainers define what happens inside a step; when a
step is saved, evaluated, recorded and recovered from is decided here.

    with Run(config, dataset_size=len(rows), can_evaluate=False) as run:
        run.roles.add("actor", engine)           # every trained model
        run.remember(kl_control=control)         # other state that training depends on
        first = run.resume()                     # 0 for a fresh run
        for step in run.steps(first):
            ...                                  # train
            run.finish_step(step, tokenizer, stats)
        run.finish(tokenizer)

A recover point is the state at the end of one step: captured there, and written during the steps
that follow. Until it is complete on disk the previous one is valid, and its data is kept. A write
that fails stops the run at the end of the next step.

`Roles` holds the trained models by role, each with its own saver and timer:

    roles.add("actor", engine); roles.add("critic", engine)
    roles.save_if_due(step, tokenizer)     # checkpoints/{role}/...
    write = roles.capture()                # a copy of their current state
    write(point); roles.read(point)        # one recover point: {point}/{role}/

A recover point holds all roles or is invalid: `run/recover.py` writes the manifest over its files
last. Frozen models (reference, teacher) have no state to keep.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from areal.api import scratch
from areal.api.cli_args import dump_yaml
from areal.api.config.run import TimerConfig
from areal.api.engine_api import TrainEngine
from areal.api.io_struct import FinetuneSpec, SaveLoadMeta, StepInfo
from areal.api.redact import without_secrets
from areal.run.checkpoints import FrequencyTimer, Saver, save_checkpoint
from areal.run.database import RunDatabase, Start
from areal.run.fingerprint import run_identity
from areal.run.model_paths import actor_section, fetch_models, pin_models
from areal.run.numerics import RandomStates, numeric_environment
from areal.run.paths import RunPaths
from areal.run.recover import RecoverError, Recovery, newest_step
from areal.run.stats_logger import StatsLogger
from areal.run.trackers import open_trackers
from areal.run.watchdog import watched
from areal.sandbox.process import hidden_from_rewards
from areal.utils import logging, perf_tracer, stats_tracker
from areal.utils.fs import atomic_write_text, private_folder, raise_file_limit
from areal.utils.perf_tracer import phase
from areal.utils.startup import stage

if TYPE_CHECKING:
    from areal.api.config.experiment import BaseExperimentConfig
    from areal.run.recover import RecoverPoint


logger = logging.getLogger("Run")

# Called after every step with (steps done, total steps, its statistics).
StepObserver = Callable[[int, int, Mapping[str, float]], None]


class Stateful(Protocol):
    """An object with a small state of JSON values that must survive a kill."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Run:
    """One run of one experiment. Close it, or use it as a context manager."""

    def __init__(
        self, config: BaseExperimentConfig, *, dataset_size: int, can_evaluate: bool
    ) -> None:
        """`can_evaluate`: there are evaluation rows; without them `evaluator` is off."""
        raise_file_limit()  # every in-flight request is a connection
        self.paths = RunPaths.of(config)
        self.ft_spec = _finetune_spec(config, dataset_size)
        self._resumes = config.recover.mode == "on"
        self._setup_timeout_s = actor_section(config).setup_timeout
        self._committed_at = time.perf_counter()
        self._has_begun = False
        with ExitStack() as stack:
            stack.enter_context(self.paths.made())
            stack.enter_context(self._no_ledger_left_by_a_refusal())
            self.database = stack.enter_context(_open_database(self.paths, self._resumes))
            stack.enter_context(logging.log_to_file(self.paths.logs / "main.log"))
            stack.enter_context(hidden_from_rewards(self.paths.root))
            self.watchdog = stack.enter_context(
                watched(config.watchdog.seconds, stacks_file=self.paths.stacks)
            )
            pin_models(config, self.paths)
            fetch_models(config)
            self._config_text = dump_yaml(config)
            identity = run_identity(config, dataset_size)
            self._recovery = stack.enter_context(
                Recovery(self.paths.recover, config.recover, identity, self.database)
            )
            self._recovery.check_origin()
            stack.enter_context(scratch.kept_in(self.paths.scratch))
            trackers = open_trackers(
                config.stats_logger,
                experiment_name=config.experiment_name,
                trial_name=config.trial_name,
                logs=self.paths.logs,
                run_config=without_secrets(asdict(config)),
            )
            self.stats_logger = StatsLogger(self.database, trackers, total_steps=self.total_steps)
            stack.callback(self.stats_logger.close)
            if config.perf_tracer.enabled:
                folder = str(self.paths.traces.absolute())
                stack.enter_context(scratch.variable_set(perf_tracer.FOLDER_VARIABLE, folder))
                perf_tracer.start(self.paths.trace("controller"), process="controller")
                stack.callback(perf_tracer.stop)
            self._closing = stack.pop_all()
        self._trace_interval = config.perf_tracer.save_interval
        self._profiled_steps = set(config.perf_tracer.profile_steps or ())
        self.roles = Roles(
            self.paths.checkpoints, lambda: _timer(config.saver), keep=config.saver.keep
        )
        self._remembered: dict[str, Stateful] = {}
        self._evaluation_timer = _timer(config.evaluator)
        before = config.evaluator.eval_before_train
        self._evaluates = can_evaluate and (config.evaluator.ever_fires or before)
        self.evaluates_before = can_evaluate and before
        self._recover_timer = _timer(config.recover)
        # Called with the newest step that no recovery goes back before: its data may be deleted.
        self.on_settled: Callable[[int], None] = lambda step: None

    @property
    def total_steps(self) -> int:
        return self.ft_spec.total_train_steps

    def remember(self, **holders: Stateful) -> None:
        """Include the states of `holders` in recover points, beside roles and timers."""
        taken = holders.keys() & self._remembered.keys()
        assert not taken, f"{taken} are remembered already"
        self._remembered |= holders

    def resume(self) -> int:
        """Load the newest recover point into every role; returns the next step, 0 without a point.

        Writes config.yaml, which marks the folder as that of a started run.
        """
        with stage("recover point", limit_s=self._setup_timeout_s):
            point = self._recovery.read(self.load)
        first = 0 if point is None else point.global_step + 1
        if point is None and (undone := self.database.ledger_view().num_steps) > 0:
            logger.warning("%d steps are repeated: no recover point was written", undone)
        atomic_write_text(self.paths.config, self._config_text)
        self._has_begun = True
        self.database.record_start(
            Start(first, self._config_text, self.ft_spec.dataset_size, numeric_environment())
        )
        if point is None:
            self.database.record_event("started", "step 0")
            return 0
        self.database.record_event("resumed", f"step {first}")
        logger.info("resumed after step %d of %d, from %s", first, self.total_steps, point.path)
        return first

    def load(self, point: RecoverPoint) -> RecoverPoint:
        """Restore all state from `point`; a damaged point changes nothing."""
        state = point.load()
        self.roles.read(point.path)
        for name, holder in self._states().items():
            if name in state:  # state that the killed run did not have starts fresh
                holder.load_state_dict(state[name])
        return point

    def steps(self, first: int) -> Iterator[StepInfo]:
        """The steps from `first` (counted from 0) to the last."""
        per_epoch = self.ft_spec.steps_per_epoch
        self._committed_at = time.perf_counter()
        for number in range(first, self.total_steps):
            with self._profile(number):
                yield StepInfo(
                    epoch=number // per_epoch,
                    epoch_step=number % per_epoch,
                    global_step=number,
                    steps_per_epoch=per_epoch,
                )

    @contextmanager
    def _profile(self, step: int) -> Iterator[None]:
        """Around a step of `perf_tracer.profile_steps`: a profile of each rank of the actor."""
        if step not in self._profiled_steps:
            yield
            return
        private_folder(self.paths.profiles)
        actor = self.roles.engine("actor")
        actor.start_profile()
        yield
        actor.save_profile(str(self.paths.profiles.absolute() / f"step{step}"))

    def evaluation_due(self, step: StepInfo) -> bool:
        """Whether to evaluate now; call it once per step. The last step always evaluates."""
        due = self._evaluation_timer.tick(step)
        return self._evaluates and (due or self._is_last(step))

    def finish_step(
        self, step: StepInfo, tokenizer: Any, stats: Mapping[str, float]
    ) -> dict[str, float]:
        """Save what is due and record the step's statistics; returns them all.

        `stats["tokens"]` is the number of tokens trained on. The recover point comes last, so
        that a resumed run repeats nothing of this step.
        """
        with self._recovery.stopping_in_order(step.global_step + 1):
            self._settle(self._recovery.poll())
            with phase("save", "io"):
                self.roles.save_if_due(step, tokenizer)
            recorded = {**stats_tracker.export_all(), **stats, **self._speed(stats["tokens"])}
            self.stats_logger.commit(step.global_step, recorded)
            due = self._recover_timer.tick(step) or self._is_last(step)
            if not self._resumes:
                self.on_settled(step.global_step)
            elif due:
                with phase("recover", "io"):
                    self._start_recover_point(step)
        if (step.global_step + 1) % self._trace_interval == 0:
            perf_tracer.save()
        return recorded

    def finish(self, tokenizer: Any) -> Path:
        """Export the trained actor to the run's `model/` folder."""
        with self._recovery.stopping_in_order(self.total_steps):
            save_checkpoint(self.roles.engine("actor"), self.paths.model, tokenizer)
            self._settle(self._recovery.wait())
        self.database.record_event("finished", f"step {self.total_steps}")
        return self.paths.model

    def close(self) -> None:
        self._closing.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._closing.__exit__(*exc_info)

    @contextmanager
    def _no_ledger_left_by_a_refusal(self) -> Iterator[None]:
        """An error before the first step leaves no new ledger behind, so that a lost one can be
        put back."""
        had_ledger = self.paths.database.exists()
        try:
            yield
        except (ValueError, FileNotFoundError, RecoverError):
            if not had_ledger and not self._has_begun:
                self.paths.database.unlink(missing_ok=True)
            raise

    def _speed(self, tokens: float) -> dict[str, float]:
        """Measured from commit to commit, so that every part of the loop counts."""
        now = time.perf_counter()
        seconds, self._committed_at = now - self._committed_at, now
        return {"timeperf/step": seconds, "tokens_per_second": tokens / seconds}

    def _is_last(self, step: StepInfo) -> bool:
        return step.global_step == self.total_steps - 1

    def _start_recover_point(self, step: StepInfo) -> None:
        self._settle(self._recovery.wait())
        state = {name: holder.state_dict() for name, holder in self._states().items()}
        self._recovery.start(step.global_step, self.roles.capture(), state)

    def _settle(self, has_written: bool) -> None:
        oldest = self._recovery.oldest_step() if has_written else None
        if oldest is not None:
            self.on_settled(oldest)

    def _states(self) -> dict[str, Stateful]:
        timers = {"evaluator": self._evaluation_timer, "recover": self._recover_timer}
        random = {"random": RandomStates()}
        return {**timers, **random, **self.roles.timers(), **self._remembered}


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
        max_train_steps=config.max_train_steps,
    )


def _open_database(paths: RunPaths, resumes: bool) -> RunDatabase:
    """The run's database; ValueError if the folder holds an earlier run, unless it resumes."""
    can_go_on = newest_step(paths.recover) is not None
    advice = "set recover.mode=on to go on with it, or " if can_go_on else ""
    refusal = ValueError(f"{paths.root} holds an earlier run: {advice}choose another trial_name")
    if not resumes and (paths.config.exists() or can_go_on):
        raise refusal
    enough = 16 << 20
    paths.make_root()
    free = shutil.disk_usage(paths.root).free
    if free < enough:
        raise RuntimeError(f"{paths.root}: only {free >> 20} MiB of disk are free")
    database = RunDatabase(paths.database)
    if not resumes and database.query("SELECT 1 FROM starts LIMIT 1"):  # without its config.yaml
        database.close()
        raise refusal
    return database


def _timer(config: TimerConfig) -> FrequencyTimer:
    return FrequencyTimer(
        freq_epochs=config.freq_epochs, freq_steps=config.freq_steps, freq_secs=config.freq_secs
    )


@dataclass(frozen=True, slots=True)
class _Role:
    engine: TrainEngine
    saver: Saver


class Roles:
    def __init__(
        self,
        checkpoints: Path,
        new_timer: Callable[[], FrequencyTimer],
        *,
        keep: int | None = None,
    ) -> None:
        """`new_timer` makes the timer of a role's saver, which keeps the newest `keep`."""
        self._checkpoints = checkpoints
        self._new_timer = new_timer
        self._keep = keep
        self._roles: dict[str, _Role] = {}

    def add(self, role: str, engine: TrainEngine) -> None:
        assert role not in self._roles, f"role {role} is taken"
        saver = Saver(self._checkpoints, role, self._new_timer(), keep=self._keep)
        self._roles[role] = _Role(engine, saver)

    def engine(self, role: str) -> TrainEngine:
        return self._roles[role].engine

    def timers(self) -> dict[str, FrequencyTimer]:
        return {f"saver.{name}": role.saver.timer for name, role in self._roles.items()}

    def save_if_due(self, step: StepInfo, tokenizer: Any) -> None:
        for role in self._roles.values():
            role.saver.save_if_due(role.engine, step, tokenizer)

    def capture(self) -> Callable[[Path], None]:
        """Copy their current state; returns its writer. Training may continue meanwhile."""
        writers = {name: role.engine.capture() for name, role in self._roles.items()}

        def write(point: Path) -> None:
            for name, write_role in writers.items():
                write_role(point / name)

        return write

    def read(self, point: Path) -> None:
        for name, role in self._roles.items():
            path = str(point / name)
            role.engine.load(SaveLoadMeta(path=path, weight_format="dcp", with_optim=True))
