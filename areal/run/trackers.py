"""Experiment trackers: TensorBoard, Weights & Biases, SwanLab, Trackio.

Each is an optional package, imported only if its section of `stats_logger` enables it. A tracker
gets numbers by step and is closed once.

Invariant: no tracker can stop or block a run. Each is opened, fed and closed in its own thread:

    tracker thread   consumes: the numbers of each step, in order   waits for: them, and its tracker
                     unblocked by: log(), close()                   ends: with its tracker's close

Exceptions of a tracker are logged once per kind and counted. If it hangs, numbers beyond its
backlog are dropped, and its thread is abandoned at the end after `timeout_s`.
"""

from __future__ import annotations

import importlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from areal.api.config.run import (
    StatsLoggerConfig,
    SwanlabConfig,
    TrackioConfig,
    WandBConfig,
)
from areal.utils import logging
from areal.utils.fs import private_folder
from areal.utils.waits import waiting

logger = logging.getLogger("Trackers")

_MAX_WAITING = 1000  # steps


class Tracker(Protocol):
    def log(self, step: int, stats: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TrackerThread:
    """Runs one tracker in its own thread. No method raises its exceptions."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]) -> None:
        self.name = name
        self._failures: Counter[str] = Counter()  # by kind
        self._counting = threading.Lock()
        self._steps: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._serve, args=(open_tracker,), name=f"tracker-{name}", daemon=True
        )
        self._thread.start()

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        if self._steps.qsize() < _MAX_WAITING:
            self._steps.put((step, dict(stats)))
        else:
            self._note("Backlog", f"{_MAX_WAITING} steps are queued for it: new ones are dropped")

    def failures(self) -> Counter[str]:
        """Number of failures by kind."""
        with self._counting:
            return self._failures.copy()

    def begin_close(self) -> None:
        """Stop intake; `join` waits for the backlog."""
        self._steps.put(None)

    def join(self, deadline: float) -> None:
        with waiting(f"tracker {self.name} to close"):
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._note("Hang", "it did not finish in time and is abandoned")

    def _serve(self, open_tracker: Callable[[], Tracker]) -> None:
        tracker = self._try(open_tracker, "opening it")
        while (told := self._steps.get()) is not None:
            if tracker is not None:
                self._try(lambda told=told: tracker.log(*told), f"step {told[0] + 1}")
        if tracker is not None:
            self._try(tracker.close, "closing it")

    def _try(self, act: Callable[[], Any], what: str) -> Any:
        """The result of `act`, None if it fails: the run does not depend on trackers."""
        try:
            return act()
        except (Exception, SystemExit) as error:
            self._note(type(error).__name__, f"{what} failed with {type(error).__name__}: {error}")
            return None

    def _note(self, kind: str, text: str) -> None:
        with self._counting:
            self._failures[kind] += 1
            is_first = self._failures[kind] == 1
        if is_first:
            logger.warning(
                "tracker %s: %s; the run continues, further failures are counted", self.name, text
            )


def close_all(trackers: Sequence[TrackerThread], timeout_s: float) -> None:
    """Close them concurrently, within `timeout_s` in total, and log failures."""
    deadline = time.monotonic() + timeout_s
    for tracker in trackers:
        tracker.begin_close()
    for tracker in trackers:
        tracker.join(deadline)
        if failures := tracker.failures():
            kinds = ", ".join(f"{kind} {count}" for kind, count in failures.most_common())
            logger.warning("tracker %s is incomplete: %s", tracker.name, kinds)


def open_trackers(
    config: StatsLoggerConfig,
    *,
    experiment_name: str,
    trial_name: str,
    logs: Path,
    run_config: Mapping[str, Any],
) -> list[TrackerThread]:
    """The trackers that `config` enables. `run_config` is shown beside their charts.

    ValueError if a package is not installed.
    """

    def about(section: WandBConfig | SwanlabConfig | TrackioConfig) -> dict[str, Any]:
        return {
            "project": section.project or experiment_name,
            "name": section.name or trial_name,
            "config": dict(run_config),
        }

    opened: dict[str, Callable[[], Tracker]] = {}
    if (path := config.tensorboard.path) is not None:
        _import("tensorboard", "stats_logger.tensorboard.path", path)
        writer_class = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        opened["tensorboard"] = lambda: TensorBoardTracker(writer_class, path)
    if config.wandb.mode != "disabled":
        wandb = _import("wandb", "stats_logger.wandb.mode", config.wandb.mode)
        opened["wandb"] = lambda: _open_wandb(wandb, config.wandb, logs, about(config.wandb))
    if config.swanlab.mode != "disabled":
        swanlab = _import("swanlab", "stats_logger.swanlab.mode", config.swanlab.mode)
        opened["swanlab"] = lambda: _open_swanlab(
            swanlab, config.swanlab, logs, about(config.swanlab)
        )
    if config.trackio.mode != "disabled":
        trackio = _import("trackio", "stats_logger.trackio.mode", config.trackio.mode)
        opened["trackio"] = lambda: RunTracker(trackio.init(**about(config.trackio)), first_step=-1)
    return [TrackerThread(name, open_tracker) for name, open_tracker in opened.items()]


class TensorBoardTracker:
    """Event files in a folder."""

    def __init__(self, writer_class: Any, path: str) -> None:
        self._writer_class = writer_class
        self._path = path
        self._writer: Any = None

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        if self._writer is None:
            # A resumed run repeats steps: purge_step hides what an earlier process wrote.
            self._writer = self._writer_class(self._path, purge_step=step)
        for key, value in stats.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class RunTracker:
    """A run of wandb, SwanLab or Trackio, which log and end alike."""

    def __init__(self, run: Any, *, first_step: int) -> None:
        """Steps before `first_step` are logged as it: -1 is the evaluation before training, and
        not every package takes negative steps."""
        self._run, self._first_step = run, first_step

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        self._run.log(dict(stats), step=max(step, self._first_step))

    def close(self) -> None:
        self._run.finish()


def _open_wandb(
    wandb: ModuleType, section: WandBConfig, logs: Path, about: dict[str, Any]
) -> RunTracker:
    where = {"entity": section.entity, "dir": str(private_folder(logs))}
    return RunTracker(wandb.init(**about, **where, mode=section.mode), first_step=0)


def _open_swanlab(
    swanlab: ModuleType, section: SwanlabConfig, logs: Path, about: dict[str, Any]
) -> RunTracker:
    about["experiment_name"] = about.pop("name")
    run = swanlab.init(**about, mode=section.mode, logdir=str(logs / "swanlab"))
    return RunTracker(run, first_step=0)


def _import(package: str, key: str, value: object) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as err:
        if err.name != package:
            raise
        raise ValueError(
            f"{key}={value} needs the package {package}, which is not installed; run pip install "
            "'areal[trackers]' or remove the key"
        ) from None
