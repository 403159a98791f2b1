"""A native server that this process started, and can start again.

    process = ServerProcess(lambda: launch_native_server(path, token=token))
    engine = NativeRemoteEngine([process.address], token, processes=[process])
    ...
    process.close()

It only knows how the process ended and how to start another; whether it is replaced, with which
weights, and what becomes of the requests it had is decided by its client (remote_engine.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from areal.utils.child_process import ChildProcess

_DYING_S = 2.0  # a killed process closes its connections a little before it has ended
_LOOK_S = 0.2  # between two looks whether it still runs


class ServerProcess:
    """`launch` starts a server and returns its process and "host:port" once it answers."""

    def __init__(self, launch: Callable[[], tuple[ChildProcess, str]]) -> None:
        self._launch = launch
        self._child, self.address = launch()
        self._closed = threading.Event()

    def wait_end(self) -> bool:
        """Blocks while it runs: True when it has ended by itself, False when `close` ended it."""
        while not self._closed.wait(_LOOK_S):
            if self._child.poll() is not None:
                return True
        return False

    def describe_end(self) -> str | None:
        """How it ended; None while it runs, or when `close` ended it. To be asked when a connection
        to it was lost: waits a moment for a process that is just ending."""
        if self._closed.is_set() or self._child.wait(_DYING_S) is None:
            return None
        return self._child.describe_end()

    def start_again(self) -> str:
        """The address of the new one. RuntimeError with its last output when it does not start."""
        self._child.terminate()
        child, self.address = self._launch()
        self._child = child
        if self._closed.is_set():
            child.terminate()
        return self.address

    def close(self) -> None:
        self._closed.set()
        self._child.terminate()
