"""Which finished groups form the next batch: a pure function of what is finished and running.

In: the version that admitted each task. Out: the task ids of the batch, or None for "wait".

Two rules. (1) Nothing may turn too old. A task admitted at version u can be trained up to the step
of version u + eta, and each step has room for one batch; so what is left of the tasks up to u,
finished and running, must fit into the steps until then. While it would not, because newer answers
overtook slow ones, the slow ones are waited for: they are never overtaken and then thrown away, so
long answers are not under-represented. (2) The oldest admission goes first, then the prompt order;
the batch itself is in prompt order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


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
    oldest_first = sorted(finished, key=lambda task_id: (finished[task_id], task_id))
    left = [finished[task_id] for task_id in oldest_first[count:]]
    if _must_wait(left, running.values(), count, oldest_fresh):
        return None
    return sorted(oldest_first[:count])


def _must_wait(left: Iterable[int], running: Iterable[int], count: int, oldest_fresh: int) -> bool:
    """Whether running tasks and those `left`, given by their admission, would not all find room in
    later steps, and it helps to wait: some that run would be in time for this one."""
    num_running, num_finished = Counter(running), Counter(left)
    num_left, some_run = 0, False
    for version in sorted(num_running | num_finished):
        num_left += num_running[version] + num_finished[version]
        some_run = some_run or version in num_running
        if some_run and num_left > count * max(0, version - oldest_fresh):
            return True
    return False
