"""A control group around a reward worker, where this user may make one.

    group = open_group(limits)      # None where there are no groups for us
    group.add(process.pid)          # before the worker gets to the user's code
    group.kill()                    # whatever it started, wherever that hid
    group.close()

It lies inside our own group; in version 2 of cgroups, where one that has processes has no groups
inside, beside ours, unless a limit on ours would be escaped. That needs root, or a subtree that was
delegated to the user. What it adds to other limits: memory of every kind (also shared, also files
in memory) and the tasks of root are counted, too, and growth stops at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from areal.api.config.limits import ProcessLimits
from areal.sandbox.watch import MAX_THREADS

_PREFIX = "areal-reward-"
_KILL_ROUNDS = 100
_ENDING_S = 2.0
_NEW_S = 60.0  # one that is empty may be waiting for its worker


@dataclass(frozen=True, slots=True)
class Group:
    folders: list[Path]  # one, or in version 1 one for each controller

    def add(self, pid: int) -> None:
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def kill(self) -> None:
        """All processes in it; those that are forked meanwhile are found in the next round."""
        for folder in self.folders:
            with contextlib.suppress(OSError):  # version 2 does it in one step, since 5.14
                if (folder / "cgroup.kill").exists():
                    (folder / "cgroup.kill").write_text("1")
        for _ in range(_KILL_ROUNDS):
            found = {pid for folder in self.folders for pid in _processes(folder)}
            for pid in found:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not found:
                return

    def was_out_of_memory(self) -> bool:
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    lines = (folder / name).read_text().splitlines()
                    return any(line.startswith("oom_kill ") and line[9:] != "0" for line in lines)
        return False

    def close(self) -> None:
        """Removes it, in a moment when its last process is just ending."""
        for folder in self.folders:
            deadline = time.monotonic() + _ENDING_S
            while not _removed(folder) and time.monotonic() < deadline:
                time.sleep(0.01)


def open_group(limits: ProcessLimits) -> Group | None:
    memory = int(limits.memory_gb * (1 << 30)) * (1 + limits.max_processes)
    values = {
        "memory.max": memory,
        "memory.swap.max": 0,
        "memory.limit_in_bytes": memory,  # version 1
        "memory.memsw.limit_in_bytes": memory,
        "pids.max": MAX_THREADS + limits.max_processes,
    }
    group, written = Group([]), list[str]()
    try:
        for place in _places():
            _remove_empty(place)
            folder = place / f"{_PREFIX}{secrets.token_hex(8)}"
            folder.mkdir(mode=0o700)
            group.folders.append(folder)
            known = [name for name in values if (folder / name).exists()]
            for name in known:
                (folder / name).write_text(str(values[name]))
            written += known
    except OSError:  # not for us
        written = []
    if any(name.startswith("memory.") for name in written):
        return group
    group.close()
    return None


def _places() -> list[Path]:
    """The groups in which ours is made: for version 1 of memory and of pids, else of both."""
    own = _own_groups()
    if "memory" in own:
        return [own[name] for name in ("memory", "pids") if name in own]
    if "" not in own:
        return []
    group = own[""]
    if "memory" in (group / "cgroup.subtree_control").read_text().split():
        return [group]
    files = [group / name for name in ("memory.max", "memory.high", "cpu.max")]
    is_unlimited = all(file.read_text().startswith("max") for file in files if file.exists())
    return [group.parent] if is_unlimited else []


def _own_groups() -> dict[str, Path]:
    """{controller: folder of this process's group}; that of version 2 is under ""."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    paths: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    groups: dict[str, Path] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, mount = line.partition(" - ")
        root, point = fields.split()[3:5]
        kind, _, options = mount.split()[:3]
        known = [""] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        for name in known:
            if name in paths and Path(paths[name]).is_relative_to(root):
                groups[name] = Path(point) / Path(paths[name]).relative_to(root)
    return groups


def _remove_empty(place: Path) -> None:
    """Groups of runs that were killed; the kernel keeps those that have processes."""
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _NEW_S:
                folder.rmdir()


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError as error:
        return error.errno != errno.EBUSY
    return True


def _processes(folder: Path) -> list[int]:
    try:
        return [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []
