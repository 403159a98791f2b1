"""Where the servers of a run answer now, for copies of its client in other processes.

owner (the controller)      writes: the addresses, again after a server was replaced; or why
                            there will be none any more
copy (a training rank,      reads: when it has lost a connection, until there is another
a rollout worker)           address, or the old one answers
"""

from __future__ import annotations

import json
from pathlib import Path

from areal.api.engine_api import EngineLostError
from areal.utils.fs import atomic_write_text


class AddressFile:
    """`path` lies where every process of the run can read it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, addresses: list[str]) -> None:
        self._write({"addresses": addresses})

    def write_loss(self, cause: str) -> None:
        """There is no server any more; whoever asks from now on is told why."""
        self._write({"lost": cause})

    def read(self) -> list[str]:
        """EngineLostError when the owner has given up."""
        found = json.loads(self._path.read_text(encoding="utf-8"))
        if "lost" in found:
            raise EngineLostError(found["lost"])
        return found["addresses"]

    def _write(self, content: dict[str, object]) -> None:
        # It means nothing to another run, so it need not survive a power failure.
        atomic_write_text(self._path, json.dumps(content), durable=False)
