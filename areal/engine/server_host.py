"""Inference servers in the workers of a scheduler, on whatever machines those are.

    here                                     worker of role `rollout`, on its machine
    HostedServer  -- Scheduler.call_engine ->  ServerHost  -- launch ->  the server, its child

    hosted = HostedServer(scheduler, worker, launch_native_server, {"token": ...}, ...)
    process = ServerProcess(hosted.launch)   # as if the server were a child of this process

A worker takes its server with it when it ends; `launch` then asks for another worker first.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from areal.api.engine_api import EngineLostError
from areal.api.scheduler_api import (
    EngineCallError,
    EngineCreationError,
    Scheduler,
    Worker,
    WorkerFailedError,
    WorkerTimeoutError,
)
from areal.api.secret_text import remember_secret

if TYPE_CHECKING:
    from areal.utils.child_process import ChildProcess

StartServer = Callable[..., "tuple[ChildProcess, str]"]

_HOST = "areal.engine.server_host.ServerHost"
_NAME = "server"
_MARGIN_S = 60.0  # beyond the launch's own deadline, which says more about what is wrong
_STOP_S = 15.0
# A server is no rank of the job its worker is one of.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "AREAL_RENDEZVOUS")


class ServerHost:
    """Lives in a worker. `launch` is a function of a module, which starts a server there and
    returns its process and "host:port" once it answers."""

    def __init__(self, launch: StartServer, *, token: str, **options: Any) -> None:
        remember_secret(token)
        for name in _RANK_VARIABLES:
            os.environ.pop(name, None)
        self._launch = partial(launch, token=token, **options)
        self._child: ChildProcess | None = None

    def start(self) -> str:
        """The address of a new server; one that is still there is ended first."""
        self.stop()
        self._child, address = self._launch()
        return address

    def wait(self, timeout_s: float) -> int | None:
        return self._child.wait(timeout_s)

    def describe_end(self) -> str:
        return self._child.describe_end()

    def stop(self) -> None:
        if self._child is not None:
            self._child.terminate()


class HostedServer:
    """The server of one worker, with the methods of a ChildProcess that `ServerProcess` needs.

    `options` are arguments of `launch`, besides the `host` to listen on. `setup_timeout_s` bounds
    how long `launch` takes there, and how long the scheduler may take to start a worker again.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        launch: StartServer,
        options: Mapping[str, Any],
        *,
        setup_timeout_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._launch = launch
        self._options = options
        self._setup_timeout_s = setup_timeout_s
        self._worker = worker
        self._is_open = False  # whether the first worker has its host
        self._loss: str | None = None  # how the worker ended

    def launch(self) -> tuple[HostedServer, str]:
        """This, and the address of a new server. RuntimeError with its last output when it does not
        start, EngineLostError when there is no worker any more to start it in."""
        try:
            if self._loss is not None:
                self._renew_worker()
            if self._loss is not None or not self._is_open:
                self._open_host()
            address = self._call("start")
        except (WorkerFailedError, WorkerTimeoutError) as error:
            self._loss = str(error)
            raise
        self._loss = None  # only now: a thread that watches must find a server in the host
        return self, address

    def poll(self) -> int | None:
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> int | None:
        code = self._ask("wait", timeout_s)
        return code if self._loss is None else -signal.SIGKILL  # by the kernel, with its parent

    def describe_end(self) -> str:
        return self._ask("describe_end") or f"the server's worker is gone: {self._loss}"

    def terminate(self) -> None:
        self._ask("stop", timeout_s=_STOP_S)

    def _open_host(self) -> None:
        try:
            self._scheduler.create_engine(
                self._worker.id,
                _HOST,
                _NAME,
                self._launch,
                host=self._worker.ip,
                timeout_s=self._setup_timeout_s,
                **self._options,
            )
        except EngineCreationError as error:
            error.__cause__.add_note(str(error))
            raise error.__cause__ from None
        self._is_open = True

    def _renew_worker(self) -> None:
        try:
            self._worker = self._scheduler.replace_worker(self._worker.id, self._setup_timeout_s)
        except WorkerTimeoutError as error:
            raise EngineLostError(f"{self._loss}; {error}") from None

    def _ask(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """The host's answer; None when its worker is gone, which is then known for good."""
        if self._loss is None:
            try:
                return self._call(method, *args, timeout_s=timeout_s)
            except (WorkerFailedError, WorkerTimeoutError) as error:
                self._loss = str(error)
        return None

    def _call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        # A question may have to wait for a launch that another thread has asked for.
        limit_s = timeout_s or self._setup_timeout_s + _MARGIN_S
        try:
            return self._scheduler.call_engine(
                self._worker.id, method, _NAME, *args, timeout_s=limit_s
            )
        except EngineCallError as error:
            raise error.__cause__ from None
