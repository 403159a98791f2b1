"""The endless stream of prompts, as a function: task id -> epoch, row and data.

`PromptSource` is that of runs, which resume. In: a list-like data set. Out: tasks 0, 1, 2, ...
follow a seeded permutation of the rows, a new one each epoch. The position is the task id, so the
cursor of a run is one integer and a re-issued task gets exactly the same prompt.

Invariant: each row occurs at most once per epoch (exactly once unless `drop_last` leaves out the
rows that do not fill a batch).

`LoaderSource` takes the order of a dataloader instead, and can only go forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, cast

import numpy as np


@dataclass(frozen=True, slots=True)
class Prompt:
    task_id: int
    epoch: int
    row: int  # index into the data set
    data: dict[str, Any]


class Prompts(Protocol):
    def prompt(self, task_id: int) -> Prompt: ...


class PromptSource:
    """`source.prompt(task_id)` for any task id >= 0, in any order."""

    def __init__(
        self,
        dataset: Sequence[dict[str, Any]],
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> None:
        rows = len(dataset)
        if batch_size < 1:
            raise ValueError(f"train_dataset.batch_size must be at least 1, got {batch_size}")
        if rows < batch_size:
            raise ValueError(
                f"train_dataset.batch_size is {batch_size} but the data set has {rows} rows: "
                "lower train_dataset.batch_size or use more data"
            )
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self.batch_size = batch_size
        self.epoch_length = rows - rows % batch_size if drop_last else rows

    def prompt(self, task_id: int) -> Prompt:
        epoch, position = divmod(task_id, self.epoch_length)
        row = position
        if self._shuffle:
            row = int(_permutation(self._seed, epoch, len(self._dataset))[position])
        return Prompt(task_id, epoch, row, self._dataset[row])


class LoaderSource:
    """The rows of a dataloader, epoch after epoch: tasks 0, 1, 2, ... in this order only.

    Its batches are lists of rows, as `collate_fn=list` leaves them.
    """

    def __init__(self, dataloader: Iterable[Any]) -> None:
        self._prompts = self._read(dataloader)

    def prompt(self, task_id: int) -> Prompt:
        prompt = next(self._prompts)
        assert prompt.task_id == task_id, f"task {task_id} after {prompt.task_id - 1}"
        return prompt

    def _read(self, dataloader: Iterable[Any]) -> Iterator[Prompt]:
        task_id = epoch = 0
        while True:
            row = 0
            for batch in dataloader:
                for data in _rows_of(batch):
                    yield Prompt(task_id, epoch, row, data)
                    task_id, row = task_id + 1, row + 1
            if row == 0:
                raise ValueError("dataloader: it has no rows")
            epoch += 1


def _rows_of(batch: Any) -> list[dict[str, Any]]:
    if not isinstance(batch, list):
        raise ValueError(
            "dataloader: expected batches that are lists of rows, got "
            f"{type(batch).__name__}; make it with collate_fn=list"
        )
    return cast("list[dict[str, Any]]", batch)


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, rows: int) -> np.ndarray:
    """Rows in the order of a hash of (seed, epoch, row).

    Our own hash, because library generators may change between releases, and a different
    permutation would silently repeat and skip prompts after a resume.
    """
    key = _mix(np.array([seed % 2**64], dtype=np.uint64))
    key = _mix(key + np.uint64(epoch))
    hashes = _mix(key + np.arange(rows, dtype=np.uint64))
    return np.argsort(hashes, kind="stable")


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's step and finalizer: a bijection of 64-bit words with good avalanche."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
