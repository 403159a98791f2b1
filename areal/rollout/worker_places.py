"""Where the processes of rollout workers are: below this one, or below workers of a scheduler.

    spawn_here(0, logs)       a child of this process, and the socket it listens to
    HostedWorker(...).spawn   a child of a scheduler's worker, on whatever machine that is

The two look the same to `workers.py`. Behind the socket of a hosted one a thread carries the bytes
of both directions, by calls of the scheduler; they travel as they would through a socket.

    carrier of a worker   waits for: bytes from there, a moment at a time
                          unblocked by: them; ends with either end of the connection, or the worker
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from areal.utils.child_process import ChildProcess
from areal.utils.hosted_object import HostedObject, forget_rank

if TYPE_CHECKING:
    from areal.api.scheduler_api import Scheduler, Worker

_MOST_BYTES = 1 << 20  # carried by one call
_LISTEN_S = 0.02  # for answers, before looking again what there is to send
_STOP_S = 15.0


class WorkerProcess(Protocol):
    """What is used of a worker's process, wherever it is."""

    name: str

    @property
    def pid(self) -> int: ...
    def wait(self, timeout_s: float) -> int | None: ...
    def describe_end(self) -> str: ...
    def terminate(self, *, grace_s: float = 5.0) -> object: ...


def spawn_here(index: int, logs: Path | None) -> tuple[ChildProcess, socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        child = ChildProcess(
            [sys.executable, "-m", "areal.rollout.worker_process", str(theirs.fileno())],
            name=f"rollout worker {index}",
            env={"OMP_NUM_THREADS": "1"},
            log_path=None if logs is None else logs / f"rollout_worker{index}.log",
            pass_fds=(theirs.fileno(),),
        )
    return child, ours


class WorkerHost:
    """Lives in a worker of a scheduler, and has the rollout worker for a child."""

    _child: ChildProcess  # of the last start

    def __init__(self, index: int, logs: Path | None) -> None:
        forget_rank()
        self._index = index
        self._logs = logs
        self._num_started = 0
        self._channel: socket.socket | None = None

    def start(self) -> tuple[int, int]:
        """(which start this was, pid); a process that is still there is ended first."""
        self.stop()
        self._child, self._channel = spawn_here(self._index, self._logs)
        self._num_started += 1
        return self._num_started, self._child.pid

    def exchange(self, start: int, data: bytes, listen_s: float) -> bytes | None:
        """Sends `data`, and returns what has come; None when the process of that start is gone."""
        if start != self._num_started or self._channel is None:
            return None
        return _receive(self._channel, listen_s) if _send(self._channel, data) else None

    def wait(self, timeout_s: float) -> int | None:
        return self._child.wait(timeout_s)

    def describe_end(self) -> str:
        return self._child.describe_end()

    def stop(self, grace_s: float = 5.0) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            self._child.terminate(grace_s=grace_s)


class HostedWorker:
    """The rollout worker of one worker of a scheduler; also the process of its last `spawn`."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        index: int,
        logs: Path | None,
        *,
        setup_timeout_s: float,
    ) -> None:
        self.name = f"rollout worker {index}"
        self.pid = 0
        self._host = HostedObject(
            scheduler,
            worker,
            "areal.rollout.worker_places.WorkerHost",
            lambda worker: {"index": index, "logs": logs},
            setup_timeout_s=setup_timeout_s,
        )

    def spawn(self) -> tuple[HostedWorker, socket.socket]:
        """EngineLostError when no machine is left to start it on."""
        start, self.pid = self._host.start("start")
        ours, theirs = socket.socketpair()
        carrier = threading.Thread(
            target=self._carry, args=(theirs, start), name=f"{self.name}-carrier", daemon=True
        )
        carrier.start()
        return self, ours

    def wait(self, timeout_s: float) -> int | None:
        code = self._host.ask("wait", timeout_s)
        return code if self._host.loss is None else -signal.SIGKILL  # with its parent

    def describe_end(self) -> str:
        return self._host.ask("describe_end") or f"{self.name}: {self._host.loss}"

    def terminate(self, *, grace_s: float = 5.0) -> None:
        self._host.ask("stop", grace_s, timeout_s=grace_s + _STOP_S)

    def _carry(self, channel: socket.socket, start: int) -> None:
        with channel:
            while (data := _receive(channel, 0.0)) is not None:
                answer = self._host.ask("exchange", start, data, 0.0 if data else _LISTEN_S)
                if answer is None or not _send(channel, answer):
                    return


def _receive(channel: socket.socket, wait_s: float) -> bytes | None:
    """What came within `wait_s`: nothing perhaps; None when the other end is closed."""
    channel.settimeout(wait_s)
    try:
        return channel.recv(_MOST_BYTES) or None
    except (BlockingIOError, TimeoutError):
        return b""
    except ConnectionError:
        return None
    finally:
        channel.settimeout(None)


def _send(channel: socket.socket, data: bytes) -> bool:
    """Whether the other end is still open."""
    try:
        channel.sendall(data)
    except ConnectionError:
        return False
    return True
