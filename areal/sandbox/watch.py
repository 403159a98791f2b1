"""Usage of sandbox workers, measured from outside: limits that no code in a worker can lift.

In: a worker's process and folder. Out: the first limit it exceeds, as text. The kernel stops a
process at once at the limits it enforces itself (`confine`); the rest is detected here within
about a second, over the worker and all its descendants:

| limit         | why not the kernel alone                                                        |
|---------------|---------------------------------------------------------------------------------|
| CPU time      | RLIMIT_CPU sends a signal that can be ignored, and restarts in each child       |
| memory        | RLIMIT_DATA does not count pages that were made read-only                       |
| processes     | RLIMIT_NPROC does not apply to root                                             |
| disk          | RLIMIT_FSIZE bounds a single file                                               |

`Group` is a cgroup around a worker, where this user may create one:

    group = open_group(limits)      # None where cgroups are not available to this user
    group.add(process.pid)          # before the worker runs user code
    group.kill()                    # the worker and all its descendants
    group.close()

It is nested in our own cgroup; in cgroup v2, where a group with processes has no children, it is a
sibling of ours, unless that would escape a limit on ours. This needs root or a delegated subtree.
It adds to the other limits: all kinds of memory (shared, tmpfs) and root's tasks are counted, and
growth stops at once. Linux only: this file reads /proc.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from areal.api.config.inference import ProcessLimits
from areal.utils.stacks import descendants

MAX_THREADS = 4096  # of one worker and its descendants
MAX_FILES = 50_000  # in its folder
_MAX_PATH = 4000  # the kernel's own limit is slightly higher
_MAX_OPEN_FILES = 10_000
_SLACK = 1.05  # for pages the kernel does not count as data: stacks, rounding
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PREFIX = "areal-reward-"  # of the names of groups
_KILL_ROUNDS = 100
_ENDING_S = 2.0
_NEW_S = 60.0  # a younger empty group may be waiting for its worker


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a worker and its descendants; `memory` is that of the largest process."""

    cpu_s: float
    memory: int
    processes: int  # descendants of the worker
    threads: int
    disk: int
    files: int


def measure(pid: int, folder: str, limits: ProcessLimits) -> Usage | None:
    """None when the process is gone."""
    family = [pid, *descendants(pid)] if limits.max_processes else [pid]
    stats = [stat for stat in map(_read_stat, family) if stat is not None]
    if not stats or stats[0].pid != pid:
        return None
    disk, files = _folder_size(folder)
    for stat in stats:
        disk += _unlinked_size(stat, folder, limits)
    return Usage(
        cpu_s=sum(stat.cpu_s for stat in stats),
        memory=max(stat.memory for stat in stats),
        processes=sum(stat.is_alive for stat in stats) - 1,
        threads=sum(stat.threads for stat in stats),
        disk=disk,
        files=files,
    )


def beyond(usage: Usage, limits: ProcessLimits, cpu_s: float) -> str | None:
    """The exceeded limit; `cpu_s` is the CPU time of the running call."""
    found = [
        (cpu_s, "cpu_seconds", limits.cpu_seconds, "took more CPU time"),
        (usage.memory / _SLACK / (1 << 30), "memory_gb", limits.memory_gb, "took more memory"),
        (usage.processes, "max_processes", limits.max_processes, "started more processes"),
        (usage.disk / (1 << 20), "disk_mb", limits.disk_mb, "kept more in $TMPDIR"),
    ]
    for used, key, limit, text in found:
        if limit is not None and used > limit:
            return f"{text} than limits.{key}={limit:g} allows"
    if usage.threads > MAX_THREADS:
        return f"started more than {MAX_THREADS} threads"
    if usage.files > MAX_FILES:
        return f"kept more than {MAX_FILES} files, or what cannot be looked into, in $TMPDIR"
    return None


def is_alive(pid: int) -> bool:
    stat = _read_stat(pid)
    return stat is not None and stat.is_alive


