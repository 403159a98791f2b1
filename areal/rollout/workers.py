"""Rollout workers: a pool of processes that run groups when one event loop is not enough.

    executor: gate, ledger, outcomes                   worker 0 .. N-1 (worker.py)
    PlacedGroups.run(task id, row) -- acall_engine ->  GroupRunner.run -> workflow -> servers,
                         GroupReply <- its answer ---                     rewards

`PlacedGroups` has the interface of `GroupRunner` and the worker runs a `GroupRunner`, so the
executor treats both alike. The workers are those of a scheduler: children of this process, or Ray
actors on any machine.

    watch of a worker     waits for: `until_closed`   unblocked by: the end of the worker
    a call                waits for: its reply        unblocked by: it, or the end of the worker

Invariant: a dead worker loses no group. Its groups are retried on other workers with the same
seeds, at most `max_retries` times each, and a new process replaces it. A worker killed before it is
ready is started again up to `max_retries` times; one that exits by itself before that stops the
run, with its last output.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal.api.engine_api import EngineLostError
from areal.api.scheduler_api import Job, Scheduler, WorkerFailedError, WorkerTimeoutError
from areal.rollout.failures import WorkerError
from areal.rollout.trajectory import decode
from areal.rollout.worker import Failure, GroupReply, WorkflowRecipe
from areal.sandbox.process import main_module
from areal.utils import logging, stats_tracker
from areal.utils.child_process import RestartBudget
from areal.utils.hosted_object import HostedObject
from areal.utils.waits import progress, waiting

if TYPE_CHECKING:
    import torch

    from areal.api.engine_api import InferenceEngine
    from areal.rollout.event_loop import TaskRunner

logger = logging.getLogger("RolloutWorkers")

_WORKER = "areal.rollout.worker.RolloutWorker"
_CLOSE_S = 2.0  # for a worker to close its workflows


class WorkerLostError(RuntimeError):
    """The worker process of a group has ended."""


@dataclass(frozen=True, slots=True)
class PlacedGroups:
    """Runs groups in the workers; same interface as `GroupRunner`."""

    workers: RolloutWorkers
    stream: int
    is_eval: bool
    on_attempt_failed: Callable[[Exception, bool], None]  # error, whether it is retried

    async def run(self, task_id: int, data: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        return await self.workers.run(self, task_id, data)


@dataclass(slots=True, eq=False)
class _Worker:
    name: str
    hosted: HostedObject
    pid: int
    num_groups: int = 0  # in flight
    opened: dict[int, asyncio.Future[None]] = field(default_factory=dict[int, Any])  # streams


class RolloutWorkers:
    """workers = RolloutWorkers(runner, engine, scheduler, job); workers.start(); workers.close()

    `engine` is pickled, and each worker of the overlapping `job` initializes its copy.
    """

    def __init__(
        self,
        runner: TaskRunner,
        engine: InferenceEngine,
        scheduler: Scheduler,
        job: Job,
        *,
        max_retries: int = 3,
        setup_timeout_s: float = 300.0,
    ) -> None:
        self._runner = runner
        self._engine = engine
        self._scheduler = scheduler
        self._job = job
        self._max_retries = max_retries
        self._setup_timeout_s = setup_timeout_s
        self.num_replaced = 0
        self._alive: list[_Worker] = []
        self._names: list[str] = []  # of all, also while one is replaced
        self._someone = asyncio.Event()  # set while `_alive` is not empty
        self._streams: dict[bytes, int] = {}  # pickled (main module, spec) -> stream id
        self._closing = False

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._alive]

    def states(self) -> list[dict[str, Any]]:
        """Of each worker its name, `running` or `restarting`, pid and groups in flight; any
        thread."""
        alive = {worker.name: worker for worker in list(self._alive)}
        return [
            {"name": name, "state": "restarting", "pid": None, "groups": 0}
            if (worker := alive.get(name)) is None
            else {"name": name, "state": "running", "pid": worker.pid, "groups": worker.num_groups}
            for name in self._names
        ]

    def start(self) -> None:
        """Blocks until all workers are ready; RuntimeError with the last output if one fails."""
        self._scheduler.create_workers(self._job)
        workers = self._scheduler.get_workers(self._job.role, self._setup_timeout_s)
        self._names = [f"rollout worker {index}" for index in range(len(workers))]
        started = [
            self._runner.run(self._bring_up(name, self._hosted(worker)))
            for name, worker in zip(self._names, workers, strict=True)
        ]
        for future in started:
            future.result(self._setup_timeout_s + 60)

    def place(
        self,
        recipe: WorkflowRecipe,
        on_attempt_failed: Callable[[Exception, bool], None],
        **options: Any,
    ) -> PlacedGroups:
        """Groups of this workflow; `options` are those of `GroupRunner`. Any thread."""
        try:
            spec = pickle.dumps({"recipe": recipe, **options})
        except Exception as error:
            raise ValueError(
                f"rollout.workers: the workflow cannot be sent to a worker process ({error}); give "
                "it by its import path, with workflow_kwargs that are plain data or are defined at "
                "the top level of a module, or set rollout.workers=0"
            ) from error
        main = main_module("the workflow") if b"__main__" in spec else None
        # An equal workflow, as in every evaluation, reuses its stream.
        stream = self._streams.setdefault(pickle.dumps((main, spec)), len(self._streams))
        return PlacedGroups(self, stream, options["is_eval"], on_attempt_failed)

    async def run(
        self, groups: PlacedGroups, task_id: int, data: dict[str, Any]
    ) -> dict[str, torch.Tensor] | None:
        """Run one group in the worker with the fewest groups in flight."""
        budget = RestartBudget(self._max_retries)
        while True:
            async with asyncio.timeout(self._setup_timeout_s):
                await self._someone.wait()
            worker = min(self._alive, key=lambda worker: worker.num_groups)
            try:
                reply = await self._call(worker, groups.stream, task_id, data)
            except WorkerFailedError:
                error = WorkerLostError(f"{worker.name} has ended")
                is_retried = budget.spend()
                groups.on_attempt_failed(error, is_retried)
                if not is_retried:
                    raise error from None
            else:
                return self._take(groups, reply)

    def close(self) -> None:
        """End the processes. Close the executor first, so that no call is in flight."""
        self._closing = True
        # RuntimeError: the loop has ended, or a worker has.
        with suppress(concurrent.futures.TimeoutError, RuntimeError):
            self._runner.run(self._close_workers()).result(_CLOSE_S + 1.0)
        self._scheduler.delete_workers(self._job.role)

    async def _close_workers(self) -> None:
        closing = [worker.hosted.acall("close", timeout_s=_CLOSE_S) for worker in self._alive]
        await asyncio.gather(*closing, return_exceptions=True)

    async def _call(
        self, worker: _Worker, stream: int, task_id: int, data: dict[str, Any]
    ) -> GroupReply:
        worker.num_groups += 1
        try:
            with waiting(worker.name):
                await self._open(worker, stream)
                return await worker.hosted.acall("run_group", stream, task_id, data)
        except WorkerFailedError as error:
            self._lose(worker, error)
            raise
        finally:
            worker.num_groups -= 1

    async def _open(self, worker: _Worker, stream: int) -> None:
        """Single-flight: the first groups of a stream share the call that opens it."""
        if stream not in worker.opened:
            opening = next(key for key, number in self._streams.items() if number == stream)
            call = worker.hosted.acall("open", stream, *pickle.loads(opening))
            worker.opened[stream] = asyncio.ensure_future(call)
        await asyncio.shield(worker.opened[stream])

    def _take(self, groups: PlacedGroups, reply: GroupReply) -> dict[str, torch.Tensor] | None:
        progress()
        for attempt in reply.attempts:
            groups.on_attempt_failed(_as_error(attempt), attempt.is_retried)
        stats_tracker.add_all(reply.stats)
        self._engine.add_counts(reply.counts)
        self._engine.add_in_flight(reply.in_flight)
        if reply.failure is not None:
            raise _as_error(reply.failure)
        return None if reply.trajectory is None else decode(reply.trajectory)

    def _hosted(self, worker: Any) -> HostedObject:
        return HostedObject(
            self._scheduler,
            worker,
            _WORKER,
            # Pickled for each start: a server's address may have changed.
            lambda worker: {"client": pickle.dumps(self._engine)},
            setup_timeout_s=self._setup_timeout_s,
        )

    async def _bring_up(self, name: str, hosted: HostedObject) -> None:
        """Start a worker, wait until it is ready, and watch it."""
        worker = _Worker(name, hosted, await self._start_worker(name, hosted))
        self._alive.append(worker)
        self._someone.set()
        self._runner.spawn(self._watch(worker), name=name.replace(" ", "-"))

    async def _start_worker(self, name: str, hosted: HostedObject) -> int:
        """Returns its pid."""
        budget = RestartBudget(self._max_retries)
        while True:
            try:
                await asyncio.to_thread(hosted.build)
                return await hosted.acall("start", timeout_s=self._setup_timeout_s)
            except WorkerTimeoutError as error:
                raise RuntimeError(f"{name} was not ready: {error}") from error
            except WorkerFailedError as error:
                if error.is_exit or not budget.spend():
                    raise RuntimeError(f"{name} was not ready: {error.reason}") from error
                self.num_replaced += 1
                logger.warning("%s before it was ready; starting another", error.reason)

    async def _watch(self, worker: _Worker) -> None:
        try:
            await worker.hosted.acall("until_closed")
        except WorkerFailedError as error:
            self._lose(worker, error)

    def _lose(self, worker: _Worker, error: WorkerFailedError) -> None:
        """Replace a dead worker, once; its calls fail by themselves and are retried elsewhere."""
        if self._closing or worker not in self._alive:
            return
        self._alive.remove(worker)
        if not self._alive:
            self._someone.clear()
        self.num_replaced += 1
        count = worker.num_groups
        logger.warning(
            "%s (pid %d) has ended; its %d groups run again elsewhere: %s",
            *(worker.name, worker.pid, count, error.reason),
        )
        replacing = self._bring_up(worker.name, worker.hosted)
        self._runner.spawn(replacing, name=f"{worker.name.replace(' ', '-')}-start")


def _as_error(failure: Failure) -> Exception:
    """EngineLostError keeps its type: it stops the run instead of counting as a failed group."""
    if failure.kind == EngineLostError.__name__:
        return EngineLostError(failure.text)
    return WorkerError(failure.kind, failure.text)
