"""Limits of a sandbox session, and what may be read inside of one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float") and not (_is_number(value) and value > 0):
                raise ValueError(f"sandbox.{field.name} must be above 0, got {value!r}")
        for path in (self.python, *self.readable):
            if path and not (os.path.isabs(path) and os.path.exists(path)):
                raise ValueError(
                    f"sandbox: {path!r} does not exist, or is not an absolute path (keys python "
                    "and readable)"
                )

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> SessionLimits:
        """From the keys of a config; errors name the key."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in options:
            if key not in known:
                raise ValueError(f"sandbox.{key}: unknown key; expected one of {', '.join(known)}")
        given = dict(options)
        if "readable" in given:
            given["readable"] = tuple(given["readable"])
        return cls(**given)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
