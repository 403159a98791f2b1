"""Who starts the servers and rollout workers of a run, on which machine and on which GPUs.

| `scheduler.type` | a server is                                 | a rollout worker is           |
|------------------|---------------------------------------------|-------------------------------|
| `local`          | a child of this process, on its share of    | a child of this process       |
|                  | `gpus`                                      |                               |
| `ray`            | a child of one worker of role `rollout`, on | a child of one worker of role |
|                  | the GPUs Ray gave to that worker            | `rollout_worker`              |

Out: for each the function that starts it, now and after it died.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.scheduler_api import EngineCreationError
from areal.engine.remote.native import launch_native_server
from areal.engine.remote.server_host import HostedServer
from areal.infra.scheduler.local import LocalScheduler, visible_gpus
from areal.rollout.worker_places import HostedWorker, spawn_here
from areal.utils.hub import hub_name
from areal.utils.startup import stage

if TYPE_CHECKING:
    import socket

    from areal.api.config.experiment import PPOConfig
    from areal.api.scheduler_api import Scheduler, Worker
    from areal.engine.remote.server_process import Launch
    from areal.rollout.worker_places import WorkerProcess


def place_servers(
    config: PPOConfig,
    servers: Sequence[dict[str, Any]],
    scheduler: Scheduler | None,
    gpus: Sequence[str] | None,
) -> list[Launch]:
    """`servers` are the arguments of `launch_native_server`, for each one."""
    if config.scheduler.type == "ray":
        return _in_workers(config, servers, _opened(scheduler))
    size = config.rollout.tensor_parallel
    shares = [None if gpus is None else gpus[i * size :][:size] for i in range(len(servers))]
    return [
        partial(launch_native_server, gpus=share, **options)
        for share, options in zip(shares, servers, strict=True)
    ]


def place_rollout_workers(
    config: PPOConfig, scheduler: Scheduler | None, logs: Path
) -> Callable[[int], tuple[WorkerProcess, socket.socket]]:
    """What starts the rollout worker of an index."""
    if config.scheduler.type == "local":
        return partial(spawn_here, logs=logs)
    job, timeout_s = config.rollout_worker_job(), config.rollout.setup_timeout
    ray = _opened(scheduler)
    ray.create_workers(job)
    hosted = [
        HostedWorker(ray, worker, index, logs, setup_timeout_s=timeout_s)
        for index, worker in enumerate(ray.get_workers(job.role, timeout_s))
    ]
    return lambda index: hosted[index].spawn()


def server_gpus(config: PPOConfig, scheduler: Scheduler | None) -> list[str] | None:
    """Those of the ranks they take turns with, or those that training on this machine has left;
    None shares what there is, or leaves it to Ray."""
    rollout, gpus = config.rollout, visible_gpus()
    if config.scheduler.type == "ray":
        return None
    wanted = rollout.num_servers * rollout.tensor_parallel
    target = rollout.scheduling_strategy.target
    if target is not None:
        if config.hosts()[target] == "controller":
            return None
        assert isinstance(scheduler, LocalScheduler), "the ranks of the target have opened it"
        return scheduler.gpus_of(target) or None
    if isinstance(scheduler, LocalScheduler):
        free = scheduler.take_free_gpus(wanted)
    elif rollout.num_servers == 1:
        return None
    else:
        others = gpus[1:]  # the first trains
        free = others[:wanted] if len(others) >= wanted else None
    if free is None and rollout.num_servers > 1 and len(gpus) > 1:
        raise ValueError(
            f"rollout.backend {rollout.backend!r} needs {wanted} GPUs that do not train, and "
            f"there are not as many among {', '.join(gpus)}: use fewer d"
        )
    return free


def sender_address(config: PPOConfig, scheduler: Scheduler | None) -> str:
    """Where servers find the first rank of the actor, for weights that go through a group."""
    if config.scheduler.type == "local":
        return "127.0.0.1"
    return _opened(scheduler).get_workers("actor", config.actor.setup_timeout)[0].ip


def _opened(scheduler: Scheduler | None) -> Scheduler:
    assert scheduler is not None, "with Ray the actor's ranks have opened it"
    return scheduler


def _in_workers(
    config: PPOConfig, servers: Sequence[dict[str, Any]], scheduler: Scheduler
) -> list[Launch]:
    job, timeout_s = config.server_job(), config.rollout.setup_timeout
    scheduler.create_workers(job)
    workers = scheduler.get_workers(job.role, timeout_s)
    _fetch_model(config, scheduler, workers)
    if config.actor.weight_update_mode == "shm":
        _require_one_machine([*workers, *scheduler.get_workers("actor", timeout_s)])
    return [
        HostedServer(
            scheduler, worker, launch_native_server, options, setup_timeout_s=timeout_s
        ).launch
        for worker, options in zip(workers, servers, strict=True)
    ]


def _fetch_model(config: PPOConfig, scheduler: Scheduler, workers: Sequence[Worker]) -> None:
    """On the machines of the servers, which may be others than those of the ranks: what a download
    takes is no part of the time a server has to come up."""
    path, limit_s = config.actor.path, config.actor.setup_timeout
    if hub_name(path) is None:
        return

    def fetch(worker: Worker) -> None:
        name = "areal.utils.hub.model_folder"
        try:
            scheduler.create_engine(worker.id, name, "model", path, timeout_s=limit_s)
        except EngineCreationError as error:
            raise error.__cause__ or error from None

    with (
        stage(f"{path} where the servers are", limit_s=limit_s),
        ThreadPoolExecutor(len(workers), thread_name_prefix="fetch") as pool,
    ):
        list(pool.map(fetch, workers))


def _require_one_machine(workers: Sequence[Worker]) -> None:
    machines = sorted({worker.ip for worker in workers})
    if len(machines) > 1:
        raise ValueError(
            "actor.weight_update_mode must be disk, delta or xccl, got 'shm': Ray has placed actor "
            f"and rollout on {', '.join(machines)}, and memory is not shared between machines"
        )
