"""Where worker processes run: the contract between a controller and a process scheduler.

A job is one role ("actor", "rollout") with a number of equal workers. The scheduler starts them,
reports when they are ready and ends them; engines are built inside a worker from an import path, so
a scheduler never imports one. Every failure is a `SchedulerError` that names role and worker.

    scheduler.create_workers(Job(role="actor", replicas=4, tasks=[SchedulingSpec(gpu=1)]))
    for worker in scheduler.get_workers("actor", timeout=300):
        scheduler.create_engine(worker.id, "package.module.Engine", "actor", timeout_s=300)

Calls block and have a deadline; calls to different workers may come from different threads.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

from areal.api.config.section import config_section


@config_section(frozen=True, slots=True, kw_only=False)
class SchedulingSpec:
    """What one worker needs of its machine."""

    cpu: int | None = None
    """CPU cores. Default: an equal share of those this process may use; with Ray 1 for a rank, and
    the threads of an inference server."""
    gpu: int | None = None
    """GPUs of its own. Default: where there are GPUs, 1 for a rank, and 1 for each process of an
    inference server."""
    mem: int | None = None
    """Gigabytes of memory that Ray reserves. Default: none."""
    env_vars: dict[str, str] = field(default_factory=dict[str, str])
    """Environment variables of the process, besides those of the controller."""

    def __post_init__(self) -> None:
        for name, least in (("cpu", 1), ("gpu", 0), ("mem", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


@config_section(frozen=True, slots=True, kw_only=False)
class SchedulingStrategy:
    """Processes and devices of its own, or those of the role `target`."""

    type: Literal["separation", "colocation"] = "separation"
    """`separation`: worker processes of its own; `colocation`: those of `target`. An inference
    server always has its own process; with colocation it time-shares the devices of `target`."""
    target: str | None = None
    """With colocation the role whose processes or devices it shares; both need equal numbers of
    ranks."""

    def __post_init__(self) -> None:
        if (self.type == "colocation") != (self.target is not None):
            raise ValueError(
                "target must name the role to share processes with: colocation needs target, "
                f"and separation has none, got type={self.type!r} target={self.target!r}"
            )


@dataclass(frozen=True, slots=True)
class Job:
    """All workers of one role. `tasks` has one spec for all of them, or one for each."""

    role: str
    replicas: int
    tasks: list[SchedulingSpec] = field(default_factory=lambda: [SchedulingSpec()])
    scheduling_strategy: SchedulingStrategy = field(default_factory=SchedulingStrategy)
    default_gpus: int = 1  # per worker whose spec sets no number, if the machine has GPUs
    overlapping: bool = False  # its workers are no ranks; methods are coroutines (`acall_engine`)

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"job {self.role}: replicas must be at least 1, got {self.replicas}")
        if len(self.tasks) not in (1, self.replicas):
            raise ValueError(
                f"job {self.role}: tasks must have 1 or {self.replicas} entries, "
                f"got {len(self.tasks)}"
            )

    def spec_of(self, index: int) -> SchedulingSpec:
        return self.tasks[index if len(self.tasks) > 1 else 0]

    def num_cpus_of(self, index: int) -> int:
        """For schedulers that count cores, such as Ray."""
        return self.spec_of(index).cpu or 1

    def num_gpus_of(self, index: int, *, has_gpus: bool) -> int:
        wanted = self.spec_of(index).gpu
        return (self.default_gpus if has_gpus else 0) if wanted is None else wanted


@dataclass(frozen=True, slots=True)
class Worker:
    """One ready process. Its id is `role/index`."""

    id: str
    ip: str


class Scheduler(ABC):
    """Starts, finds and ends workers, and calls the engines inside them.

    RANK, WORLD_SIZE and LOCAL_RANK are set in the environment of a job's workers, unless its calls
    overlap, so that torch.distributed can be initialised as in `engine/train/process_group.py`.
    """

    @abstractmethod
    def create_workers(self, job: Job) -> list[str]:
        """Start the workers of `job`; returns their ids without waiting for readiness."""

    @abstractmethod
    def get_workers(self, role: str, timeout: float) -> list[Worker]:
        """The workers of `role`, all ready. Otherwise WorkerTimeoutError, or WorkerFailedError with
        the tail of the process's output."""

    @abstractmethod
    def replace_worker(self, worker_id: str, timeout: float) -> Worker:
        """Replace an ended worker by a new process, ready and without engines, possibly on another
        machine; only for workers that are in no torch.distributed group. WorkerTimeoutError if no
        resources are free."""

    @abstractmethod
    def delete_workers(self, role: str | None = None) -> None:
        """End the workers of `role`, or all."""

    def create_engine(
        self,
        worker_id: str,
        engine: str,
        engine_name: str,
        *args: Any,
        timeout_s: float,
        **kwargs: Any,
    ) -> None:
        """Build the class at the import path `engine` inside the worker, as `engine_name`."""
        try:
            self._exchange(worker_id, ("create", engine, engine_name, args, kwargs), timeout_s)
        except EngineCallError as error:
            raise EngineCreationError(worker_id, error.reason) from error.__cause__

    def call_engine(
        self,
        worker_id: str,
        method: str,
        engine_name: str,
        *args: Any,
        timeout_s: float,
        **kwargs: Any,
    ) -> Any:
        """Call a method of an engine in a worker and wait. EngineCallError has its exception as
        `__cause__`, WorkerFailedError the tail of an ended process's output."""
        return self._exchange(worker_id, ("call", method, engine_name, args, kwargs), timeout_s)

    async def acall_engine(
        self, worker_id: str, method: str, engine_name: str, *args: Any, timeout_s: float | None
    ) -> Any:
        """As `call_engine`, for a coroutine of an engine in a worker of an overlapping job: many
        calls may be in flight. Always from the same event loop."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange_async(worker_id, (method, engine_name, args))
        except TimeoutError:
            raise WorkerTimeoutError(worker_id, f"no answer within {timeout_s:g} s") from None

    @abstractmethod
    def _exchange(self, worker_id: str, order: tuple[Any, ...], timeout_s: float) -> Any:
        """The result of one order (`infra/worker.py`), waited for at most `timeout_s`."""

    @abstractmethod
    async def _exchange_async(self, worker_id: str, order: tuple[Any, ...]) -> Any:
        """The result of one call of an overlapping job."""


class SchedulerError(RuntimeError):
    """`worker` is a worker id or a role; `reason` is the cause."""

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"{worker}: {reason}")
        self.worker = worker
        self.reason = reason


class WorkerFailedError(SchedulerError):
    """A worker's process ended; `is_exit`: by itself, so another one would end the same way."""

    def __init__(self, worker: str, reason: str, *, is_exit: bool = False) -> None:
        super().__init__(worker, reason)
        self.is_exit = is_exit


class WorkerNotFoundError(SchedulerError):
    """No worker has this id."""


class WorkerTimeoutError(SchedulerError):
    """A worker was not ready in time."""


class EngineCreationError(SchedulerError):
    """An engine's constructor raised inside its worker."""


class EngineCallError(SchedulerError):
    """A method of an engine raised inside its worker; `failed_at` is the worker's clock then."""

    def __init__(self, worker: str, reason: str, failed_at: float = 0.0) -> None:
        super().__init__(worker, reason)
        self.failed_at = failed_at


class GPUAllocationError(SchedulerError):
    """The job needs more GPUs than are available."""
