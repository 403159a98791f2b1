"""Workers as Ray actors: one placement group per role, on one machine or on a cluster.

    scheduling_spec -> one bundle (CPU, GPU, memory) per worker
    scheduler.placement -> PACK them on few machines, or SPREAD them

The cluster is that of RAY_ADDRESS, or a new one on this machine that ends with this process; a new
one has slots for all workers of the run, which share cores if there are fewer. All machines need
the same files at the same paths. Arguments and results go through Ray's object store.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal.api.scheduler_api import (
    GPUAllocationError,
    Job,
    Scheduler,
    Worker,
    WorkerFailedError,
    WorkerTimeoutError,
)
from areal.infra.scheduler.role_table import RoleTable
from areal.infra.worker import Answer, EngineHost
from areal.sandbox.process import RUN_FOLDER
from areal.utils import logging, perf_tracer, stacks
from areal.utils.fs import open_private, private_folder
from areal.utils.perf_tracer import FOLDER_VARIABLE

logger = logging.getLogger("RayScheduler")

_GIGABYTE = 1 << 30
_ROOM_S = 30.0  # for Ray to reschedule a worker of a lost machine
_LOOK_S = 1.0  # between two attempts
_LOST = (RayActorError, OutOfMemoryError)  # the second: killed by Ray, whose machine ran short
_SHARED_VARIABLES = (RUN_FOLDER, FOLDER_VARIABLE, stacks.VARIABLE)
_MAX_OVERLAPPING = 100_000  # calls in flight per worker; Ray's default is 1,000


class RayScheduler(Scheduler):
    def __init__(
        self, jobs: Sequence[Job] = (), *, placement: Literal["PACK", "SPREAD"] = "PACK"
    ) -> None:
        """`jobs` are all jobs of the run, as far as they are known."""
        if not ray.is_initialized():
            join_cluster(jobs)
        self._placement = placement
        self._actors: RoleTable[Any] = RoleTable()
        self._jobs: dict[str, Job] = {}  # of roles that own a placement group
        self._groups: dict[str, PlacementGroup] = {}

    def create_workers(self, job: Job) -> list[str]:
        target = job.scheduling_strategy.target
        if target is not None:
            self._actors.share(job, target)
        else:
            bundles = [resources_of(job, index) for index in range(job.replicas)]
            others = [spec for group in self._groups.values() for spec in group.bundle_specs]
            check_fits(job.role, bundles, others)
            group = placement_group(bundles, strategy=self._placement)
            self._groups[job.role], self._jobs[job.role] = group, job
            actors: list[Any] = []
            self._actors.own(job, actors)
            for index in range(job.replicas):
                actors.append(_start(group, job, index))
        return [f"{job.role}/{index}" for index in range(job.replicas)]

    def get_workers(self, role: str, timeout: float) -> list[Worker]:
        actors = self._actors.of(role)
        try:
            ips = ray.get([actor.ip.remote() for actor in actors], timeout=timeout)
            meeting = ray.get(actors[0].listen.remote(), timeout=timeout)
            ray.get([actor.meet_at.remote(meeting) for actor in actors], timeout=timeout)
        except GetTimeoutError:
            free = ray.available_resources()
            raise WorkerTimeoutError(
                role, f"Ray started not all workers within {timeout:g} s; free resources: {free}"
            ) from None
        except _LOST as error:
            raise WorkerFailedError(role, str(error)) from error
        return [Worker(f"{role}/{i}", ip) for i, ip in enumerate(ips)]

    def replace_worker(self, worker_id: str, timeout: float) -> Worker:
        ray.kill(self._actors.find(worker_id))  # it may be unreachable and still alive
        deadline = time.monotonic() + min(timeout, _ROOM_S)
        while True:
            try:
                return self._start_again(worker_id, deadline, timeout)
            except WorkerFailedError:  # Ray has not yet noticed the lost machine
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_S)

    def _start_again(self, worker_id: str, deadline: float, timeout: float) -> Worker:
        role, _, index = worker_id.rpartition("/")
        # Ray moves bundles of a lost machine to another one with enough resources.
        if not self._groups[role].wait(max(_LOOK_S, deadline - time.monotonic())):
            raise WorkerTimeoutError(worker_id, "no machine of the Ray cluster has room for it")
        actor = _start(self._groups[role], self._jobs[role], int(index))
        self._actors.put(worker_id, actor)
        return Worker(worker_id, _wait(actor.ip.remote(), worker_id, timeout))

    def delete_workers(self, role: str | None = None) -> None:
        """A colocated role is only removed; its actors end with their owner role."""
        for name, actors in self._actors.take(role).items():
            for actor in actors:
                ray.kill(actor)
            remove_placement_group(self._groups.pop(name))
            del self._jobs[name]

    def _exchange(self, worker_id: str, order: tuple[Any, ...], timeout_s: float) -> Any:
        reply = self._actors.find(worker_id).exchange.remote(*order)
        return _wait(reply, worker_id, timeout_s).result_or_raise(worker_id)

    async def _exchange_async(self, worker_id: str, order: tuple[Any, ...]) -> Any:
        reply = self._actors.find(worker_id).call_async.remote(*order)
        try:
            answer = await asyncio.wrap_future(reply.future())
        except _LOST as error:
            raise WorkerFailedError(worker_id, str(error)) from error
        return answer.result_or_raise(worker_id)


def join_cluster(jobs: Sequence[Job]) -> None:
    """Make this process a driver of the cluster of RAY_ADDRESS, else of a new local one."""
    if "RAY_ADDRESS" in os.environ:
        ray.init()
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Processes that Ray starts ahead lack the environment of a worker: none of them is ever used.
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    from areal.utils.device import num_cores  # late: torch, which not every worker needs

    # On the loopback device, so that others cannot reach it.
    ray.init(
        address="local",
        num_cpus=max(num_cores(), sum(_num_cpus(job) for job in jobs)),
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
    )


def _num_cpus(job: Job) -> int:
    return sum(job.num_cpus_of(index) for index in range(job.replicas))


class _RayWorker:
    """One worker. Ray runs its methods one at a time, in call order."""

    def __init__(self, folder: str, name: str) -> None:
        _log_into_the_run(name)
        stacks.listen()  # before anything can hang; without it SIGUSR1 would end this process
        perf_tracer.start_below(name)
        self._host = EngineHost()
        self._meeting = ""  # a URL, once this worker listens there
        os.chdir(folder)  # so that relative paths resolve as in the controller

    def exchange(self, action: Literal["create", "call"], *order: Any) -> Answer:
        return getattr(self._host, action)(*order)

    def ip(self) -> str:
        return ray.util.get_node_ip_address()

    def listen(self) -> str:
        """Where ranks meet this one, the first: at a port that is its own from here on."""
        if not self._meeting:
            listener = socket.create_server((self.ip(), 0))
            host, port = listener.getsockname()
            self._meeting = f"tcp://{host}:{port}"
            os.environ["AREAL_RENDEZVOUS_FD"] = str(listener.detach())
        return self._meeting

    def meet_at(self, rendezvous: str) -> None:
        os.environ.setdefault("AREAL_RENDEZVOUS", rendezvous)  # colocated roles keep the first one


class _OverlappingRayWorker(_RayWorker):
    """One worker of an overlapping job: an actor with a coroutine has one event loop, on which Ray
    runs all its methods."""

    async def call_async(self, *order: Any) -> Answer:
        return await self._host.call_async(*order)


def _log_into_the_run(name: str) -> None:
    """Output of this process goes to a file beside the controller's, as that of a local worker."""
    if root := os.environ.get(RUN_FOLDER):
        logs = Path(root) / "logs"
        private_folder(logs)
        with open_private(logs / f"{name.replace('/', '')}.log", "a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)


def _start(group: PlacementGroup, job: Job, index: int) -> Any:
    bundle = group.bundle_specs[index]
    rank = {
        "RANK": str(index),
        "LOCAL_RANK": "0",  # among the GPUs visible to it
        "WORLD_SIZE": str(job.replicas),
    }
    env = {
        **({} if job.overlapping else rank),
        "OMP_NUM_THREADS": str(int(bundle["CPU"])),
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        **{name: os.environ.get(name, "") for name in _SHARED_VARIABLES},
        **job.spec_of(index).env_vars,
    }
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    options = {
        "num_cpus": bundle["CPU"],
        "num_gpus": bundle.get("GPU", 0),
        "memory": bundle.get("memory"),
        "scheduling_strategy": place,
        "runtime_env": {"env_vars": env},
        "max_restarts": 0,  # a restarted rank would have lost its weights
    }
    worker = _RayWorker
    if job.overlapping:
        worker, options["max_concurrency"] = _OverlappingRayWorker, _MAX_OVERLAPPING
    return ray.remote(worker).options(**options).remote(os.getcwd(), f"{job.role}/{index}")


def resources_of(job: Job, index: int) -> dict[str, float]:
    """The bundle of one worker, with Ray's resource names."""
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    resources: dict[str, float] = {"CPU": job.num_cpus_of(index)}
    if (num_gpus := job.num_gpus_of(index, has_gpus=has_gpus)) > 0:
        resources["GPU"] = num_gpus
    if (gigabytes := job.spec_of(index).mem) is not None:
        resources["memory"] = gigabytes * _GIGABYTE
    return resources


def check_fits(
    role: str, bundles: list[dict[str, float]], others: Sequence[dict[str, float]] = ()
) -> None:
    """GPUAllocationError for a group that cannot fit beside `others`: Ray would wait forever."""
    there = ray.cluster_resources()
    for kind in ("CPU", "GPU"):
        wanted = sum(bundle.get(kind, 0) for bundle in bundles)
        taken = sum(bundle.get(kind, 0) for bundle in others)
        if wanted + taken > there.get(kind, 0):
            beside = f" beside the {taken:g} of other roles" if taken else ""
            raise GPUAllocationError(
                role,
                f"its {len(bundles)} workers need {wanted:g} {kind}s{beside} and the Ray cluster "
                f"has {there.get(kind, 0):g}: use fewer ranks, or lower scheduling_spec",
            )


def _wait(reply: Any, worker_id: str, timeout_s: float) -> Any:
    try:
        return ray.get(reply, timeout=timeout_s)
    except GetTimeoutError:
        raise WorkerTimeoutError(worker_id, f"no answer within {timeout_s:g} s") from None
    except _LOST as error:
        raise WorkerFailedError(worker_id, str(error)) from error
