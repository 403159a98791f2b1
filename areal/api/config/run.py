"""Sections about the run itself: where files are, who starts processes, what is recorded and when.

`cluster` and `scheduler`: folders, and how processes are started. `train_dataset` and
`valid_dataset`: which rows, in which order. `stats_logger` and `perf_tracer`: the console and the
run's database always get every number; trackers are optional packages. `saver`, `evaluator` and
`recover`: periodic actions with up to three timers each; any one triggers, none set means never.
`watchdog`: when a run without progress is ended.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from areal.api.config.section import (
    config_section,
    expand_path,
    require,
    require_above,
    require_at_least,
)


@config_section
class ClusterSpecConfig:
    """Folders and machines."""

    fileroot: str = "runs"
    """Folder of all runs. What a run keeps is under {fileroot}/{experiment_name}/{trial_name}."""
    n_nodes: int = 1
    """Machines of the run; more than one needs Ray. `areal launch slurm` asks for as many, and
    `areal launch ray` waits for them."""
    n_gpus_per_node: int = 0
    """GPUs that `areal launch slurm` asks for on each machine."""

    def __post_init__(self) -> None:
        require_at_least(1, n_nodes=self.n_nodes)
        require_at_least(0, n_gpus_per_node=self.n_gpus_per_node)
        require(bool(self.fileroot), "fileroot must name a folder", self.fileroot)
        self.fileroot = expand_path("fileroot", self.fileroot)


@config_section
class SchedulerConfig:
    """How worker processes are started."""

    type: Literal["local", "ray", "slurm"] | None = "local"
    """`local` (or null): the controller itself, on this machine; a layout of one rank then runs in
    the controller. `ray`: Ray, on one machine or a cluster; needs the extra `ray`. `slurm`: Ray
    inside a Slurm job, which `areal train` submits as `areal launch slurm` does."""
    placement: Literal["PACK", "SPREAD"] = "PACK"
    """With Ray: pack the workers of a role on few machines, or spread them."""

    def __post_init__(self) -> None:
        self.type = self.type or "local"

    @property
    def by_ray(self) -> bool:
        """Whether workers are Ray's; inside a Slurm job they are too."""
        return self.type != "local"


RowType = Literal["sft", "rl", "rw", "dpo"]


@config_section
class DatasetConfig:
    """One data set, by name (`gsm8k`, `arithmetic`), by path, or by the import path of a loader."""

    path: str
    """Name of a data set, a local file or folder, a hub name (`org/name`, `org/name@revision`), or
    an import path `package.module.loader`."""
    type: RowType | None = None
    """Shape of a row: token ids, a prompt, or a chosen and a rejected answer (`rw`, `dpo`).
    Default: what the trainer needs."""
    split: str = "train"
    """Which part of the data set."""
    batch_size: int = 1
    """Prompts, rows or pairs per training step."""
    shuffle: bool = True
    """A new order in each epoch, fixed by the run's seed."""
    drop_last: bool = True
    """Leave out the last rows of an epoch that do not fill a batch."""
    max_length: int | None = None
    """Rows with more prompt tokens than this are left out."""
    prompt: str | None = None
    """Column of a file (JSON-lines, CSV, TSV, Parquet) with the question: a text, or a chat. With
    it no loader is needed; all columns but this one reach the reward function by their names."""
    answer: str | None = None
    """Column with the reference answer, `answer` of the reward function; for `sft` the target
    text."""
    dataset_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the loader."""

    def __post_init__(self) -> None:
        require(bool(self.path), "path must name a data set", self.path)
        self.path = expand_path("path", self.path)
        self._check_columns()
        require_at_least(1, batch_size=self.batch_size, max_length=self.max_length)

    @property
    def columns(self) -> dict[str, str]:
        """The columns that are set, for the loader."""
        named = {"prompt": self.prompt, "answer": self.answer}
        return {key: name for key, name in named.items() if name is not None}

    def _check_columns(self) -> None:
        require(
            self.answer is None or self.prompt is not None,
            "prompt must name the column of the question when answer names one",
            None,
        )
        require(
            self.prompt is None or "loader" not in self.dataset_kwargs,
            "dataset_kwargs.loader must be removed when prompt names a column: columns need no "
            "loader",
            self.dataset_kwargs.get("loader"),
        )


@config_section
class ValidDatasetConfig(DatasetConfig):
    """A data set for evaluation: every row once, in order."""

    split: str = "test"
    """Which part of the data set."""
    batch_size: int = 1
    """Rows or pairs that are in memory at a time; at least as many as in a training step. With
    trainer ppo, rows in flight at a time: at least twice rollout.max_concurrent_rollouts."""
    shuffle: bool = False
    """A new order in each epoch, fixed by the run's seed."""
    drop_last: bool = False
    """Leave out the last rows of an epoch that do not fill a batch."""


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
    """Chrome traces of every process of the run, which `areal trace` joins; profiles of torch."""

    enabled: bool = False
    """Record traces."""
    save_interval: int = 1
    """Steps between two writes of the controller's trace file; other processes write theirs every
    five seconds."""
    profile_steps: list[int] | None = None
    """Steps, counted from 0, in which torch's profiler records every rank of the actor."""

    def __post_init__(self) -> None:
        require_at_least(1, save_interval=self.save_interval)
        for step in self.profile_steps or ():
            require_at_least(0, profile_steps=step)


