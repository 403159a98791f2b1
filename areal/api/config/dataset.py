"""The `train_dataset` and `valid_dataset` sections: which rows, in which order."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from areal.api.config.checks import expand_path, require, require_at_least
from areal.api.config.section import config_section

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
    """Column with what is right, `answer` of the reward function; for `sft` what is learned."""
    dataset_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed to the loader."""

    def __post_init__(self) -> None:
        require(bool(self.path), "path must name a data set", self.path)
        self.path = expand_path("path", self.path)
        self._check_columns()
        require_at_least(1, batch_size=self.batch_size, max_length=self.max_length)

    @property
    def columns(self) -> dict[str, str]:
        """Those that are named, for the loader of columns."""
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
            "dataset_kwargs.loader must go when prompt names a column: columns need no loader",
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
