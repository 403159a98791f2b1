"""Rollout workers as Ray actors: the same groups, and a killed actor loses none."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from placed_world import Echo, QuietEngine
from rollout_world import open_world

from areal.api.scheduler_api import Job
from areal.rollout.executor import WorkflowExecutor
from areal.rollout.failures import FailureLimits
from areal.rollout.worker import WorkflowRecipe
from areal.rollout.workers import RolloutWorkers
from areal.utils import stats_tracker

pytestmark = pytest.mark.slow


def test_groups_run_in_actors_and_survive_a_killed_one(tmp_path):
    ray = pytest.importorskip("ray", reason="scheduler.type=ray needs the extra `ray`")
    from areal.infra.scheduler.ray import RayScheduler

    job = Job("rollout_worker", 2, default_gpus=0, overlapping=True)
    rows, engine = [{"i": i} for i in range(6)], QuietEngine()
    with open_world(tmp_path, batch_size=8, max_staleness=3) as world:
        here = world.executor.rollout_batch(rows, Echo(), group_size=3)
        workers = RolloutWorkers(world.runner, engine, RayScheduler([job]), job)
        ex = WorkflowExecutor(
            world.runner,
            engine,
            world.ledger,
            world.gate,
            run_seed=3,
            limits=FailureLimits(retry_delay_s=0.0, timeout_s=900),
            workers=workers,
        )
        try:
            workers.start()
            first = workers.pids
            there = ex.rollout_batch(rows, WorkflowRecipe("placed_world.Echo"), group_size=3)
            for mine, theirs in zip(here, there, strict=True):
                assert all(torch.equal(mine[key], theirs[key]) for key in mine)
            assert engine.num_requests == len(rows)

            ex.start(world.source, WorkflowRecipe("placed_world.Echo", {"delay_s": 0.1}))
            trained = []
            for step in range(10):
                if step == 2:
                    os.kill(first[0], signal.SIGKILL)
                batch = ex.prepare_batch()
                trained += batch.task_ids
                ex.mark_trained(batch, step)
                ex.set_version(step + 1)
            assert sorted(trained) == list(range(10 * 8)), "each prompt once, in order of issue"
            assert workers.num_replaced == 1 and ex.stats()["failed"] == 0
            assert first[0] not in workers.pids
        finally:
            ex.close(2.0)
            workers.close()
            ray.shutdown()
            stats_tracker.export_all()  # else the next test's process has them
