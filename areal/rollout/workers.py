"""Rollout workers: a pool of processes that run groups when one event loop is not enough.

    executor: gate, ledger, outcomes            worker 0 .. N-1 (worker_process.py)
    PlacedGroups.run(task id, row) -- socket -> GroupRunner.run -> workflow -> servers, rewards
                      trajectory <-- socket --  safetensors

`PlacedGroups` has the interface of `GroupRunner` and the worker runs a `GroupRunner`, so the
executor treats both alike. A worker is a child of this process (`spawn_here`) or of a scheduler's
worker on any machine (`HostedWorker.spawn`, behind the same socket interface).

    reader of a worker    consumes: replies         waits for: the socket
                          unblocked by: a reply, or the end of the worker
    a call                waits for: its reply      unblocked by: it, or WorkerLostError
    carrier of a hosted   relays bytes between the local socket and the host by scheduler calls;
    worker                ends with either end of the connection, or with the worker

Invariant: a dead worker loses no group. Its groups are retried on other workers with the same
seeds, at most `max_retries` times each, and a new process replaces it. A worker killed before it is
ready is started again up to `max_retries` times; one that exits by itself before that stops the
run, with its last output.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from areal.api.engine_api import EngineLostError
from areal.rollout.failures import WorkerError
from areal.rollout.trajectory import decode
from areal.rollout.worker_process import DOWN, UP, WorkflowRecipe
from areal.sandbox.process import main_module
from areal.utils import logging, stats_tracker
from areal.utils.child_process import ChildProcess
from areal.utils.hosted_object import HostedObject, clear_rank_env
from areal.utils.waits import progress, waiting

if TYPE_CHECKING:
    import socket

    import torch

    from areal.api.engine_api import InferenceEngine
    from areal.api.scheduler_api import Scheduler, Worker
    from areal.rollout.event_loop import TaskRunner


logger = logging.getLogger("RolloutWorkers")

_READ_BYTES = 16 << 20  # of replies buffered per worker before back-pressure

_DYING_S = 2.0  # a killed process closes its socket shortly before its exit


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
class _Call:
    """A group in flight in a worker."""

    groups: PlacedGroups
    answer: asyncio.Future[dict[str, Any] | None]


@dataclass(slots=True, eq=False)
class _Worker:
    index: int
    process: WorkerProcess
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    calls: dict[int, _Call] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)  # streams that were sent to it

    def send(self, message: Any) -> None:
        frame = pickle.dumps(message)
        self.writer.write(DOWN.pack(len(frame)) + frame)


class RolloutWorkers:
    """workers = RolloutWorkers(runner, engine, count=4); workers.start(); ...; workers.close()

    `engine` is pickled, and each worker initializes its copy. `spawn(index)` starts a worker's
    process and returns it with its socket; the default is a child of this process.
    """

    def __init__(
        self,
        runner: TaskRunner,
        engine: InferenceEngine,
        *,
        count: int,
        max_retries: int = 3,
        setup_timeout_s: float = 300.0,
        spawn: Callable[[int], tuple[WorkerProcess, socket.socket]] | None = None,
    ) -> None:
        self._runner = runner
        self._engine = engine
        self._count = count
        self._max_retries = max_retries
        self._setup_timeout_s = setup_timeout_s
        self._spawn = spawn or partial(spawn_here, logs=None)
        self.num_replaced = 0
        self._alive: list[_Worker] = []
        self._someone = asyncio.Event()  # set while `_alive` is not empty
        self._streams: dict[bytes, int] = {}  # pickled (main module, spec) -> stream id
        self._next_call = 0
        self._closing = False

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._alive]

    def start(self) -> None:
        """Blocks until all workers are ready; RuntimeError with the last output if one fails."""
        started = [self._runner.run(self._bring_up(index)) for index in range(self._count)]
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
    ) -> dict[str, Any] | None:
        """Run one group in the worker with the fewest groups in flight."""
        for attempt in range(self._max_retries + 1):
            async with asyncio.timeout(self._setup_timeout_s):
                await self._someone.wait()
            worker = min(self._alive, key=lambda worker: len(worker.calls))
            try:
                return await self._call(worker, groups, task_id, data)
            except WorkerLostError as error:
                final = attempt == self._max_retries
                groups.on_attempt_failed(error, not final)
                if final:
                    raise

    def close(self) -> None:
        """End the processes. Close the executor first, so that no call is in flight."""
        self._closing = True
        for worker in list(self._alive):
            worker.process.terminate(grace_s=2.0)

    async def _call(
        self, worker: _Worker, groups: PlacedGroups, task_id: int, data: dict[str, Any]
    ) -> dict[str, Any] | None:
        if groups.stream not in worker.opened:
            worker.opened.add(groups.stream)
            opening = next(key for key, n in self._streams.items() if n == groups.stream)
            worker.send(("open", groups.stream, *pickle.loads(opening)))
        number, self._next_call = self._next_call, self._next_call + 1
        call = worker.calls[number] = _Call(groups, asyncio.get_running_loop().create_future())
        try:
            worker.send(("run", number, groups.stream, task_id, data))
            with waiting(worker.process.name):
                return await call.answer
        finally:
            worker.calls.pop(number, None)

    async def _bring_up(self, index: int) -> None:
        """Start worker `index`, wait until it is ready, and spawn its reader."""
        worker = await self._start_worker(index, kills_left=self._max_retries)
        self._alive.append(worker)
        self._someone.set()
        self._runner.spawn(self._read(worker), name=f"rollout-worker-{index}")

    async def _start_worker(self, index: int, kills_left: int) -> _Worker:
        process, channel = await asyncio.to_thread(self._spawn, index)
        reader, writer = await asyncio.open_connection(sock=channel, limit=_READ_BYTES)
        # Pickled for each start: a server's address may have changed.
        setup = _describe_process(self._engine)
        writer.write(DOWN.pack(len(setup)) + setup)
        try:
            async with asyncio.timeout(self._setup_timeout_s):
                await _next_answer(reader)
                return _Worker(index, process, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            writer.close()
            code = await asyncio.to_thread(process.wait, _DYING_S)
            await asyncio.to_thread(process.terminate)
        end = await asyncio.to_thread(process.describe_end)
        if code is None or code >= 0 or kills_left == 0:
            raise RuntimeError(f"it was not ready: {end}")
        self.num_replaced += 1
        logger.warning("%s before it was ready; starting another", end)
        return await self._start_worker(index, kills_left - 1)

    async def _read(self, worker: _Worker) -> None:
        try:
            while True:
                message, payload = await _next_answer(worker.reader)
                self._take(worker, message, payload)
        except (asyncio.IncompleteReadError, ConnectionError):
            if not self._closing:
                await self._replace(worker)
        finally:
            worker.writer.close()

    def _take(self, worker: _Worker, message: dict[str, Any], payload: bytes) -> None:
        progress()
        call = worker.calls.get(message["call"])
        if "attempt_failed" in message:
            if call is not None:
                error = WorkerError(message["attempt_failed"], message["text"])
                call.groups.on_attempt_failed(error, message["retried"])
            return
        stats_tracker.add_all(message["stats"])
        self._engine.add_counts(message["counts"])
        if call is None or call.answer.done():  # cancelled meanwhile
            return
        if message["state"] == "failed":
            call.answer.set_exception(_failure(message["kind"], message["text"]))
        else:
            call.answer.set_result(decode(payload) if payload else None)

    async def _replace(self, worker: _Worker) -> None:
        """Fail its calls first, so that they are retried elsewhere; then start a new process."""
        self._alive.remove(worker)
        if not self._alive:
            self._someone.clear()
        lost = [call.answer for call in worker.calls.values() if not call.answer.done()]
        for answer in lost:
            answer.set_exception(WorkerLostError(f"{worker.process.name} has ended"))
        await asyncio.to_thread(worker.process.terminate)
        self.num_replaced += 1
        end = await asyncio.to_thread(worker.process.describe_end)
        logger.warning("%s; its %d groups run again elsewhere", end, len(lost))
        await self._bring_up(worker.index)


def _failure(kind: str, text: str) -> Exception:
    """EngineLostError keeps its type: it stops the run instead of counting as a failed group."""
    if kind == EngineLostError.__name__:
        return EngineLostError(text)
    return WorkerError(kind, text)


async def _next_answer(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    header_size, payload_size = UP.unpack(await reader.readexactly(UP.size))
    frame = await reader.readexactly(header_size + payload_size)
    return json.loads(frame[:header_size]), frame[header_size:]


def _describe_process(engine: InferenceEngine) -> bytes:
    """Set-up message of a worker: `sys.path` and the pickled engine client."""
    sys_path = [entry or os.getcwd() for entry in sys.path]
    return pickle.dumps({"sys_path": sys_path, "engine": pickle.dumps(engine)})


_MOST_BYTES = 1 << 20  # relayed by one call
_LISTEN_S = 0.02  # wait for replies before checking for bytes to send
_STOP_S = 15.0


class WorkerProcess(Protocol):
    """Interface of a worker's process, local or hosted."""

    name: str

    @property
    def pid(self) -> int: ...
    def wait(self, timeout_s: float) -> int | None: ...
    def describe_end(self) -> str: ...
    def terminate(self, *, grace_s: float = 5.0) -> object: ...


