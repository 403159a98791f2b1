"""Inference servers that this process had started, and starts again when they die.

    process = ServerProcess(lambda: launch_native_server(path, token=token))
    seats = ServerSeats([process.address], [process], max_restarts=3)
    ...                                                # a connection to `address` was lost
    address = seats.replace(address, prepare)          # the same one, unless the process is gone
    process.close()

Only the ways to end and to start are known here; the child may be one of this process, or of a
worker on another machine (server_host.py). `prepare` makes a new server what the dead one was
(its weights, whether it is paused); what becomes of the requests it had is up to its client.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from areal.api.engine_api import EngineLostError
from areal.utils import logging
from areal.utils.waits import waiting

logger = logging.getLogger("ServerProcess")

_DYING_S = 2.0  # a killed process closes its connections a little before it has ended
_LOOK_S = 0.5  # between two looks whether it still runs


class Child(Protocol):
    """The process of a server: `ChildProcess`, or one that a worker holds."""

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


class ServerSeats:
    """The places of a client's servers, each taken by one process after another.

    `processes` are in the order of `addresses`; without them nobody is replaced, nor is a server
    that has no seat. `max_restarts` bounds the replacements between two calls of `renew_restarts`.
    A copy in another process replaces nobody.
    """

    def __init__(
        self, addresses: Sequence[str], processes: Sequence[ServerProcess], *, max_restarts: int
    ) -> None:
        self.addresses = list(addresses)
        self.num_restarts = 0
        self._processes = processes
        self._max_restarts = max_restarts
        self._num_recent = 0
        self._why_not: str | None = None
        self._replaced: dict[str, str] = {}  # address of a dead server -> of the one in its seat
        self._lock = threading.Lock()  # guards all above

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_processes": (), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def renew_restarts(self) -> None:
        """The servers have come so far: as many deaths as before are forgiven from here on."""
        with self._lock:
            self._num_recent = 0

    def forbid_restarts(self, reason: str | None) -> None:
        """From here on a server that dies is lost, for this reason; None: it is replaced again."""
        with self._lock:
            self._why_not = reason

    def has_ended(self, address: str) -> bool:
        """Whether the process behind `address` is gone; `replace` may be under way. False for a
        server that is not ours. To be asked when a connection to it was lost."""
        if not self._processes or address not in self.addresses:
            return address in self._replaced
        ended = self._processes[self.addresses.index(address)].describe_end() is not None
        return ended or address in self._replaced

    def replace(self, address: str, prepare: Callable[[int, str], None]) -> str:
        """The address of the server in the seat of `address`; the same one while that runs.

        `prepare(seat, address)` has a new server to itself; a RuntimeError of it means that the
        server is no good. EngineLostError, with how the last one ended, when there were too many.
        """
        with self._lock:
            if address in self._replaced:  # whoever lost a connection first has seen to it
                return self._replaced[address]
            if not self._processes or address not in self.addresses:
                return address
            seat = self.addresses.index(address)
            end = self._processes[seat].describe_end()
            if end is None:
                return address
            with waiting(f"the replacement of the server {address}"):
                self.addresses[seat] = self._fill(seat, end, prepare)
            self._replaced.pop(self.addresses[seat], None)  # a port may come again
            self._replaced[address] = self.addresses[seat]
            return self.addresses[seat]

    def _fill(self, seat: int, end: str, prepare: Callable[[int, str], None]) -> str:
        if self._why_not is not None:
            raise EngineLostError(f"{end}; it cannot be replaced: {self._why_not}")
        while self._num_recent < self._max_restarts:
            self._num_recent += 1
            self.num_restarts += 1
            logger.warning("%s; starting another", end)
            try:
                address = self._processes[seat].start_again()
                prepare(seat, address)
                return address
            except EngineLostError:  # there is no place left to start it
                raise
            except RuntimeError as error:  # it did not start, or died again
                end = str(error)
        raise EngineLostError(end)
