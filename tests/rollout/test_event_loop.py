"""The loop thread: order, failures that reach the waiting side, and an orderly end."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from areal.rollout.event_loop import TaskRunner, tune_gc


@pytest.fixture
def runner():
    runner = TaskRunner()
    runner.start()
    yield runner
    runner.close(1.0)


def settle(runner: TaskRunner) -> None:
    """Wait until everything asked of the loop so far has run."""
    runner.run(asyncio.sleep(0)).result(900)


def test_calls_run_in_order_in_the_loop_thread(runner):
    seen = []
    for i in range(5):
        runner.call(lambda i=i: seen.append((i, threading.current_thread().name)))
    settle(runner)
    assert seen == [(i, "rollout-loop") for i in range(5)]


def test_run_gives_back_result_or_exception(runner):
    async def divide(a, b):
        return a / b

    assert runner.run(divide(6, 3)).result(900) == 2
    with pytest.raises(ZeroDivisionError):
        runner.run(divide(1, 0)).result(900)
    assert runner.failure is None, "the caller saw it: the loop is fine"


@pytest.mark.parametrize("how", ["call", "spawn"])
def test_an_unhandled_failure_is_kept_and_announced(runner, how):
    announced = threading.Event()
    runner.on_failure(announced.set)

    def explode():
        raise OSError("disk full")

    async def explode_later():
        explode()

    if how == "call":
        runner.call(explode)
    else:
        runner.call(lambda: runner.spawn(explode_later(), name="x"))
    assert announced.wait(900)
    with pytest.raises(RuntimeError, match="rollout loop stopped: disk full") as caught:
        runner.raise_if_failed()
    assert isinstance(caught.value.__cause__, OSError)


def test_a_loop_stopped_from_outside_is_a_failure(runner):
    announced = threading.Event()
    runner.on_failure(announced.set)
    runner.call(lambda: asyncio.get_running_loop().stop())
    assert announced.wait(900)
    with pytest.raises(RuntimeError, match="stopped from outside"):
        runner.raise_if_failed()


def test_close_cancels_what_runs_and_ends_the_thread(runner):
    ended = []

    async def forever():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    async def helper_of_a_workflow():
        await forever()

    runner.call(lambda: runner.spawn(forever(), name="a"))
    runner.run(helper_of_a_workflow())
    settle(runner)
    runner.close(2.0)
    assert ended == [True, True]
    assert not any(thread.name == "rollout-loop" for thread in threading.enumerate())
    runner.close()


def test_close_does_not_hang_on_a_task_that_ignores_cancellation(runner):
    released = threading.Event()

    async def stubborn():
        while not released.is_set():
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue

    runner.call(lambda: runner.spawn(stubborn(), name="stubborn"))
    settle(runner)
    runner.cancel_tasks(0.1)  # returns, although the task runs on
    released.set()


def test_using_it_before_start():
    runner = TaskRunner()
    with pytest.raises(RuntimeError, match="start"):
        runner.raise_if_failed()
    runner.close()


@pytest.fixture
def collector_as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Node:
    def __init__(self) -> None:
        self.me = self


def test_cycles_made_after_tuning_are_collected_without_being_asked_for(collector_as_before):
    old = [Node() for _ in range(10)]
    tune_gc()
    assert gc.get_freeze_count() > len(old)
    lost = weakref.ref(Node())
    kept = [[] for _ in range(300_000)]  # three times the first threshold
    assert lost() is None and kept