@dataclass(frozen=True, slots=True)
class _Stat:
    pid: int
    is_alive: bool
    cpu_s: float  # including children it has waited for
    threads: int
    addresses: int  # bytes mapped
    memory: int  # anonymous pages in memory and swap, and shared ones without a file


def _read_stat(pid: int) -> _Stat | None:
    try:
        # A process chooses its own name, which is in brackets and may hold any character.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        text = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return None
    sizes = [_status_bytes(text, key) for key in (b"RssAnon", b"RssShmem", b"VmSwap")]
    return _Stat(
        pid=pid,
        is_alive=fields[0] not in (b"Z", b"X"),
        cpu_s=sum(map(int, fields[11:15])) / _TICKS_PER_S,
        threads=int(fields[17]),
        addresses=int(fields[20]),
        memory=sum(sizes),
    )


def _status_bytes(text: bytes, key: bytes) -> int:
    """`RssAnon:     1234 kB`; a zombie has none."""
    _, found, rest = text.partition(b"\n" + key + b":")
    return int(rest.split(None, 1)[0]) << 10 if found else 0


def _folder_size(folder: str) -> tuple[int, int]:
    """(bytes on disk, entries) below `folder`, which may change meanwhile."""
    size, count, pending = 0, 0, [folder]
    while pending and count <= MAX_FILES:
        path = pending.pop()
        if len(os.fsencode(path)) > _MAX_PATH:
            return size, MAX_FILES + 1
        try:
            with os.scandir(path) as entries:
                for entry in itertools.islice(entries, MAX_FILES + 1 - count):
                    count += 1
                    with contextlib.suppress(FileNotFoundError):  # just removed; count the others
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError:
            return size, MAX_FILES + 1
    return size, count


def _unlinked_size(stat: _Stat, folder: str, limits: ProcessLimits) -> int:
    """Bytes of unlinked files, which take up disk as long as they are open or mapped."""
    size = 0
    with contextlib.suppress(OSError):
        device = os.stat(folder).st_dev
        for name in os.listdir(f"/proc/{stat.pid}/fd")[:_MAX_OPEN_FILES]:
            with contextlib.suppress(OSError):
                found = os.stat(f"/proc/{stat.pid}/fd/{name}")
                if found.st_nlink == 0 and found.st_dev == device:
                    size += found.st_blocks * 512
    if stat.addresses > limits.disk_mb << 20:  # fewer mapped addresses cannot exceed the limit
        size += _unlinked_maps(stat.pid, folder)
    return size


def _unlinked_maps(pid: int, folder: str) -> int:
    size = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as lines:
        for line in lines:
            if line.endswith(" (deleted)\n") and f" {folder}/" in line:
                begin, end = line.split(" ", 1)[0].split("-")
                size += int(end, 16) - int(begin, 16)
    return size


@dataclass(frozen=True, slots=True)
class Group:
    folders: list[Path]  # one; with cgroup v1 one per controller

    def add(self, pid: int) -> None:
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def kill(self) -> None:
        """Kill all processes in the group; those forked meanwhile are found in the next round."""
        for folder in self.folders:
            with contextlib.suppress(OSError):  # cgroup v2 kills in one step, since Linux 5.14
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
        """Remove the group, retrying briefly while its last process exits."""
        for folder in self.folders:
            deadline = time.monotonic() + _ENDING_S
            while not _removed(folder) and time.monotonic() < deadline:
                time.sleep(0.01)


def open_group(limits: ProcessLimits) -> Group | None:
    memory = int(limits.memory_gb * (1 << 30)) * (1 + limits.max_processes)
    values = {
        "memory.max": memory,
        "memory.swap.max": 0,
        "memory.limit_in_bytes": memory,  # cgroup v1
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
    except OSError:  # not permitted
        written = []
    if any(name.startswith("memory.") for name in written):
        return group
    group.close()
    return None


def _places() -> list[Path]:
    """Parent groups of ours: with cgroup v1 those of memory and of pids, else one for both."""
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
    """{controller: folder of this process's group}; cgroup v2 has the key ""."""
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
    """Remove groups left by killed runs; the kernel keeps those that have processes."""
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
