"""Limits of a sandbox session, and what one is given: files, folders, variables, addresses."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from areal.api.json_text import well_formed
from areal.sandbox.addresses import MAX_ADDRESSES, Address, check_distinct
from areal.sandbox.session_init import WORKSPACE

_MAX_LIMIT = 1 << 31  # far more than any machine has
# Folders that a session has already, or that hold what its processes cannot do without.
_TAKEN = (
    *("/bin", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/sbin", "/sys", "/tmp"),
    *("/usr", "/.areal", WORKSPACE),
)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """The first three hold for one call, over all its processes; `disk_mb` for the session."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_mb: int = 512
    max_processes: int = 64  # processes and threads
    disk_mb: int = 64  # its files; they are kept in memory
    output_bytes: int = 16_384  # of one call, longer output is cut
    python: str = ""  # interpreter for Python code; default: areal's own, without its packages
    readable: tuple[str, ...] = ()  # files and folders to show, read-only, at the same path
    writable: tuple[str, ...] = ()  # more folders of its own, empty at first, as /app
    workdir: str = WORKSPACE  # where commands run: it, or a folder of `writable`
    env: Mapping[str, str] = field(default_factory=dict)  # more variables of commands
    network: tuple[str, ...] = ()  # HOST:PORT or NAME=ADDRESS:PORT that it may connect to

    def __post_init__(self) -> None:
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if one.type in ("int", "float") and not (_is_number(value) and value > 0):
                raise ValueError(f"sandbox.{one.name} must be above 0, got {value!r}")
            if one.type in ("int", "float") and value > _MAX_LIMIT:
                raise ValueError(
                    f"sandbox.{one.name} must be at most {_MAX_LIMIT}, got {value!r:.60}"
                )
            if one.type == "int" and not isinstance(value, int):
                raise ValueError(f"sandbox.{one.name} must be a whole number, got {value!r}")
        for path in (self.python, *self.readable):
            is_text = isinstance(path, str)
            if path != "" and not (is_text and os.path.isabs(path) and os.path.exists(path)):
                raise ValueError(
                    f"sandbox: {path!r} does not exist, or is not an absolute path (keys python "
                    "and readable)"
                )
        self._check_folders()
        for name, value in self.env.items():
            if not isinstance(value, str) or not _is_variable(name, value):
                raise ValueError(f"sandbox.env: {name!r} is not a variable with a text")
        if len(self.network) > MAX_ADDRESSES:
            raise ValueError(
                f"sandbox.network has {len(self.network)} addresses; at most {MAX_ADDRESSES} fit"
            )
        check_distinct(Address.of(entry) for entry in self.network)

    def _check_folders(self) -> None:
        for path in self.writable:
            if not _is_path(path) or path == "/" or any(is_below(path, t) for t in _TAKEN):
                raise ValueError(
                    f"sandbox.writable: {path!r} cannot be a folder of a session's own; expected "
                    f"an absolute path such as /app, not below {', '.join(_TAKEN)}"
                )
        own = (WORKSPACE, *self.writable)
        if not _is_path(self.workdir) or not any(is_below(self.workdir, one) for one in own):
            raise ValueError(
                f"sandbox.workdir: {self.workdir!r} is no folder of the session's own, by its "
                "absolute path without '..'; list it in sandbox.writable"
            )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SessionLimits:
        """From the keys of a config; errors name the key."""
        known = [one.name for one in dataclasses.fields(cls)]
        for key in options:
            if key not in known:
                raise ValueError(f"sandbox.{key}: unknown key; expected one of {', '.join(known)}")
        given = dict(options)
        for key in ("readable", "writable", "network"):
            if not isinstance(given.get(key, ()), list | tuple):
                raise ValueError(f"sandbox.{key}: expected a list, got {given[key]!r}")
            given[key] = tuple(given.get(key, ()))
        if not isinstance(given.get("env", {}), Mapping):
            raise ValueError(f"sandbox.env: expected variables with texts, got {given['env']!r}")
        return cls(**given)


def _is_path(value: object) -> bool:
    """An absolute one without `..`, which a process can be given."""
    if not isinstance(value, str) or "\0" in value or well_formed(value) != value:
        return False
    return os.path.isabs(value) and os.path.normpath(value) == value


def is_below(path: str, folder: str) -> bool:
    """Whether `path` is `folder`, or lies in it."""
    return path == folder or path.startswith(f"{folder}/")


def _is_variable(name: object, value: str) -> bool:
    if not isinstance(name, str) or not name or "=" in name or "\0" in name + value:
        return False
    return well_formed(name + value) == name + value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
