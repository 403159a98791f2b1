"""Workers as child processes of this one, on this machine, driven over socket pairs.

    create_workers -> areal.infra.worker, one process per worker
    call_engine    -> one request, one answer
    acall_engine   -> requests of many tasks, answers in any order

No worker listens for calls on a port. The ranks of a job rendezvous through a file; connections of
torch.distributed stay on the loopback device. Workers die with this process, however it ends; the
caller gets the exit code and last output of one that ends by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from areal.api.scheduler_api import (
    GPUAllocationError,
    Job,
    Scheduler,
    Worker,
    WorkerFailedError,
    WorkerTimeoutError,
)
from areal.api.scratch import ScratchFolder
from areal.infra.scheduler.role_table import RoleTable
from areal.infra.worker import Answer, pack, unpack
from areal.utils import logging
from areal.utils.channel import AsyncChannel, Channel
from areal.utils.child_process import ChildProcess, module_argv

logger = logging.getLogger("LocalScheduler")

_GRACE_S = 3.0  # for workers to exit after their channel is closed
_OVERLAP_S = 60.0  # for an idle worker to answer


class LocalScheduler(Scheduler):
    def __init__(self, logs: Path, gpus: Sequence[str] | None = None) -> None:
        """`gpus` are assigned to workers; default: all that are visible to this process."""
        self._logs = logs
        self._free_gpus = list(visible_gpus() if gpus is None else gpus)
        self._has_gpus = bool(self._free_gpus)
        self._processes: RoleTable[_Process] = RoleTable()
        self._scratch: ScratchFolder | None = None  # of the rendezvous files
        self._num_jobs = 0

    def create_workers(self, job: Job) -> list[str]:
        ids = [f"{job.role}/{index}" for index in range(job.replicas)]
        target = job.scheduling_strategy.target
        if target is not None:
            self._processes.share(job, target)
            return ids
        gpus = self._take_gpus(job)
        processes: list[_Process] = []
        self._processes.own(job, processes)  # before the start, so that all can be ended
        rendezvous = "" if job.overlapping else self._new_rendezvous()
        for index, id_ in enumerate(ids):
            env = _environment(job, index, gpus[index], rendezvous)
            log_path = self._logs / f"{job.role}{index}.log"
            processes.append(_Process(id_, env, gpus[index], log_path))
        return ids

    def get_workers(self, role: str, timeout: float) -> list[Worker]:
        deadline = time.monotonic() + timeout
        processes = self._processes.of(role)
        for process in processes:
            process.wait_ready(deadline)
        return [Worker(f"{role}/{i}", "127.0.0.1") for i in range(len(processes))]

    def replace_worker(self, worker_id: str, timeout: float) -> Worker:
        old = self._processes.find(worker_id)
        old.close_channel()
        old.child.terminate()
        new = _Process(old.child.name, old.env, old.gpus, old.log_path)
        self._processes.put(worker_id, new)
        new.wait_ready(time.monotonic() + timeout)
        return Worker(worker_id, "127.0.0.1")

    def delete_workers(self, role: str | None = None) -> None:
        """A colocated role is only removed; its processes end with their owner role."""
        ending = [process for own in self._processes.take(role).values() for process in own]
        for process in ending:
            process.close_channel()
        deadline = time.monotonic() + _GRACE_S
        for process in ending:
            process.end(deadline)
            self._free_gpus += process.gpus
        if role is None and self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    def take_free_gpus(self, count: int) -> list[str] | None:
        """Reserve GPUs permanently for a process that is not a worker (an inference server);
        None if too few are left."""
        if len(self._free_gpus) < count:
            return None
        return [self._free_gpus.pop(0) for _ in range(count)]

    def gpus_of(self, role: str) -> list[str]:
        """GPUs of the role's ranks, for a process colocated with them."""
        return [gpu for process in self._processes.of(role) for gpu in process.gpus]

    def _exchange(self, worker_id: str, order: tuple[Any, ...], timeout_s: float) -> Any:
        answer = self._processes.find(worker_id).exchange(worker_id, order, timeout_s)
        return answer.result_or_raise(worker_id)

    async def _exchange_async(self, worker_id: str, order: tuple[Any, ...]) -> Any:
        answer = await self._processes.find(worker_id).exchange_async(order)
        return answer.result_or_raise(worker_id)

    def _new_rendezvous(self) -> str:
        if self._scratch is None:
            self._scratch = ScratchFolder("ranks")
        self._num_jobs += 1
        return f"file://{self._scratch.path}/job{self._num_jobs}"

    def _take_gpus(self, job: Job) -> list[list[str]]:
        """The GPUs of each worker; no others are visible to it."""
        indices = range(job.replicas)
        counts = [job.num_gpus_of(index, has_gpus=self._has_gpus) for index in indices]
        if sum(counts) > len(self._free_gpus):
            raise GPUAllocationError(
                job.role,
                f"needs {sum(counts)} GPUs and {len(self._free_gpus)} are free; use fewer ranks, "
                "share processes (scheduling_strategy.type=colocation), or more machines "
                "(scheduler.type=ray)",
            )
        return [[self._free_gpus.pop(0) for _ in range(count)] for count in counts]


