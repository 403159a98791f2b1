"""An object in a scheduler's worker, called from this process while that worker lives.

this process                             a worker of some role, on its machine
HostedObject  -- Scheduler.call_engine ->  the object, built there from its import path

hosted = HostedObject(scheduler, worker, "package.module.Class", arguments, setup_timeout_s=60)
hosted.start("begin")       # in a replacement worker if the last one has ended
hosted.ask("how_are_you")   # None if its worker is lost; `loss` then says how

hosted.build()              # or, in a worker of an overlapping job: methods are coroutines
await hosted.acall("run")
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from areal.api.engine_api import EngineLostError
from areal.api.scheduler_api import (
    EngineCallError,
    EngineCreationError,
    Scheduler,
    Worker,
    WorkerFailedError,
    WorkerTimeoutError,
)

_NAME = "hosted"
_MARGIN_S = 60.0  # beyond the start's own deadline, whose error is more specific
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "AREAL_RENDEZVOUS", "AREAL_RENDEZVOUS_FD")


class HostedObject:
    """`path` is the import path of its class, `arguments(worker)` the keyword arguments.
    `setup_timeout_s` bounds a start in the worker, and the wait for a replacement worker."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        path: str,
        arguments: Callable[[Worker], dict[str, Any]],
        *,
        setup_timeout_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._path = path
        self._arguments = arguments
        self._setup_timeout_s = setup_timeout_s
        self._is_made = False  # whether the first worker has built it
        self.loss: str | None = None  # how the worker ended

    def start(self, method: str) -> Any:
        """Result or exception of `method` in the worker. EngineLostError if no worker can be had
        to call it in."""
        try:
            self.build()
            answer = self.call(method)
        except (WorkerFailedError, WorkerTimeoutError) as error:
            self.loss = str(error)
            raise
        self.loss = None  # only now: a thread that calls `ask` must find what was started
        return answer

    def build(self) -> None:
        """Build the object if its worker has none: in a replacement worker if the last one is
        lost."""
        if self.loss is not None:
            self._renew_worker()
        if self.loss is not None or not self._is_made:
            self._make()

    def ask(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Its result; None if its worker is lost, which then holds until the next start."""
        if self.loss is None:
            try:
                return self.call(method, *args, timeout_s=timeout_s)
            except (WorkerFailedError, WorkerTimeoutError) as error:
                self.loss = str(error)
        return None

    def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        # A call may have to wait for a start in another thread.
        limit_s = timeout_s or self._setup_timeout_s + _MARGIN_S
        try:
            return self._scheduler.call_engine(
                self._worker.id, method, _NAME, *args, timeout_s=limit_s
            )
        except EngineCallError as error:
            raise error.__cause__ or error from None

    async def acall(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """The worker is lost with any WorkerFailedError or WorkerTimeoutError."""
        try:
            return await self._scheduler.acall_engine(
                self._worker.id, method, _NAME, *args, timeout_s=timeout_s
            )
        except EngineCallError as error:
            raise error.__cause__ or error from None
        except (WorkerFailedError, WorkerTimeoutError) as error:
            self.loss = str(error)
            raise

    def _make(self) -> None:
        try:
            self._scheduler.create_engine(
                self._worker.id,
                self._path,
                _NAME,
                timeout_s=self._setup_timeout_s,
                **self._arguments(self._worker),
            )
        except EngineCreationError as error:
            cause = error.__cause__ or error
            cause.add_note(str(error))
            raise cause from None
        self._is_made = True

    def _renew_worker(self) -> None:
        try:
            self._worker = self._scheduler.replace_worker(self._worker.id, self._setup_timeout_s)
        except WorkerTimeoutError as error:
            raise EngineLostError(f"{self.loss}; {error}") from None


def clear_rank_env() -> None:
    """For a host: child processes are no ranks of the worker's own job."""
    for name in _RANK_VARIABLES:
        os.environ.pop(name, None)
