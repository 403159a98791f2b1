"""CPU time of this process and of all that descend from it, counted by the kernel.

    clock = CpuClock.start(libc)      # None where the kernel does not let this user count
    ...                               # fork, and let the children fork
    clock.of_descendants()            # seconds, also of those whose end nobody waited for

A process whose parent ignores SIGCHLD leaves nothing behind in any other process's usage. A counter
of the kernel (perf) is inherited at each fork, and keeps what an ended process has used.

A program that its user may run but not read sheds the counter, so this is a lower bound: callers
take the larger of it and of what /proc shows.

Standard library only: `session_calls` imports it inside of a session.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from typing import Any

from areal.sandbox.confine import SYSTEM_CALLS

_SOFTWARE, _TASK_CLOCK = 1, 1
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
_ATTRIBUTES = struct.Struct("<IIQQQQQIIQ")  # of `struct perf_event_attr`, its first version
_CLOSE_ON_EXEC = 8
_THIS_PROCESS, _ANY_CPU, _NO_GROUP = 0, -1, -1


class CpuClock:
    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._began = time.process_time()

    @classmethod
    def start(cls, libc: Any) -> CpuClock | None:
        # The clock counts all time; users get it if they ask for none of the kernel's events.
        flags = _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR
        size = _ATTRIBUTES.size
        attributes = _ATTRIBUTES.pack(_SOFTWARE, size, _TASK_CLOCK, 0, 0, 0, flags, 0, 0, 0)
        number = SYSTEM_CALLS[os.uname().machine][1]["perf_event_open"]
        fd = libc.syscall(
            number, attributes, _THIS_PROCESS, _ANY_CPU, _NO_GROUP, ctypes.c_ulong(_CLOSE_ON_EXEC)
        )
        return None if fd < 0 else cls(fd)

    def of_descendants(self) -> float:
        (nanoseconds,) = struct.unpack("<Q", os.read(self._fd, 8))
        return nanoseconds / 1e9 - (time.process_time() - self._began)
