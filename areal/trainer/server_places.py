"""Who starts the native servers of a run, and on which machine.

| `scheduler.type` | a server is                                                                  |
|------------------|------------------------------------------------------------------------------|
| `local`          | a child of this process, on its share of `gpus`                              |
| `ray`            | a child of one worker of role `rollout`, on the GPUs Ray gave to that worker |

Out: for each server the function that starts it, now and after it died.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from areal.engine.native.remote_engine import launch_native_server
from areal.engine.server_host import HostedServer

if TYPE_CHECKING:
    from areal.api.config.experiment import PPOConfig
    from areal.api.scheduler_api import Scheduler, Worker
    from areal.engine.server_process import Launch


def place_servers(
    config: PPOConfig,
    servers: Sequence[dict[str, Any]],
    scheduler: Scheduler | None,
    gpus: Sequence[str] | None,
) -> list[Launch]:
    """`servers` are the arguments of `launch_native_server`, for each one."""
    if config.scheduler.type == "ray":
        assert scheduler is not None, "with Ray the actor's ranks have opened it"
        return _in_workers(config, servers, scheduler)
    size = config.rollout.tensor_parallel
    shares = [None if gpus is None else gpus[i * size :][:size] for i in range(len(servers))]
    return [
        partial(launch_native_server, gpus=share, **options)
        for share, options in zip(shares, servers, strict=True)
    ]


def sender_address(config: PPOConfig, scheduler: Scheduler | None) -> str:
    """Where servers find the first rank of the actor, for weights that go through a group."""
    if config.scheduler.type == "local":
        return "127.0.0.1"
    return scheduler.get_workers("actor", config.actor.setup_timeout)[0].ip


def _in_workers(
    config: PPOConfig, servers: Sequence[dict[str, Any]], scheduler: Scheduler
) -> list[Launch]:
    job, timeout_s = config.server_job(), config.rollout.setup_timeout
    scheduler.create_workers(job)
    workers = scheduler.get_workers(job.role, timeout_s)
    if config.actor.weight_update_mode == "shm":
        _require_one_machine([*workers, *scheduler.get_workers("actor", timeout_s)])
    return [
        HostedServer(
            scheduler, worker, launch_native_server, options, setup_timeout_s=timeout_s
        ).launch
        for worker, options in zip(workers, servers, strict=True)
    ]


def _require_one_machine(workers: Sequence[Worker]) -> None:
    machines = sorted({worker.ip for worker in workers})
    if len(machines) > 1:
        raise ValueError(
            "actor.weight_update_mode must be disk, delta or xccl, got 'shm': Ray has placed actor "
            f"and rollout on {', '.join(machines)}, and memory is not shared between machines"
        )
