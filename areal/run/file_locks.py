"""Which processes hold a lock on a file, for errors that name them (Linux; elsewhere nobody is).

Read from /proc: opening the file itself and closing it again would drop the locks this process has.
"""

from __future__ import annotations

import os
from pathlib import Path


def describe_holders(path: Path, first: int = 0, last: int = 0) -> str:
    """`process 4711 (python train.py)`, several in a row, that hold one of the bytes from `first`
    to `last`; nothing when none is known."""
    try:
        inode = path.stat().st_ino
        table = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return ""
    pids = set()
    for line in table:  # 1: POSIX  ADVISORY  READ 4711 fe:01:1234567 120 120
        pid, place, begin, end = line.split()[-4:]
        is_held = "->" not in line  # else it is waited for
        covers = int(begin) <= last and (end == "EOF" or first <= int(end))
        if is_held and covers and int(place.rpartition(":")[2]) == inode:
            pids.add(int(pid))
    pids.discard(os.getpid())
    return " and ".join(f"process {pid}{_command(pid)}" for pid in sorted(pids) if pid > 0)


def _command(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return ""
    text = " ".join(line.decode(errors="replace").split())
    return f" ({text[:80]})" if text else ""
