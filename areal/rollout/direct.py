"""Run given rows to the end and wait: evaluation beside the training stream, on the same loop.

In: rows of data. Out: one trajectory (or None) per row, in their order. No gate and no ledger: the
results are never trained on. Failures are counted and bounded like everywhere.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.rollout.failures import FailureMeter
    from areal.rollout.grouping import GroupRunner
    from areal.rollout.task_runner import TaskRunner


def run_rows(
    runner: TaskRunner,
    groups: GroupRunner,
    rows: Sequence[dict[str, Any]],
    failures: FailureMeter,
    *,
    max_concurrent: int,
    timeout_s: float,
) -> list[dict[str, Any] | None]:
    """Blocks the calling thread; at most `timeout_s` may pass without a finished row."""
    direct = _DirectRun(groups, rows, failures, max_concurrent)
    future = runner.run(direct.run())
    try:
        while True:
            try:
                return future.result(timeout=min(1.0, timeout_s))
            except concurrent.futures.TimeoutError:
                runner.raise_if_failed()
                direct.raise_if_quiet(timeout_s)
    finally:
        future.cancel()


class _DirectRun:
    def __init__(
        self,
        groups: GroupRunner,
        rows: Sequence[dict[str, Any]],
        failures: FailureMeter,
        max_concurrent: int,
    ) -> None:
        self._groups = groups
        self._rows = rows
        self._failures = failures
        self._num_workers = min(max_concurrent, len(rows))
        self._results: list[dict[str, Any] | None] = [None] * len(rows)
        self._ended = 0
        self._progress_at = time.monotonic()

    async def run(self) -> list[dict[str, Any] | None]:
        todo = iter(range(len(self._rows)))
        async with asyncio.TaskGroup() as workers:
            for i in range(self._num_workers):
                workers.create_task(self._work(todo), name=f"rollout-batch-{i}")
        if self._rows:
            self._failures.check(ended=len(self._rows))
        return self._results

    async def _work(self, todo: Any) -> None:
        """Takes rows from the shared iterator until none is left, or too many failed."""
        for index in todo:
            if self._failures.error is not None:
                return
            try:
                self._results[index] = await self._groups.run(index, self._rows[index])
                self._failures.on_group_succeeded()
            except Exception as error:
                self._failures.on_group_failed(error)
            self._ended += 1
            self._progress_at = time.monotonic()

    def raise_if_quiet(self, timeout_s: float) -> None:
        quiet_s = time.monotonic() - self._progress_at
        if quiet_s >= timeout_s:
            raise RuntimeError(
                f"no row finished for {quiet_s:.1f} s (rollout.request_timeout={timeout_s:g}): "
                f"{self._ended} of {len(self._rows)} rows are done. "
                "Look at the inference server and the reward function"
            )