class _Process:
    """One worker: the child process, our end of the channel, and its GPUs."""

    def __init__(self, id_: str, env: dict[str, str], gpus: list[str], log_path: Path) -> None:
        self.env, self.gpus, self.log_path = env, gpus, log_path
        self._end, theirs = socket.socketpair()
        fd = theirs.fileno()
        argv = module_argv("areal.infra.worker", str(fd), id_)
        with theirs:
            self.child = ChildProcess(argv, name=id_, env=env, log_path=log_path, pass_fds=[fd])
        self._channel = Channel(self._end)
        self._turn = threading.Lock()  # serializes calls of colocated roles
        self._overlapping: asyncio.Task[_OverlappingCalls] | None = None

    def wait_ready(self, deadline: float) -> None:
        try:
            self._exchange(("ping",), max(0.1, deadline - time.monotonic()))
        except TimeoutError:
            raise WorkerTimeoutError(self.child.name, "was not ready in time") from None
        except (OSError, EOFError):
            raise self._ended(self.child.name) from None

    def exchange(self, worker_id: str, order: tuple[Any, ...], timeout_s: float) -> Answer:
        try:
            return self._exchange(order, timeout_s)
        except TimeoutError:
            self.close_channel()  # a late answer must not be taken for the next call's
            raise WorkerTimeoutError(worker_id, f"no answer within {timeout_s:g} s") from None
        except (OSError, EOFError):
            raise self._ended(worker_id) from None

    async def exchange_async(self, order: tuple[Any, ...]) -> Answer:
        """From the first one on, calls of this worker overlap."""
        if self._overlapping is None:
            self._overlapping = asyncio.create_task(self._overlap())
        calls = await asyncio.shield(self._overlapping)
        return await calls.exchange(order)

    def close_channel(self) -> None:
        """The worker then ends; calls in flight fail."""
        self._channel.close()

    def end(self, deadline: float) -> None:
        while self.child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self.child.terminate()

    def _exchange(self, order: tuple[Any, ...], timeout_s: float) -> Answer:
        with self._turn:
            self._channel.send(*pack(order))
            return unpack(self._channel.receive(timeout_s))

    async def _overlap(self) -> _OverlappingCalls:
        await asyncio.to_thread(self.exchange, self.child.name, ("overlap",), _OVERLAP_S)
        # A copy of the socket: `close_channel` may be called by another thread.
        channel = await AsyncChannel.open(self._end.dup())
        return _OverlappingCalls(channel, lambda: self._ended(self.child.name))

    def _ended(self, worker_id: str) -> WorkerFailedError:
        end = self.child.wait_end()
        return WorkerFailedError(worker_id, end, is_exit=not self.child.was_killed)


class _OverlappingCalls:
    """Calls in flight by number, on one event loop.

    reader task   consumes: answers   waits for: the channel   unblocked by: an answer, its end
    """

    def __init__(self, channel: AsyncChannel, failure: Callable[[], WorkerFailedError]) -> None:
        self._channel = channel
        self._failure = failure
        self._numbers = itertools.count()
        self._in_flight: dict[int, asyncio.Future[Answer]] = {}
        self._error: WorkerFailedError | None = None
        self._reader = asyncio.create_task(self._read(), name="worker-answers")

    async def exchange(self, order: Sequence[Any]) -> Answer:
        if self._error is not None:
            raise self._error
        number = next(self._numbers)
        answer = self._in_flight[number] = asyncio.get_running_loop().create_future()
        self._channel.send(*pack((number, *order)))
        try:
            return await answer
        finally:
            self._in_flight.pop(number, None)

    async def _read(self) -> None:
        try:
            while True:
                number, answer = unpack(await self._channel.receive())
                call = self._in_flight.get(number)
                if call is not None and not call.done():  # else cancelled meanwhile
                    call.set_result(answer)
        except EOFError:
            self._error = await asyncio.to_thread(self._failure)
            for call in self._in_flight.values():
                if not call.done():
                    call.set_exception(self._error)
        finally:
            self._channel.close()


def visible_gpus() -> list[str]:
    """Names as in CUDA_VISIBLE_DEVICES."""
    import torch  # late: Ray's workers import this package, and not all of them need it

    if not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def _environment(job: Job, index: int, gpus: list[str], rendezvous: str) -> dict[str, str]:
    import torch

    spec = job.spec_of(index)
    env = {"OMP_NUM_THREADS": str(spec.cpu or max(1, torch.get_num_threads() // job.replicas))}
    if not job.overlapping:
        env |= {
            "RANK": str(index),
            "LOCAL_RANK": "0",  # among the GPUs visible to it
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            "WORLD_SIZE": str(job.replicas),
            "AREAL_RENDEZVOUS": rendezvous,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        if sys.platform.startswith("linux"):
            env["GLOO_SOCKET_IFNAME"] = "lo"
    return {**env, **spec.env_vars}