@config_section
class TimerConfig:
    """Up to three timers; any one triggers."""

    freq_epochs: int | None = None
    """Every this many epochs."""
    freq_steps: int | None = None
    """Every this many steps."""
    freq_secs: float | None = None
    """When this many seconds have passed since the last time."""

    def __post_init__(self) -> None:
        require_at_least(1, freq_epochs=self.freq_epochs, freq_steps=self.freq_steps)
        require_above(0, freq_secs=self.freq_secs)

    @property
    def ever_fires(self) -> bool:
        return any(f is not None for f in (self.freq_epochs, self.freq_steps, self.freq_secs))


@config_section
class SaverConfig(TimerConfig):
    """Checkpoints in Hugging Face format."""

    keep: int | None = None
    """Newest checkpoints kept of each model. Default: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, keep=self.keep)


@config_section
class EvaluatorConfig(TimerConfig):
    """Evaluation on `valid_dataset` during training."""

    eval_before_train: bool = False
    """Evaluate the starting weights too."""


@config_section
class RecoverConfig(TimerConfig):
    """Recover points, from which a killed run resumes."""

    mode: Literal["disabled", "on", "off", "auto"] = "disabled"
    """`on`: write recover points and resume from the newest. `off` and `auto` are older names of
    `disabled` and `on`, and are stored as those."""
    retries: int = 3
    """Restarts in a row, without a new recover point in between, of a training process that died
    under `areal train`. 0: none."""
    keep: int = 2
    """Newest recover points kept."""
    on_damage: Literal["stop", "previous"] = "stop"
    """When the newest recover point is damaged or does not belong to the run's ledger: stop with an
    error, or resume from the previous point."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mode = "disabled" if self.mode == "off" else "on" if self.mode == "auto" else self.mode
        require_at_least(1, keep=self.keep)
        require_at_least(0, retries=self.retries)
        if self.mode == "on":
            require(
                self.ever_fires,
                "freq_steps (or freq_epochs, freq_secs) must be set with mode 'on'",
                None,
            )


@config_section
class WatchdogConfig:
    """Ends a run without progress, and reports what waits for what."""

    seconds: float | None = 300.0
    """Longest time in which no episode ends, no token is generated, no phase begins, no micro-batch
    is computed and no stage of the start ends. null: no limit."""

    def __post_init__(self) -> None:
        require_above(0, seconds=self.seconds)
