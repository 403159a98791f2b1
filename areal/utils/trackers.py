"""Experiment trackers a run may also report to: TensorBoard, Weights & Biases, SwanLab, Trackio.

Each is an optional package, imported only when its section of `stats_logger` switches it on. A
tracker gets plain numbers by step and is closed once; it never sees anything else of the run.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from areal.api.config.stats import (
    StatsLoggerConfig,
    SwanlabConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandBConfig,
)


class Tracker(Protocol):
    def log(self, step: int, stats: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_trackers(
    config: StatsLoggerConfig,
    *,
    experiment_name: str,
    trial_name: str,
    logs: Path,
    run_config: Mapping[str, Any],
) -> list[Tracker]:
    """The trackers that `config` switches on. `run_config` is shown beside their charts."""
    names = {"project": experiment_name, "name": trial_name}
    trackers: list[Tracker] = []
    if config.tensorboard.path is not None:
        trackers.append(TensorBoardTracker(config.tensorboard))
    if config.wandb.mode != "disabled":
        trackers.append(WandBTracker(config.wandb, names, logs, run_config))
    if config.swanlab.mode != "disabled":
        trackers.append(SwanLabTracker(config.swanlab, names, logs, run_config))
    if config.trackio.mode != "disabled":
        trackers.append(TrackioTracker(config.trackio, names, run_config))
    return trackers


class TensorBoardTracker:
    """Event files in a folder."""

    def __init__(self, config: TensorBoardConfig) -> None:
        _import("tensorboard", "stats_logger.tensorboard.path", config.path)
        self._writer_class = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._path = config.path
        self._writer: Any = None

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        if self._writer is None:
            # A resumed run repeats steps: what an earlier process wrote from here on is hidden.
            self._writer = self._writer_class(self._path, purge_step=step)
        for key, value in stats.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandBTracker:
    def __init__(
        self, config: WandBConfig, names: dict[str, str], logs: Path, run_config: Mapping[str, Any]
    ) -> None:
        wandb = _import("wandb", "stats_logger.wandb.mode", config.mode)
        logs.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=config.project or names["project"],
            name=config.name or names["name"],
            entity=config.entity,
            mode=config.mode,
            dir=str(logs),
            config=dict(run_config),
        )

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        # wandb refuses steps below zero, where the evaluation before training stands.
        self._run.log(dict(stats), step=max(step, 0))

    def close(self) -> None:
        self._run.finish()


class SwanLabTracker:
    def __init__(
        self,
        config: SwanlabConfig,
        names: dict[str, str],
        logs: Path,
        run_config: Mapping[str, Any],
    ) -> None:
        swanlab = _import("swanlab", "stats_logger.swanlab.mode", config.mode)
        self._run = swanlab.init(
            project=config.project or names["project"],
            experiment_name=config.name or names["name"],
            mode=config.mode,
            logdir=str(logs / "swanlab"),
            config=dict(run_config),
        )

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        self._run.log(dict(stats), step=max(step, 0))

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    def __init__(
        self, config: TrackioConfig, names: dict[str, str], run_config: Mapping[str, Any]
    ) -> None:
        trackio = _import("trackio", "stats_logger.trackio.mode", config.mode)
        self._run = trackio.init(
            project=config.project or names["project"],
            name=config.name or names["name"],
            config=dict(run_config),
        )

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        self._run.log(dict(stats), step=step)

    def close(self) -> None:
        self._run.finish()


def _import(package: str, key: str, value: object) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as err:
        if err.name != package:
            raise
        raise ValueError(
            f"{key}={value} needs the package {package}, which is not installed; "
            "run pip install 'areal[trackers]' or take the key out"
        ) from None
