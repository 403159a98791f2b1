"""What tests of rollout workers send to them: importable there, as a user's own modules are."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_world import trajectory

from areal.api.workflow_api import RolloutWorkflow
from areal.api.workflow_context import workflow_context
from areal.utils import stats_tracker


class QuietEngine:
    """Stands for the client of servers; a copy counts one request for each answer it is part of,
    which was in flight for a second."""

    num_requests = 0  # that copies have told of
    in_flight_s = 0.0
    newest_version = None

    def initialize(self) -> None: ...

    def destroy(self) -> None: ...

    def take_counts(self) -> dict[str, int]:
        return {"requests": 1}

    def add_counts(self, counts: dict[str, int]) -> None:
        self.num_requests += counts["requests"]

    def take_in_flight(self) -> dict[str, list[tuple[float, float]]]:
        return {"server": [(1.0, 2.0)]}

    def add_in_flight(self, intervals: dict[str, list[tuple[float, float]]]) -> None:
        self.in_flight_s += sum(end - start for start, end in intervals["server"])


@dataclass
class DeadlyEngine(QuietEngine):
    """Kills the processes it is initialized in, `times` of them; `folder` counts."""

    folder: Path
    times: int

    def initialize(self) -> None:
        if len(list(self.folder.glob("killed*"))) < self.times:
            (self.folder / f"killed{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Echo(RolloutWorkflow):
    """One sample that tells its seed; a row may say what goes wrong with which row."""

    delay_s: float = 0.0

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        episode = workflow_context.get()
        await asyncio.sleep(self.delay_s)
        if data["i"] == data.get("deadly"):
            await asyncio.sleep(0.5)  # those beside it are done by then
            os._exit(3)
        if data["i"] == data.get("wrong"):
            raise KeyError("a wrong row")
        stats_tracker.get(workflow_context.stat_scope()).scalar(reward=1.0)
        seed = workflow_context.next_seed() % 1000
        sample = trajectory([0, 0], reward=float(seed), task_id=episode.task_id)
        del sample["versions"]  # as old as its admission, then
        return sample


@dataclass
class Held(Echo):
    """Ends no episode while the file `hold` is there."""

    hold: str = ""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        while Path(self.hold).exists():
            await asyncio.sleep(0.01)
        return await super().arun_episode(engine, data)


class Prints(Echo):
    """Writes to standard output, which is a worker's log."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        print("printed by a workflow", flush=True)
        return await super().arun_episode(engine, data)


def make_nothing() -> RolloutWorkflow:
    raise ValueError("this recipe makes nothing")
