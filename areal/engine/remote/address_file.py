"""The file in which the owner of a server pool tells copies of the client about the servers.

owner (controller)   writes: address of each lost server -> its replacement, or none; servers
                     that joined, and those that drain; or why there is no server any more
copy (rank, worker)  reads: before it sends, when the file has changed; after a lost connection,
                     until the server is in the file or answers again
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from areal.api.engine_api import EngineLostError
from areal.engine.remote.server_control import ControlClient, ServerError
from areal.utils.fs import atomic_write_text

ANSWER_S = 5.0  # timeout of a copy's health probe
_LOOK_S = 0.1  # poll interval of a copy


class AddressFile:
    """`path` must be readable by every process of the run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def stamp(self) -> tuple[int, int]:
        """Differs once the file was written again. OSError if there is none."""
        status = self._path.stat()
        return status.st_mtime_ns, status.st_ino

    def write(self, told: dict[str, Any]) -> None:
        # No other run reads it, so it need not survive a power failure.
        atomic_write_text(self._path, json.dumps(told), durable=False)

    def read(self) -> dict[str, Any]:
        """EngineLostError if no server is left."""
        told = json.loads(self._path.read_text(encoding="utf-8"))
        if told["loss"] is not None:
            raise EngineLostError(told["loss"])
        return told

    def wait_for_news(self, lost: ControlClient, timeout_s: float) -> str | None:
        """The address of what replaced a server, None if it was dropped, its own if it answers
        again. ServerError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            moved = self.read()["moved"]
            if lost.address in moved:
                return follow(moved, lost.address)
            if lost.is_there(ANSWER_S):
                return lost.address
            time.sleep(_LOOK_S)
        limit = f"{timeout_s:g} s (rollout.setup_timeout)"
        raise ServerError(f"{lost.kind} {lost.address}: no replacement within {limit}")


def follow(moved: dict[str, str | None], address: str) -> str | None:
    """Where the server at `address` is now; None if it was dropped."""
    found: str | None = address
    while found is not None and found in moved:
        found = moved[found]
    return found
