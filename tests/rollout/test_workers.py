"""Rollout workers: the same groups as in the controller, and a killed worker loses none."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_children import fork_children
from placed_world import DeadlyEngine, Echo, QuietEngine
from rollout_world import World, open_world

from areal.api.scheduler_api import Job, SchedulingSpec
from areal.infra.scheduler.local import LocalScheduler
from areal.rollout.executor import WorkflowExecutor
from areal.rollout.failures import FailureLimits, RolloutFailedError
from areal.rollout.source import PromptSource
from areal.rollout.worker import WorkflowRecipe
from areal.rollout.workers import RolloutWorkers
from areal.utils import stats_tracker

ECHO = "placed_world.Echo"


@pytest.fixture
def forked() -> Iterator[None]:
    """For tests whose workers are ready before any is killed."""
    with fork_children():
        yield


@contextmanager
def workers_of(
    world: World, folder: Path, engine: Any, count: int, max_retries: int
) -> Iterator[RolloutWorkers]:
    scheduler = LocalScheduler(folder, gpus=[])
    job = Job("rollout_worker", count, [SchedulingSpec(cpu=1)], overlapping=True)
    workers = RolloutWorkers(world.runner, engine, scheduler, job, max_retries=max_retries)
    try:
        yield workers
    finally:
        workers.close()
        stats_tracker.export_all()  # else the next test's process has them


@contextmanager
def placed(
    world: World, folder: Path, count: int = 2, engine: Any = None, **limits: float
) -> Iterator[tuple[WorkflowExecutor, RolloutWorkers]]:
    """An executor of this world whose groups run in worker processes."""
    engine = engine or QuietEngine()
    limits = FailureLimits(**{"retry_delay_s": 0.0, "timeout_s": 60.0, "max_retries": 1} | limits)
    with workers_of(world, folder, engine, count, limits.max_retries) as workers:
        executor = WorkflowExecutor(
            world.runner,
            engine,
            world.ledger,
            world.gate,
            run_seed=3,
            limits=limits,
            workers=workers,
        )
        try:
            workers.start()
            yield executor, workers
        finally:
            executor.close(2.0)


def train(executor: WorkflowExecutor, steps: int, begin: int = 0) -> list[int]:
    """The prompts trained on."""
    trained: list[int] = []
    for step in range(begin, begin + steps):
        batch = executor.prepare_batch()
        trained += batch.task_ids
        executor.mark_trained(batch, step)
        executor.set_version(step + 1)
    return trained


def wait_for_groups(workers: RolloutWorkers) -> None:
    """Until each worker has some."""
    deadline = time.monotonic() + 300
    while not all(one["groups"] for one in workers.states()):
        assert time.monotonic() < deadline, workers.states()
        time.sleep(0.01)


def wait_for_two(workers: RolloutWorkers, replaced: int) -> None:
    deadline = time.monotonic() + 300
    while len(workers.pids) != 2 or workers.num_replaced != replaced:
        assert time.monotonic() < deadline, "no worker took the place of the one that was killed"
        time.sleep(0.05)


@pytest.mark.usefixtures("forked")
def test_the_same_groups_and_statistics_as_in_the_controller(tmp_path):
    """And each worker has a log, and none is left at the end."""
    rows = [{"i": i} for i in range(6)]
    engine = QuietEngine()
    with open_world(tmp_path) as world:
        stats_tracker.export_all()
        here = world.executor.rollout_batch(rows, Echo(), group_size=3)
        recorded_here = stats_tracker.export_all()
        with placed(world, tmp_path, engine=engine) as (executor, pool):
            recipe = WorkflowRecipe(ECHO)
            for round_ in range(2):  # the second time is the stream of the first
                there = executor.rollout_batch(rows, recipe, group_size=3)
                assert engine.num_requests == len(rows) * (round_ + 1), "one for each group"
                assert engine.in_flight_s == engine.num_requests, "a second for each"
                assert stats_tracker.export_all() == recorded_here
                for mine, theirs in zip(here, there, strict=True):
                    assert mine.keys() == theirs.keys()
                    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
            with pytest.raises(RolloutFailedError, match="ValueError: this recipe makes nothing"):
                executor.rollout_batch(rows, WorkflowRecipe("placed_world.make_nothing"))
            with pytest.raises(ValueError, match=r"rollout\.workers: the workflow cannot be sent"):
                executor.rollout_batch(rows, WorkflowRecipe(ECHO, {"delay_s": lambda: 0}))
            executor.rollout_batch([{"i": 0}], WorkflowRecipe("placed_world.Prints"))
            alive = pool.pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in alive)
    logs = sorted(tmp_path.glob("rollout_worker*.log"))
    assert [log.name for log in logs] == ["rollout_worker0.log", "rollout_worker1.log"]
    assert "".join(log.read_text() for log in logs) == "printed by a workflow\n"


@pytest.mark.usefixtures("forked")
def test_a_killed_worker_is_replaced_and_its_groups_run_elsewhere(tmp_path):
    with (
        open_world(tmp_path, batch_size=8, max_staleness=3) as world,
        placed(world, tmp_path) as (ex, pool),
    ):
        hold = tmp_path / "hold"
        hold.touch()
        recipe = WorkflowRecipe("placed_world.Held", {"delay_s": 0.1, "hold": str(hold)})
        ex.start(world.source, recipe, group_size=2)
        wait_for_groups(pool)
        os.kill(pool.pids[0], signal.SIGKILL)
        hold.unlink()
        trained = train(ex, 12)
        wait_for_two(pool, replaced=1)
        states = pool.states()
        assert [one["name"] for one in states] == ["rollout worker 0", "rollout worker 1"]
        assert {one["state"] for one in states} == {"running"}
        assert sorted(one["pid"] for one in states) == sorted(pool.pids)
        stats = ex.stats()
        assert stats["workers_replaced"] == 1
        assert stats["failed"] == 0 and stats["retried/WorkerLostError"] >= 1
        assert sorted(trained) == list(range(12 * 8)), "each prompt once, in order of issue"
        ex.close()
        books = world.ledger.balance()
        assert books["trained"] == len(trained) and books["stale"] == books["failed"] == 0


@pytest.mark.slow
def test_all_workers_killed_at_once(tmp_path):
    """Their groups wait for the new ones; a second death of one is a second replacement."""
    with (
        open_world(tmp_path, batch_size=8, max_staleness=3) as world,
        placed(world, tmp_path, max_retries=3) as (ex, pool),
    ):
        first = pool.pids
        ex.start(world.source, WorkflowRecipe(ECHO, {"delay_s": 0.1}), group_size=2)
        trained = train(ex, 2)
        for pid in first:
            os.kill(pid, signal.SIGKILL)
        trained += train(ex, 4, begin=2)
        wait_for_two(pool, replaced=2)
        os.kill(pool.pids[0], signal.SIGKILL)
        trained += train(ex, 4, begin=6)
        wait_for_two(pool, replaced=3)
        assert not set(first) & set(pool.pids)
        # A group that ran again may be behind later ones, by the bound of staleness at most.
        trained += train(ex, 3, begin=10)
        assert ex.stats()["failed"] == ex.stats()["stale"] == 0
        assert len(set(trained)) == len(trained), "no prompt twice"
        assert set(range(10 * 8)) <= set(trained), "none is lost"


@pytest.mark.slow
def test_a_worker_killed_before_it_is_ready_is_started_again_within_the_bound(tmp_path):
    with open_world(tmp_path) as world:
        with workers_of(world, tmp_path, DeadlyEngine(tmp_path, 1), 1, 1) as workers:
            workers.start()
            assert len(workers.pids) == 1 and workers.num_replaced == 1
        says = r"rollout worker 0 was not ready: .*\(pid \d+\) was ended by signal SIGKILL"
        deadly = DeadlyEngine(tmp_path, 9)
        with (
            workers_of(world, tmp_path, deadly, 1, 1) as workers,
            pytest.raises(RuntimeError, match=says),
        ):
            workers.start()
    assert len(list(tmp_path.glob("killed*"))) == 1 + 2


@pytest.mark.usefixtures("forked")
def test_what_always_kills_its_worker_fails_within_the_bound(tmp_path):
    limits = {"max_failure_ratio": 1.0, "max_retries": 1}
    with (
        open_world(tmp_path, batch_size=4) as world,
        placed(world, tmp_path, 1, **limits) as (ex, pool),
    ):
        rows = [{"i": i, "deadly": 0, "wrong": 1} for i in range(12)]
        ex.start(PromptSource(rows, batch_size=4, shuffle=False), WorkflowRecipe(ECHO))
        assert ex.prepare_batch().task_ids == [2, 3, 4, 5]
        stats = ex.stats()
        assert stats["failed/WorkerLostError"] == 1 and pool.num_replaced == 2
        assert stats["failed/KeyError"] == 1 and stats["retried/KeyError"] == 1
        whys = world.db.query("SELECT why FROM tasks WHERE state = 'failed' ORDER BY task_id")
        assert [row["why"] for row in whys] == [
            "WorkerLostError: rollout worker 0 has ended",
            "KeyError: 'a wrong row'",
        ]
