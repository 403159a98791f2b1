"""Run given rows to the end and wait: evaluation beside the training stream, on the same loop.

In: rows of data. Out: one trajectory (or None) per row, in their order. No gate and no ledger: the
results are never trained on. Failures are counted and bounded like everywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from areal.utils import logging

if TYPE_CHECKING:
    from areal.rollout.failures import FailureMeter
    from areal.rollout.group import Groups
    from areal.rollout.tasks import SubmittedTasks, Task

logger = logging.getLogger("RolloutExecutor")


def run_rows(
    tasks: SubmittedTasks,
    groups: Groups,
    rows: Sequence[dict[str, Any]],
    failures: FailureMeter,
    *,
    max_ahead: int,
) -> list[dict[str, Any] | None]:
    """Blocks the calling thread. `tasks` serve this call alone, and are closed at its end.

    Rows are read as they come to be submitted, `max_ahead` of them before the first has ended: a
    data set may load each only then.
    """
    results: list[dict[str, Any] | None] = [None] * len(rows)
    unsubmitted = iter(range(len(rows)))
    try:
        for index in itertools.islice(unsubmitted, max_ahead):
            tasks.submit(groups, rows[index], task_id=index)
        for num_done in range(len(rows)):
            task = _next_ended(tasks, num_done, len(rows))
            results[task.task_id] = task.trajectory
            if task.error is None:
                failures.on_group_succeeded()
            else:
                failures.on_group_failed(task.error)
            if failures.error is not None:
                raise failures.error
            if (index := next(unsubmitted, None)) is not None:
                tasks.submit(groups, rows[index], task_id=index)
        _judge(failures, len(rows))
        return results
    finally:
        tasks.close()


def _next_ended(tasks: SubmittedTasks, num_done: int, num_rows: int) -> Task:
    try:
        return tasks.next_ended()
    except TimeoutError as error:
        raise RuntimeError(
            f"{error} (rollout.request_timeout): {num_done} of {num_rows} rows are done. "
            "Look at the inference server and the reward function"
        ) from error


def _judge(failures: FailureMeter, num_rows: int) -> None:
    if num_rows:
        failures.check(ended=num_rows)
    if num_failed := failures.groups.total():
        logger.warning(
            "%d of %d rows failed and count for nothing: %s",
            num_failed, num_rows, dict(failures.groups),
        )  # fmt: skip
