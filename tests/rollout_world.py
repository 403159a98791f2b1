"""What the rollout tests share: a small world of database, gate, loop and executor.

The engine and the workflow here stand for a user's code; everything else is the real thing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from areal.api.workflow_api import RolloutWorkflow
from areal.api.workflow_context import workflow_context
from areal.rollout.event_loop import TaskRunner
from areal.rollout.executor import WorkflowExecutor
from areal.rollout.failures import FailureLimits
from areal.rollout.ledger import Ledger
from areal.rollout.source import PromptSource
from areal.rollout.staleness import StalenessManager
from areal.run.database import RunDatabase


def trajectory(versions: list[int], reward: float = 1.0, task_id: int = 0) -> dict[str, Any]:
    """One sample: a prompt token that names its task, then one generated token per version."""
    length = 1 + len(versions)
    return {
        "input_ids": torch.tensor([[task_id] + [7] * len(versions)], dtype=torch.int32),
        "attention_mask": torch.ones(1, length, dtype=torch.bool),
        "loss_mask": torch.tensor([[0] + [1] * len(versions)], dtype=torch.int32),
        "versions": torch.tensor([[-1, *versions]], dtype=torch.int32),
        "rewards": torch.tensor([reward]),
    }


@dataclass
class FakeEngine:
    """Serves `version`; counts the episodes in flight."""

    version: int = 0
    newest_version: int | None = None  # that was sent; None: not known
    in_flight: int = 0
    most_in_flight: int = 0


@dataclass
class FakeWorkflow(RolloutWorkflow):
    """Each episode sleeps, then does what `act(task_id, sample, attempt)` says.

    `act` returns (delay_s, result); result is "ok", "none", or an exception to raise. The tokens
    carry the engine's version at the start and at the end of the episode.
    """

    act: Callable[[int, int, int], tuple[float, Any]] = lambda task_id, sample, attempt: (0.0, "ok")
    attempts: dict[tuple[int, int], int] = field(default_factory=dict)

    async def arun_episode(self, engine: FakeEngine, data: dict[str, Any]) -> Any:
        episode = workflow_context.get()
        key = episode.task_id, episode.sample
        attempt = self.attempts[key] = self.attempts.get(key, 0) + 1
        engine.in_flight += 1
        engine.most_in_flight = max(engine.most_in_flight, engine.in_flight)
        try:
            began = engine.version
            delay_s, result = self.act(*key, attempt)
            await asyncio.sleep(delay_s)
            if isinstance(result, Exception):
                raise result
            if result == "none":
                return None
            return trajectory([began, engine.version], float(data["i"]), episode.task_id)
        finally:
            engine.in_flight -= 1


@dataclass
class World:
    db: RunDatabase
    ledger: Ledger
    engine: FakeEngine
    gate: StalenessManager
    runner: TaskRunner
    executor: WorkflowExecutor
    source: PromptSource

    def set_version(self, version: int) -> None:
        self.engine.version = version
        self.executor.set_version(version)

    def start(self, workflow: RolloutWorkflow, **options: Any) -> None:
        if "resume" in options:
            self.engine.version = options["resume"].version
        self.executor.start(self.source, workflow, **options)


@contextmanager
def open_world(
    folder: Path,
    *,
    batch_size: int = 2,
    max_staleness: int = 0,
    max_concurrent: int = 64,
    rows: int = 1000,
    on_trajectory: Any = None,
    **limits: Any,
) -> Iterator[World]:
    limits = {"retry_delay_s": 0.0, "timeout_s": 20.0, "max_retries": 1} | limits
    db = RunDatabase(folder / "run.db")
    ledger, engine, runner = Ledger(db), FakeEngine(), TaskRunner()
    runner.start()
    gate = StalenessManager(
        max_concurrent_rollouts=max_concurrent,
        consumer_batch_size=batch_size,
        max_staleness=max_staleness,
    )
    executor = WorkflowExecutor(
        runner,
        engine,
        ledger,
        gate,
        run_seed=3,
        limits=FailureLimits(**limits),
        on_trajectory=on_trajectory,
    )
    source = PromptSource([{"i": i} for i in range(rows)], batch_size=batch_size, shuffle=False)
    try:
        yield World(db, ledger, engine, gate, runner, executor, source)
    finally:
        executor.close(2.0)
        runner.close(2.0)
        db.close()
