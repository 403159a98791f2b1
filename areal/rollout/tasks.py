"""Single rows beside the prompt stream: submit one and wait for it, or run many to the end.

In: rows of data, each with its group runner. Out: the result of each, once. No gate and no ledger:
a caller that trains on results checks their versions. `run_rows` blocks until every row has ended
and returns one trajectory (or None) per row, in order; evaluation uses it.

    loop thread    consumes: submitted tasks, oldest first   produces: ended tasks
                   waits for: a slot (`max_concurrent`), resume()
    a caller       consumes: ended tasks                     waits for: `changed`, within a timeout
                   unblocked by: a task that ends, a failure of the loop, close()

Invariant: a task is queued, running, ended or claimed; only an ended one can be claimed. A failed
task raises in the wait that claims it; it is never returned as None, which means rejected.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.api.engine_api import EngineLostError
from areal.rollout.buffer import accepts
from areal.rollout.failures import describe
from areal.utils import logging
from areal.utils.waits import waiting

if TYPE_CHECKING:
    import torch

    from areal.rollout.event_loop import TaskRunner
    from areal.rollout.group import Groups

    Trajectory = dict[str, torch.Tensor]
    from areal.rollout.failures import FailureMeter


class TaskFailedError(RuntimeError):
    """An episode of a submitted task failed after all retries; `__cause__` is its exception."""


@dataclass(slots=True)
class Task:
    """One row and, once it has ended, its result."""

    task_id: int
    groups: Groups
    data: dict[str, Any]
    should_accept: Callable[[Trajectory], bool] | None
    on_end: Callable[[], None] | None
    place: int  # in the order of submission
    trajectory: Trajectory | None = None  # None without an error: rejected
    error: Exception | None = None


class SubmittedTasks:
    """At most `max_concurrent` run at once. Any thread may call.

    tasks = SubmittedTasks(runner, max_concurrent=8, timeout_s=3600)
    task_id = tasks.submit(groups, {"messages": chat})
    trajectory = tasks.wait_for_task(task_id).trajectory
    """

    def __init__(self, runner: TaskRunner, *, max_concurrent: int, timeout_s: float) -> None:
        """`timeout_s` bounds the time without an ended task, for waits without their own."""
        self._runner = runner
        self._max_concurrent = max_concurrent
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # guards all below
        self._queue: deque[Task] = deque()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ended: dict[int, Task] = {}
        self._unclaimed: set[int] = set()  # ids of queued, running and ended tasks
        self._num_submitted = 0
        self._next_id = 0
        self._num_failed = 0  # among the ended
        self._progress_at = time.monotonic()
        self._paused = self._closed = False

    def submit(
        self,
        groups: Groups,
        data: dict[str, Any],
        *,
        task_id: int | None = None,
        should_accept: Callable[[Trajectory], bool] | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> int:
        """Queue one row; returns its task id. `on_end` may block: it runs in its own thread."""
        with self._changed:
            if self._closed:
                raise RuntimeError("submit: the executor is closed")
            task_id = self._next_id if task_id is None else task_id
            if task_id in self._unclaimed:
                raise ValueError(f"task_id: {task_id} is submitted and not waited for yet")
            self._next_id = max(self._next_id, task_id + 1)
            self._unclaimed.add(task_id)
            place, self._num_submitted = self._num_submitted, self._num_submitted + 1
            self._queue.append(Task(task_id, groups, data, should_accept, on_end, place))
        self._runner.call(self._start)
        return task_id

    def wait(self, count: int, timeout_s: float | None = None) -> list[Task]:
        """Claim `count` ended tasks, in submission order.

        TaskFailedError as soon as one fails: that one is claimed, the others stay.
        TimeoutError claims nothing.
        """
        with self._changed:
            if not 0 <= count <= len(self._unclaimed):
                raise ValueError(
                    f"count: asked to wait for {count} tasks, {len(self._unclaimed)} are submitted "
                    "and not waited for yet"
                )
            self._wait_until(lambda: len(self._ended) >= count or self._num_failed > 0, timeout_s)
            in_order = sorted(self._ended.values(), key=lambda task: task.place)
            for task in in_order:
                if task.error is not None:
                    raise self._failure(self._claim(task), task.error)
            return [self._claim(task) for task in in_order[:count]]

    def wait_for_task(self, task_id: int, timeout_s: float | None = None) -> Task:
        """Claim this task once it has ended; errors as in `wait`."""
        with self._changed:
            if task_id not in self._unclaimed:
                raise ValueError(f"task_id: {task_id} is not submitted, or was waited for already")
            self._wait_until(lambda: task_id in self._ended, timeout_s)
            task = self._claim(self._ended[task_id])
        if task.error is not None:
            raise self._failure(task, task.error)
        return task

    def next_ended(self) -> Task:
        """Claim whichever task ends next, failed or not."""
        with self._changed:
            self._wait_until(lambda: len(self._ended) > 0, None)
            return self._claim(next(iter(self._ended.values())))

    def pause(self) -> None:
        """Start no more tasks; running ones continue."""
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        with self._changed:
            self._paused = False
        self._runner.call(self._start)

    def close(self) -> None:
        """Wake waiters, drop queued tasks, cancel running ones. Idempotent."""
        with self._changed:
            self._closed = True
            queued = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
            if self._running:
                self._runner.call(self._cancel)
        for task in queued:
            if task.on_end is not None:
                task.on_end()

    # Any thread, holding `changed`.

    def _wait_until(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        with waiting(self._describe):
            self._wait_while_lacking(ready, timeout_s)

    def _wait_while_lacking(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        began = time.monotonic()
        while not ready():
            if self._closed:
                raise RuntimeError("the executor was closed while a submitted task was waited for")
            self._runner.raise_if_failed()
            since = max(began, self._progress_at) if timeout_s is None else began
            limit_s = self._timeout_s if timeout_s is None else timeout_s
            left_s = since + limit_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no result within {limit_s:g} s: {self._describe()}")
            self._changed.wait(min(1.0, left_s))

    def _describe(self) -> str:
        paused = ", and the executor is paused" if self._paused else ""
        return (
            f"{len(self._running)} tasks run, {len(self._queue)} are queued, {len(self._ended)} "
            f"have ended{paused}"
        )

    def _claim(self, task: Task) -> Task:
        del self._ended[task.task_id]
        self._unclaimed.remove(task.task_id)
        self._num_failed -= task.error is not None
        return task

    def _failure(self, task: Task, cause: Exception) -> TaskFailedError:
        error = TaskFailedError(f"task {task.task_id} failed: {describe(cause)}")
        error.__cause__ = cause
        return error

    # Loop thread.

    def _start(self) -> None:
        with self._changed:
            while self._queue and not self._paused and not self._closed:
                if len(self._running) >= self._max_concurrent:
                    return
                task = self._queue.popleft()
                run = self._runner.spawn(self._run(task), name=f"submitted-{task.task_id}")
                self._running[task.task_id] = run

    async def _run(self, task: Task) -> None:
        """Boundary: a workflow's exception becomes the failure of its task."""
        try:
            task.trajectory = await task.groups.run(task.task_id, task.data)
            if not accepts(task.should_accept, task.trajectory):
                task.trajectory = None
        except asyncio.CancelledError:  # by close(), or because the loop ends: no result comes
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            raise
        except EngineLostError:
            raise
        except Exception as error:
            task.trajectory, task.error = None, error
        finally:
            if task.on_end is not None:
                await asyncio.to_thread(task.on_end)
            with self._changed:
                del self._running[task.task_id]
        with self._changed:
            self._ended[task.task_id] = task
            self._num_failed += task.error is not None
            self._progress_at = time.monotonic()
            self._changed.notify_all()
        self._start()

    def _cancel(self) -> None:
        with self._changed:
            running = list(self._running.values())
        for run in running:
            run.cancel()


logger = logging.getLogger("RolloutExecutor")


def run_rows(
    tasks: SubmittedTasks,
    groups: Groups,
    rows: Sequence[dict[str, Any]],
    failures: FailureMeter,
    *,
    max_ahead: int,
) -> list[dict[str, Any] | None]:
    """Blocks the calling thread. `tasks` is used by this call only, and closed at its end.

    At most `max_ahead` rows are submitted and not ended. A row is read when it is submitted, since
    a data set may load rows lazily.
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
            f"{error} (rollout.request_timeout): {num_done} of {num_rows} rows are done. Check the "
            "inference server and the reward function"
        ) from error


def _judge(failures: FailureMeter, num_rows: int) -> None:
    if num_rows:
        failures.check(ended=num_rows)
    if num_failed := failures.groups.total():
        logger.warning(
            "%d of %d rows failed and have no result: %s",
            num_failed, num_rows, dict(failures.groups),
        )  # fmt: skip
