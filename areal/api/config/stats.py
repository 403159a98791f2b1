"""The `stats_logger` and `perf_tracer` sections: where numbers and traces of a run go.

The console and the run's database always get every number; the trackers are optional packages.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from areal.api.config.checks import expand_path, require_at_least
from areal.api.config.section import config_section


@config_section
class TensorBoardConfig:
    """TensorBoard event files."""

    path: str | None = None
    """Folder of the event files; null writes none."""

    def __post_init__(self) -> None:
        if self.path is not None:
            self.path = expand_path("path", self.path)


@config_section
class WandBConfig:
    """Weights & Biases. The key comes from its own login or environment."""

    mode: Literal["disabled", "online", "offline"] = "disabled"
    """Off, to the service, or to files."""
    project: str | None = None
    """Default: experiment_name."""
    name: str | None = None
    """Default: trial_name."""
    entity: str | None = None
    """User or team. Default: the one logged in."""


@config_section
class SwanlabConfig:
    """SwanLab. The key comes from its own login or environment."""

    mode: Literal["disabled", "cloud", "local", "offline"] = "disabled"
    """Off, to the service, or to files."""
    project: str | None = None
    """Default: experiment_name."""
    name: str | None = None
    """Default: trial_name."""


@config_section
class TrackioConfig:
    """Trackio, a local dashboard of experiments."""

    mode: Literal["disabled", "local"] = "disabled"
    """Off or on."""
    project: str | None = None
    """Default: experiment_name."""
    name: str | None = None
    """Default: trial_name."""


@config_section
class StatsLoggerConfig:
    """Trackers that get the statistics of every step besides console and run database."""

    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    """TensorBoard."""
    wandb: WandBConfig = field(default_factory=WandBConfig)
    """Weights & Biases."""
    swanlab: SwanlabConfig = field(default_factory=SwanlabConfig)
    """SwanLab."""
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    """Trackio."""


@config_section
class PerfTracerConfig:
    """A Chrome trace of the controller's phases, and of when each server computed."""

    enabled: bool = False
    """Record traces."""
    save_interval: int = 1
    """Steps between two writes of the trace file."""

    def __post_init__(self) -> None:
        require_at_least(1, save_interval=self.save_interval)
