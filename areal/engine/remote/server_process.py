"""Processes of inference servers: launch, restart, and hosting in scheduler workers.

    process = ServerProcess(lambda: launch_native_server(path, token=token))
    process.describe_end()      # after a lost connection: None while it runs
    process.start_again()       # the new address
    process.close()

`launch_server` starts a stock server with the interpreter of its own environment, isolated from the
packages of this process, on a port chosen here, and waits until it answers. What such a server
starts itself (the engine of vLLM is a process of its own) ends with it, and with this process.

`HostedServer` runs a server in a scheduler worker, possibly on another machine:

    here                                     worker of role `rollout`, on its machine
    HostedServer  -- Scheduler.call_engine ->  ServerHost  -- launch ->  the server, its child

    hosted = HostedServer(scheduler, worker, launch_native_server, {"token": ...}, ...)
    process = ServerProcess(hosted.launch)   # as if the server were a child of this process

A server ends with its worker; `launch` then requests another worker first.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from areal.api.config.inference_servers import command_line
from areal.api.engine_api import EngineLostError
from areal.api.redact import remember_secret
from areal.engine.remote.server_control import ControlClient
from areal.utils.addresses import free_port
from areal.utils.child_process import ChildProcess
from areal.utils.hosted_object import HostedObject, clear_rank_env

if TYPE_CHECKING:
    from areal.api.scheduler_api import Scheduler, Worker

_DYING_S = 2.0  # a killed process closes its connections shortly before it ends
_LOOK_S = 0.5  # poll interval
_ASK_S = 5.0  # the same of a hosted server: a remote call. A lost request looks at once (`wait`)
_PROBE_S = 5.0  # timeout of one readiness probe
_STOP_S = 15.0

StartServer = Callable[..., tuple[ChildProcess, str]]


class Child(Protocol):
    """The process of a server: `ChildProcess`, or `HostedServer`."""

    def poll(self) -> int | None: ...

    def wait(self, timeout_s: float) -> int | None: ...

    def describe_end(self) -> str: ...

    def terminate(self) -> object: ...


Launch = Callable[[], tuple[Child, str]]


class ServerProcess:
    """`launch` starts a server and returns its process and "host:port" once it answers."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._child, self.address = launch()
        self._closed = threading.Event()

    def wait_end(self) -> bool:
        """Blocks until it ends: True if by itself, False if by `close`."""
        while not self._closed.wait(_LOOK_S):
            if self._child.poll() is not None:
                return True
        return False

    def describe_end(self) -> str | None:
        """How it ended; None while it runs, or if `close` ended it. Call after a lost connection:
        waits a moment for a process that is just ending."""
        if self._closed.is_set() or self._child.wait(_DYING_S) is None:
            return None
        return self._child.describe_end()

    def start_again(self) -> str:
        """The new address. RuntimeError with its last output if it does not start."""
        self._child.terminate()
        child, self.address = self._launch()
        self._child = child
        if self._closed.is_set():
            child.terminate()
        return self.address

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        self._closed.set()
        self._child.terminate()


class Restarts:
    """How often each server of a pool may be started again, and how often all were."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        # Since the last weight update, or batch that was scored.
        self._num_recent: Counter[ServerProcess] = Counter()
        self.num_all = 0
        self.forbidden: str | None = None  # why none may be

    def spend(self, process: ServerProcess, end: str) -> None:
        """One more. EngineLostError says how the last server ended if there is none left."""
        self.refuse_if_forbidden(end)
        if self._num_recent[process] >= self._max_restarts:
            raise EngineLostError(end)
        self._num_recent[process] += 1
        self.num_all += 1

    def refuse_if_forbidden(self, end: str) -> None:
        if self.forbidden is not None:
            raise EngineLostError(f"{end}; it cannot be replaced: {self.forbidden}")

    def renew(self) -> None:
        self._num_recent.clear()


def launch_server(
    kind: str,
    command: Sequence[str],
    options: Mapping[str, Any],
    extra_args: Sequence[str],
    *,
    env: Mapping[str, str],
    token: str,
    gpus: Sequence[str] | None,
    host: str,
    log_path: str | Path | None,
    setup_timeout_s: float,
) -> tuple[ChildProcess, str]:
    """(the child, its "host:port"). `options` as in `command_line`, before `extra_args`.

    RuntimeError with its last output if it exits or is not ready in time; it is then terminated.
    """
    port = free_port(host)
    argv = [*command, "--host", host, "--port", str(port), *command_line(options), *extra_args]
    own = {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", **env}
    if gpus is not None:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    child = ChildProcess(argv, name=kind, env=own, log_path=log_path, is_guarded=True)
    address = f"{host}:{port}"
    control = ControlClient(address, token, timeout_s=_PROBE_S, kind=kind)
    try:
        child.wait_until(control.is_healthy, timeout_s=setup_timeout_s)
    except BaseException:  # also Ctrl-C: a half-started server must not stay
        child.terminate()
        raise
    return child, address


class ServerHost:
    """Runs in a worker. `launch` is a module-level function that starts a server there and returns
    its process and "host:port" once it answers."""

    def __init__(self, launch: StartServer, *, token: str, **options: Any) -> None:
        remember_secret(token)
        clear_rank_env()
        self._launch = partial(launch, token=token, **options)
        self._child: ChildProcess | None = None

    def start(self) -> str:
        """The address of a new server; a previous one is terminated first."""
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
    """The server of one worker, with the interface of `Child`.

    `options` are arguments of `launch`, besides the `host` to listen on. `setup_timeout_s` bounds
    `launch` in the worker, and the restart of a worker by the scheduler.
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
            "areal.engine.remote.server_process.ServerHost",
            lambda worker: {"launch": launch, "host": worker.ip, **options},
            setup_timeout_s=setup_timeout_s,
        )
        self._next_look = 0.0  # time.monotonic()

    def launch(self) -> tuple[HostedServer, str]:
        """Self, and the address of a new server. RuntimeError with its last output if it does not
        start, EngineLostError if no worker is left."""
        return self, self._host.start("start")

    def poll(self) -> int | None:
        """Looks every few seconds only, and is None in between: a look is a remote call, and the
        watchers of a fleet share one process with its client."""
        if time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + _ASK_S
        return self.wait(0.0)

    def wait(self, timeout_s: float) -> int | None:
        code = self._host.ask("wait", timeout_s)
        return code if self._host.loss is None else -signal.SIGKILL  # killed with its worker

    def describe_end(self) -> str:
        end = self._host.ask("describe_end")
        return end or f"the server's worker is gone: {self._host.loss}"

    def terminate(self) -> None:
        self._host.ask("stop", timeout_s=_STOP_S)
