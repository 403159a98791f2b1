"""An engine without a model, and its contract: what a call did is in its answer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from areal.api.engine_api import broadcast, head, split
from areal.utils import stats_tracker


class ToyContract:
    @broadcast
    def create_process_group(self, layout: Any) -> None: ...

    @split
    def count(self, batch: dict, *, rows_per_unit: int = 1) -> int: ...

    @split(merges_rows=True)
    def double(self, batch: dict) -> torch.Tensor: ...

    @broadcast
    def rank(self) -> int: ...

    @broadcast
    def fail(self, ranks: list[int], seconds: float = 0.0) -> None: ...

    @broadcast
    def sleep(self, seconds: float) -> None: ...

    @broadcast
    def later(self) -> Callable[[float, int], None]: ...

    @head
    def pid(self) -> int: ...


class ToyEngine(ToyContract):
    def __init__(self, num_places: int = 2, *, greeting: str = "") -> None:
        if greeting == "refuse":
            raise ValueError("greeting must be polite")
        self._rank = int(os.environ["RANK"])
        self.data_parallel_rank = self._rank % num_places
        self._is_head = self._rank < num_places

    def is_data_parallel_head(self) -> bool:
        return self._is_head

    def create_process_group(self, layout: Any) -> None:
        pass

    def count(self, batch, *, rows_per_unit=1) -> int:
        mask = batch["attention_mask"]
        assert len(mask) % rows_per_unit == 0
        stats_tracker.denominator(rows=torch.ones(len(mask), dtype=torch.bool))
        stats_tracker.stat("rows", tokens=mask.sum(dim=1).float())
        return len(mask)

    def double(self, batch) -> torch.Tensor:
        return batch["values"] * 2

    def rank(self) -> int:
        return self._rank

    def fail(self, ranks, seconds=0.0) -> None:
        if self._rank in ranks:
            raise KeyError(f"rank {self._rank} has had enough")
        time.sleep(seconds)

    def sleep(self, seconds) -> None:
        time.sleep(seconds)

    def pid(self) -> int:
        return os.getpid()

    def later(self) -> Callable[[float, int], None]:
        def wait(seconds: float, failing_rank: int) -> None:
            time.sleep(seconds)
            self.fail([failing_rank])

        return wait

    def destroy(self) -> None:
        pass


class AsyncToy:
    """An engine of an overlapping job."""

    async def give(self, what: str) -> Any:
        return (lambda: what) if what == "a function" else what
