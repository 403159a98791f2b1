"""Where the servers of a run answer now, for copies of its client in other processes.

owner (the controller)      writes: who sits in each seat, again after one died; or why there is
                            nobody any more
copy (a training rank,      reads: when it has lost a connection, until somebody else sits there
a rollout worker)           or the old one answers
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from areal.api.engine_api import EngineLostError
from areal.engine.remote.server_control import ControlClient, ServerError
from areal.utils.fs import atomic_write_text
from areal.utils.waits import waiting

_LOOK_S = 0.1  # between two looks of a copy for the replacement
_ANSWER_S = 5.0  # for a server that is there to say so


class AddressFile:
    """`path` lies where every process of the run can read it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, addresses: Sequence[str | None]) -> None:
        """By seat; None where a server was left out and nobody took its place."""
        self._write({"addresses": list(addresses)})

    def write_loss(self, cause: str) -> None:
        """There is no server any more; whoever asks from now on is told why."""
        self._write({"lost": cause})

    def read(self) -> list[str | None]:
        """EngineLostError when the owner has given up."""
        found = json.loads(self._path.read_text(encoding="utf-8"))
        if "lost" in found:
            raise EngineLostError(found["lost"])
        return found["addresses"]

    def _write(self, content: dict[str, object]) -> None:
        # It means nothing to another run, so it need not survive a power failure.
        atomic_write_text(self._path, json.dumps(content), durable=False)


class FollowedSeats:
    """The seats (../server_process.py) as a copy of the client has them: it starts nobody, and
    waits up to `timeout_s` for the owner, which sees the end of a process too."""

    num_restarts = 0  # the owner counts them

    def __init__(
        self, addresses: Sequence[str], token: str, file: AddressFile, *, timeout_s: float
    ) -> None:
        self.addresses: list[str | None] = list(addresses)
        self._token = token
        self._file = file
        self._timeout_s = timeout_s
        self._replaced: dict[str, str | None] = {}
        self._lock = threading.Lock()  # guards all above

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def renew_restarts(self) -> None:
        """The owner's matter."""

    def has_ended(self, address: str) -> bool:
        return address in self._replaced or (
            address in self.addresses and not self._answers(address)
        )

    def replace(self, address: str, prepare: Callable[[int, str], None]) -> str | None:
        """Who sits where `address` sat; None when the owner has left that server out."""
        with self._lock:
            if address in self._replaced:
                return self._replaced[address]
            if address not in self.addresses:
                return address
            seat = self.addresses.index(address)
            with waiting(f"the replacement of the server {address}"):
                found = self._wait_for_owner(seat, address)
            if found != address:
                if found is not None:
                    self._replaced.pop(found, None)  # a port may come again
                self._replaced[address] = self.addresses[seat] = found
            return found

    def _wait_for_owner(self, seat: int, address: str) -> str | None:
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            found = self._file.read()[seat]
            if found != address or self._answers(address):
                return found
            time.sleep(_LOOK_S)
        limit = f"{self._timeout_s:g} s (rollout.setup_timeout)"
        raise ServerError(f"native server {address}: no replacement within {limit}")

    def _answers(self, address: str) -> bool:
        return ControlClient(address, self._token, timeout_s=_ANSWER_S).is_there(_ANSWER_S)
