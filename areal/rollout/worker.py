"""Rollout worker: runs groups on the event loop of a scheduler's worker.

    await worker.start()                            # the engine client connects; returns the pid
    await worker.open(stream, main, spec)           # a workflow and its options, once
    await worker.run_group(stream, task_id, row)    # -> GroupReply; as many at once as are called
    await worker.until_closed()                     # a caller that waits here sees the worker end

`workers.py` calls it, through a `LocalScheduler` or Ray. It keeps no state that matters: if its
process is killed, its groups run elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal.rollout.event_loop import tune_gc
from areal.rollout.failures import kind_of
from areal.rollout.group import GroupRunner
from areal.rollout.trajectory import encode
from areal.sandbox.worker import adopt_main
from areal.utils import import_path, perf_tracer, stats_tracker

if TYPE_CHECKING:
    from areal.api.engine_api import InferenceEngine


@dataclass(frozen=True, slots=True)
class WorkflowRecipe:
    """How to build a workflow where it will run: a function's import path and its arguments."""

    factory: str
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])

    def build(self) -> Any:
        return import_path.load(self.factory, key="workflow")(**self.kwargs)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of an attempt or a group, as plain text."""

    kind: str
    text: str
    is_retried: bool


@dataclass(slots=True)
class GroupReply:
    """A group's end, and what was recorded in the worker since the last one."""

    trajectory: bytes | None = None  # see `trajectory.encode`; None: rejected or failed
    failure: Failure | None = None
    attempts: list[Failure] = field(default_factory=list[Failure])  # failed ones of its episodes
    stats: dict[str, Any] = field(default_factory=dict[str, Any])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    in_flight: dict[str, list[tuple[float, float]]] = field(
        default_factory=dict[str, list[tuple[float, float]]]
    )  # of requests, by server


_reply: ContextVar[GroupReply] = ContextVar("rollout_reply")  # of the running group


class RolloutWorker:
    """`client` is a pickled engine: a client of the inference servers."""

    def __init__(self, client: bytes) -> None:
        self._engine: InferenceEngine = pickle.loads(client)
        self._streams: dict[int, GroupRunner | Exception] = {}
        self._running: set[asyncio.Task[Any] | None] = set()  # groups
        self._closed = asyncio.Event()

    async def start(self) -> int:
        self._engine.initialize()
        tune_gc()
        return os.getpid()

    async def open(self, stream: int, main: tuple[str, str] | None, spec: bytes) -> None:
        """If a stream cannot be opened, each of its groups fails with that error."""
        try:
            if main is not None:
                adopt_main(*main)
            options = pickle.loads(spec)
            self._streams[stream] = GroupRunner(
                engine=self._engine,
                workflow=options.pop("recipe").build(),
                on_attempt_failed=_note_attempt,
                **options,
            )
        except Exception as error:
            self._streams[stream] = error

    async def run_group(self, stream: int, task_id: int, row: dict[str, Any]) -> GroupReply:
        """Boundary: an exception becomes a reply."""
        reply, task = GroupReply(), asyncio.current_task()
        _reply.set(reply)
        self._running.add(task)
        try:
            groups = self._streams[stream]
            if isinstance(groups, Exception):
                raise groups
            trajectory = await groups.run(task_id, row)
            reply.trajectory = None if trajectory is None else encode(trajectory)
        except Exception as error:
            reply.failure = Failure(kind_of(error), str(error), is_retried=False)
        finally:
            self._running.discard(task)
        reply.stats, reply.counts = stats_tracker.take_all(), self._engine.take_counts()
        reply.in_flight = self._engine.take_in_flight()
        return reply

    async def until_closed(self) -> None:
        await self._closed.wait()

    async def close(self) -> None:
        """Cancel the groups, close the workflows and the client."""
        running = [task for task in self._running if task is not None]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for groups in self._streams.values():
            if isinstance(groups, GroupRunner):
                groups.workflow.close()
        self._engine.destroy()
        perf_tracer.save()
        self._closed.set()


def _note_attempt(error: Exception, is_retried: bool) -> None:
    _reply.get().attempts.append(Failure(kind_of(error), str(error), is_retried))
