"""Which servers for agents a run has: one file each in the run's folder `agents/`.

    entry = Entry.of(proxy_id, url, key)
    entry.write(folder)                      # while the proxy listens
    read_entries(folder)                     # the router, `areal agents`

The files are private, like the folder: the key in one opens the routes of its proxy that sessions
have no key for. A proxy that was killed leaves its file behind; the next start removes it. Loads no
HTTP server.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from areal.utils.fs import atomic_write_text, private_folder

ID_LENGTH = 8  # of a proxy; ids of its sessions begin with it


@dataclass(frozen=True, slots=True)
class Entry:
    """A proxy of this run: where it listens, and the key of its own routes."""

    id: str
    url: str
    key: str
    pid: int
    machine: str

    @classmethod
    def of(cls, proxy_id: str, url: str, key: str) -> Entry:
        return cls(proxy_id, url, key, os.getpid(), socket.gethostname())

    def write(self, folder: Path) -> None:
        private_folder(folder)
        atomic_write_text(self._file(folder), json.dumps(asdict(self)), durable=False)

    def remove(self, folder: Path) -> None:
        self._file(folder).unlink(missing_ok=True)

    def _file(self, folder: Path) -> Path:
        return folder / f"{self.id}.json"


def read_entries(folder: Path) -> list[Entry]:
    """Of the proxies that run, and of those that were killed."""
    entries: list[Entry] = []
    for file in sorted(folder.glob("*.json")):
        with contextlib.suppress(FileNotFoundError):  # ended since
            entries.append(Entry(**json.loads(file.read_text())))
    return entries


def session_id_of(key: str) -> str:
    """The public part of a session's key."""
    return key.removeprefix("sk-areal-").partition("-")[0]
