"""The process's one asyncio loop, in a named thread beside the trainer.

In: functions and coroutines from any thread. An unhandled exception is kept in `failure` and
reported to `on_failure` listeners, so that no thread waits for a dead loop.

    loop thread   consumes: calls and coroutines   waits for: sockets, timers, the next call
                  unblocked by: call(), run()      ends: close(), or never
Close = stop intake, cancel the tasks, gather them within a deadline, end the loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from areal.utils import logging
from areal.utils.threads import share_interpreter

logger = logging.getLogger("TaskRunner")

_GC_THRESHOLDS = (100_000, 20, 20)  # Python's first one is 700 (2,000 from 3.13 on)

T = TypeVar("T")


class TaskRunner:
    """runner = TaskRunner(); runner.start(); runner.call(fn); ...; runner.close()"""

    def __init__(self, name: str = "rollout") -> None:
        self.failure: BaseException | None = None
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=f"{name}-loop", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[Callable[[], None]] = []
        self._closing = False

    def start(self) -> None:
        share_interpreter()
        self._thread.start()

    def on_failure(self, listener: Callable[[], None]) -> None:
        """`listener()` runs in the loop thread when `failure` is set."""
        self._listeners.append(listener)

    def call(self, function: Callable[[], None]) -> None:
        """Schedule `function` in the loop, in the order of calls. Any thread."""
        self._loop.call_soon_threadsafe(self._guarded, function)

    def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        """As `call`, after a delay. Loop thread only."""
        if delay_s <= 0:
            self._loop.call_soon(self._guarded, function)
        else:
            self._loop.call_later(delay_s, self._guarded, function)

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task owned by this runner. Loop thread only; its exception is a `failure`."""
        task = self._loop.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def run(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine; the caller gets its result or exception. Any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            raise RuntimeError(f"the {self._name} loop stopped: {self.failure}") from self.failure
        if not self._closing and not self._thread.is_alive():
            raise RuntimeError(f"the {self._name} loop is not running: call start() first")

    def cancel_tasks(self, timeout_s: float) -> None:
        """Cancel every spawned task and wait for the end of each; logs those that do not end."""
        if not self._thread.is_alive():
            return
        try:
            self.run(self._cancel_tasks(timeout_s)).result(timeout_s + 1)
        except concurrent.futures.TimeoutError:
            logger.warning(
                "the %s loop does not answer: a workflow blocks it with a call that is not async; "
                "move such work to asyncio.to_thread",
                self._name,
            )

    def close(self, timeout_s: float = 10.0) -> None:
        """Idempotent; also valid without start()."""
        if not self._closing and self._thread.is_alive():
            self._closing = True
            self.cancel_tasks(timeout_s)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)
        self._closing = True
        if not self._thread.is_alive() and not self._loop.is_closed():
            self._loop.close()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            if not self._closing:
                self._fail(RuntimeError("its event loop was stopped from outside"))
            self._cancel_leftovers()

    def _cancel_leftovers(self) -> None:
        """End tasks started by workflows or engines before the loop closes."""
        leftovers = asyncio.all_tasks(self._loop)
        for task in leftovers:
            task.cancel()
        if leftovers:
            self._loop.run_until_complete(asyncio.wait(leftovers, timeout=2.0))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())

    async def _cancel_tasks(self, timeout_s: float) -> None:
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if not tasks:
            return
        _, stuck = await asyncio.wait(tasks, timeout=timeout_s)
        if stuck:
            names = ", ".join(sorted(task.get_name() for task in stuck)[:5])
            logger.warning("%d tasks ignored their cancellation: %s", len(stuck), names)

    def _guarded(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            self._fail(error)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.failure is not None:
            return
        logger.error("the %s loop failed", self._name, exc_info=error)
        self.failure = error
        for listener in self._listeners:
            listener()


def tune_gc() -> None:
    """For a process with tens of thousands of coroutines in flight. Call it once modules and models
    are loaded: they are excluded from all later scans.

    Every waiting episode is about fifty live objects, which Python's cycle collector scans
    repeatedly: by default it takes a fifth of a busy event loop's time, in pauses of a fifth of a
    second. Episodes create almost no cycles, so collecting less often costs little memory: what
    starts and ends between two collections is never scanned.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
