"""Workers as child processes of this one, on this machine, driven over socket pairs.

    create_workers -> python -m areal.infra.scheduler.local_worker --channel FD      one per rank
    call_engine    -> one request, one answer

No worker listens for calls on a port. The ranks of a job rendezvous through a file; connections of
torch.distributed stay on the loopback device. Workers die with this process, however it ends; the
caller gets the exit code and last output of one that ends by itself.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from areal.api.scheduler_api import (
    GPUAllocationError,
    Job,
    Scheduler,
    SchedulingSpec,
    Worker,
    WorkerFailedError,
    WorkerTimeoutError,
)
from areal.api.scratch import ScratchFolder
from areal.infra.channel import Channel
from areal.infra.scheduler.role_table import RoleTable
from areal.infra.worker import Answer
from areal.utils import logging
from areal.utils.child_process import ChildProcess

logger = logging.getLogger("LocalScheduler")

_GRACE_S = 3.0  # for workers to exit after their channel is closed


class LocalScheduler(Scheduler):
    def __init__(self, logs: Path, gpus: Sequence[str] | None = None) -> None:
        """`gpus` are assigned to workers; default: all that are visible to this process."""
        self._logs = logs
        self._free_gpus = list(visible_gpus() if gpus is None else gpus)
        self._has_gpus = bool(self._free_gpus)
        self._processes: RoleTable[_Process] = RoleTable()
        self._scratch = ScratchFolder("ranks")  # removed with this object
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
        self._num_jobs += 1
        rendezvous = f"file://{self._scratch.path}/job{self._num_jobs}"
        for index, id_ in enumerate(ids):
            spec = job.spec_of(index)
            env = _environment(spec, index, job.replicas, gpus[index], rendezvous)
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
        old.channel.close()
        old.child.terminate()
        new = _Process(old.child.name, old.env, old.gpus, old.log_path)
        self._processes.put(worker_id, new)
        new.wait_ready(time.monotonic() + timeout)
        return Worker(worker_id, "127.0.0.1")

    def delete_workers(self, role: str | None = None) -> None:
        """A colocated role is only removed; its processes end with their owner role."""
        ending = [process for own in self._processes.take(role).values() for process in own]
        for process in ending:
            process.channel.close()
        deadline = time.monotonic() + _GRACE_S
        for process in ending:
            process.end(deadline)
            self._free_gpus += process.gpus

    def take_free_gpus(self, count: int) -> list[str] | None:
        """Reserve GPUs permanently for a process that is not a worker (an inference server);
        None if too few are left."""
        if len(self._free_gpus) < count:
            return None
        return [self._free_gpus.pop(0) for _ in range(count)]

    def gpus_of(self, role: str) -> list[str]:
        """GPUs of the role's ranks, for a process colocated with them."""
        return [gpu for process in self._processes.of(role) for gpu in process.gpus]

    def create_engine(
        self,
        worker_id: str,
        engine: str,
        engine_name: str,
        *args: Any,
        timeout_s: float,
        **kwargs: Any,
    ) -> None:
        order = ("create", engine, engine_name, args, kwargs)
        answer = self._processes.find(worker_id).exchange(worker_id, order, timeout_s)
        answer.raise_if_not_created(worker_id)

    def call_engine(
        self,
        worker_id: str,
        method: str,
        engine_name: str,
        *args: Any,
        timeout_s: float,
        **kwargs: Any,
    ) -> Any:
        order = ("call", method, engine_name, args, kwargs)
        answer = self._processes.find(worker_id).exchange(worker_id, order, timeout_s)
        return answer.result_or_raise(worker_id)

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
        ours, theirs = socket.socketpair()
        argv = [sys.executable, "-m", "areal.infra.scheduler.local_worker"]
        argv += ["--channel", str(theirs.fileno())]
        with theirs:
            self.child = ChildProcess(
                argv, name=id_, env=env, log_path=log_path, pass_fds=[theirs.fileno()]
            )
        self.channel = Channel(ours)
        self._turn = threading.Lock()  # serializes calls of colocated roles

    def wait_ready(self, deadline: float) -> None:
        try:
            with self._turn:
                self.channel.send(("ping",))
                self.channel.receive(max(0.1, deadline - time.monotonic()))
        except TimeoutError:
            raise WorkerTimeoutError(self.child.name, "was not ready in time") from None
        except (OSError, EOFError):
            raise self._ended(self.child.name) from None

    def exchange(self, worker_id: str, order: tuple[Any, ...], timeout_s: float) -> Answer:
        try:
            with self._turn:
                self.channel.send(order)
                return self.channel.receive(timeout_s)
        except TimeoutError:
            self.channel.close()  # a late answer must not be taken for the next call's
            raise WorkerTimeoutError(worker_id, f"no answer within {timeout_s:g} s") from None
        except (OSError, EOFError):
            raise self._ended(worker_id) from None

    def end(self, deadline: float) -> None:
        while self.child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self.child.terminate()

    def _ended(self, worker_id: str) -> WorkerFailedError:
        return WorkerFailedError(worker_id, self.child.wait_end())


def visible_gpus() -> list[str]:
    """Names as in CUDA_VISIBLE_DEVICES."""
    if not torch.cuda.is_available():
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def _environment(
    spec: SchedulingSpec, rank: int, world_size: int, gpus: list[str], rendezvous: str
) -> dict[str, str]:
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": "0",  # among the GPUs visible to it
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "WORLD_SIZE": str(world_size),
        "AREAL_RENDEZVOUS": rendezvous,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "OMP_NUM_THREADS": str(spec.cpu or max(1, torch.get_num_threads() // world_size)),
    }
    if sys.platform.startswith("linux"):
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return {**env, **spec.env_vars}