def spawn_here(index: int, logs: Path | None) -> tuple[ChildProcess, socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        child = ChildProcess(
            [sys.executable, "-m", "areal.rollout.worker_process", str(theirs.fileno())],
            name=f"rollout worker {index}",
            env={"OMP_NUM_THREADS": "1"},
            log_path=None if logs is None else logs / f"rollout_worker{index}.log",
            pass_fds=(theirs.fileno(),),
        )
    return child, ours


class WorkerHost:
    """Runs in a scheduler's worker; parent of the rollout worker process."""

    _child: ChildProcess  # of the last start

    def __init__(self, index: int, logs: Path | None) -> None:
        clear_rank_env()
        self._index = index
        self._logs = logs
        self._num_started = 0
        self._channel: socket.socket | None = None

    def start(self) -> tuple[int, int]:
        """Returns (number of this start, pid); ends a process that still runs."""
        self.stop()
        self._child, self._channel = spawn_here(self._index, self._logs)
        self._num_started += 1
        return self._num_started, self._child.pid

    def exchange(self, start: int, data: bytes, listen_s: float) -> bytes | None:
        """Send `data`, return received bytes; None if the process of `start` is gone."""
        if start != self._num_started or self._channel is None:
            return None
        return _receive(self._channel, listen_s) if _send(self._channel, data) else None

    def wait(self, timeout_s: float) -> int | None:
        return self._child.wait(timeout_s)

    def describe_end(self) -> str:
        return self._child.describe_end()

    def stop(self, grace_s: float = 5.0) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            self._child.terminate(grace_s=grace_s)


class HostedWorker:
    """A rollout worker hosted by a scheduler's worker; also the process of its last `spawn`."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        index: int,
        logs: Path | None,
        *,
        setup_timeout_s: float,
    ) -> None:
        self.name = f"rollout worker {index}"
        self.pid = 0
        self._host = HostedObject(
            scheduler,
            worker,
            "areal.rollout.workers.WorkerHost",
            lambda worker: {"index": index, "logs": logs},
            setup_timeout_s=setup_timeout_s,
        )

    def spawn(self) -> tuple[HostedWorker, socket.socket]:
        """EngineLostError if no machine is left to start it on."""
        start, self.pid = self._host.start("start")
        ours, theirs = socket.socketpair()
        carrier = threading.Thread(
            target=self._carry, args=(theirs, start), name=f"{self.name}-carrier", daemon=True
        )
        carrier.start()
        return self, ours

    def wait(self, timeout_s: float) -> int | None:
        code = self._host.ask("wait", timeout_s)
        return code if self._host.loss is None else -signal.SIGKILL  # killed with its host

    def describe_end(self) -> str:
        return self._host.ask("describe_end") or f"{self.name}: {self._host.loss}"

    def terminate(self, *, grace_s: float = 5.0) -> None:
        self._host.ask("stop", grace_s, timeout_s=grace_s + _STOP_S)

    def _carry(self, channel: socket.socket, start: int) -> None:
        with channel:
            while (data := _receive(channel, 0.0)) is not None:
                answer = self._host.ask("exchange", start, data, 0.0 if data else _LISTEN_S)
                if answer is None or not _send(channel, answer):
                    return


def _receive(channel: socket.socket, wait_s: float) -> bytes | None:
    """Bytes received within `wait_s`, possibly none; None if the other end is closed."""
    channel.settimeout(wait_s)
    try:
        return channel.recv(_MOST_BYTES) or None
    except (BlockingIOError, TimeoutError):
        return b""
    except ConnectionError:
        return None
    finally:
        channel.settimeout(None)


def _send(channel: socket.socket, data: bytes) -> bool:
    """Whether the other end is still open."""
    try:
        channel.sendall(data)
    except ConnectionError:
        return False
    return True
