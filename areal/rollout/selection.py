"""Which finished groups form the next batch: a pure function of what is finished and running.

In: the version that admitted each task. Out: the task ids of the batch, or None for "wait".

Two rules. (1) A running task that will be too old for the next step is waited for: a slow answer is
never overtaken and then thrown away, so long answers are not under-represented. The gate
(`staleness.py`) keeps such tasks, finished and running together, to at most one batch. (2) The
oldest admission goes first, then the prompt order; the batch itself is in prompt order.
"""

from __future__ import annotations

from collections.abc import Mapping


def select_batch(
    finished: Mapping[int, int],
    running: Mapping[int, int],
    *,
    count: int,
    oldest_fresh: int,
) -> list[int] | None:
    """Both mappings are task id -> version at admission; `count` tasks are wanted.

    `oldest_fresh` is the oldest admission this step may still use, so a task as old as that is
    useless to the next step.
    """
    if len(finished) < count:
        return None
    if any(admitted <= oldest_fresh for admitted in running.values()):
        return None
    oldest_first = sorted(finished, key=lambda task_id: (finished[task_id], task_id))
    return sorted(oldest_first[:count])
