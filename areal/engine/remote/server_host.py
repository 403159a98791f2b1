"""Inference servers in the workers of a scheduler, on whatever machines those are.

    here                                     worker of role `rollout`, on its machine
    HostedServer  -- Scheduler.call_engine ->  ServerHost  -- launch ->  the server, its child

    hosted = HostedServer(scheduler, worker, launch_native_server, {"token": ...}, ...)
    process = ServerProcess(hosted.launch)   # as if the server were a child of this process

A worker takes its server with it when it ends; `launch` then asks for another worker first.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from areal.api.redact import remember_secret
from areal.utils.hosted_object import HostedObject, forget_rank

if TYPE_CHECKING:
    from areal.api.scheduler_api import Scheduler, Worker
    from areal.utils.child_process import ChildProcess

StartServer = Callable[..., "tuple[ChildProcess, str]"]

_STOP_S = 15.0


class ServerHost:
    """Lives in a worker. `launch` is a function of a module, which starts a server there and
    returns its process and "host:port" once it answers."""

    def __init__(self, launch: StartServer, *, token: str, **options: Any) -> None:
        remember_secret(token)
        forget_rank()
        self._launch = partial(launch, token=token, **options)
        self._child: ChildProcess | None = None

    def start(self) -> str:
        """The address of a new server; one that is still there is ended first."""
        self.stop()
        self._child, address = self._launch()
        return address

    def wait(self, timeout_s: float) -> int | None:
        return self._started.wait(timeout_s)

    def describe_end(self) -> str:
        return self._started.describe_end()

    @property
    def _started(self) -> ChildProcess:
        if self._child is None:
            raise RuntimeError("no server was started here: call start first")
        return self._child

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
        self._host = HostedObject(
            scheduler,
            worker,
            "areal.engine.remote.server_host.ServerHost",
            lambda worker: {"launch": launch, "host": worker.ip, **options},
            setup_timeout_s=setup_timeout_s,
        )

    def launch(self) -> tuple[HostedServer, str]:
        """This, and the address of a new server. RuntimeError with its last output when it does not
        start, EngineLostError when there is no worker any more to start it in."""
        return self, self._host.start("start")

    def poll(self) -> int | None:
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> int | None:
        code = self._host.ask("wait", timeout_s)
        return code if self._host.loss is None else -signal.SIGKILL  # with its parent

    def describe_end(self) -> str:
        end = self._host.ask("describe_end")
        return end or f"the server's worker is gone: {self._host.loss}"

    def terminate(self) -> None:
        self._host.ask("stop", timeout_s=_STOP_S)
