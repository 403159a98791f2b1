"""What a reward worker does to itself before it loads a user's function; none of it can be undone.

| limit                       | kept by                                                            |
|-----------------------------|--------------------------------------------------------------------|
| memory, size of a file      | resource limits; `watch` and a cgroup see what they miss    |
| processes                   | a seccomp filter (0), else a resource limit and the watch          |
| network                     | the filter: sockets of IP only, or none                            |
| files outside its folders   | Landlock: not written; those of keys and of the run not read       |
| other processes             | Landlock, the filter, no capabilities: no look at their memory or  |
|                             | environment, no signal, no limit, no priority                      |

CPU time and the disk are `watch`'s alone. Only the standard library: `worker` runs
this file by its path.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import runpy
import struct
import sys
from pathlib import Path
from typing import Any

_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_WRITE_FILE, _READ_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 2, 1 << 13, 1 << 14
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 13))  # make and remove entries of any kind
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
_STACK = 8 << 20
_OPEN_FILES = 4096
_READING = "reading the run's folder and keys"
_BY_LANDLOCK = ("writing files", "reading other processes", _READING)
_BY_FILTER = ("starting processes", "shared memory", "reaching other processes")
_BY_THE_WATCH = ("CPU time", "disk space")


def confine(limits: dict[str, Any], folder: str) -> list[str]:
    """Apply `limits`: the fields of ProcessLimits, and `hidden`, paths that it must not read.

    What this system cannot keep is returned; RuntimeError when that is something the user has
    asked for.
    """
    _limit_resources(limits)
    if sys.platform != "linux":
        _insist_on_network(limits, sys.platform)
        return [*_BY_LANDLOCK, *_BY_FILTER, *_BY_THE_WATCH]
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    unkept = _restrict_files(libc, [folder, *limits["writable"]], limits["hidden"])
    _drop_capabilities(libc)
    if not _filter_calls(libc, limits):
        _insist_on_network(limits, f"a {platform.machine()} with this kernel")
        unkept += _BY_FILTER
    return unkept


def _insist_on_network(limits: dict[str, Any], system: str) -> None:
    if not limits["network"]:
        raise RuntimeError(f"limits.network=false cannot be kept on {system}; remove it")


def _limit_resources(limits: dict[str, Any]) -> None:
    memory = int(limits["memory_gb"] * (1 << 30))
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, limits["file_size_mb"] << 20)
    # Not RLIMIT_AS: libraries reserve far more addresses than they ever use.
    _lower(resource.RLIMIT_DATA, memory)
    # A stack is no data to the kernel. Programs make the stacks of threads as large as the limit.
    soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
    _lower(resource.RLIMIT_STACK, memory, soft=_STACK if soft == resource.RLIM_INFINITY else soft)
    # Pipes and sockets hold memory of the kernel, which is nobody's.
    _lower(resource.RLIMIT_NOFILE, _OPEN_FILES, soft=resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if limits["max_processes"] > 0 and sys.platform == "linux":
        _lower(resource.RLIMIT_NPROC, _num_tasks_of_user() + limits["max_processes"])


def _lower(kind: int, wanted: int, *, soft: int | None = None) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(kind, (wanted if soft is None else min(soft, wanted), wanted))


def _num_tasks_of_user() -> int:
    """Threads of this user, which is what the kernel counts."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:  # it has just ended
                continue
    return count


def _drop_capabilities(libc: ctypes.CDLL) -> None:
    header = ctypes.create_string_buffer(struct.pack("<Ii", 0x20080522, 0))
    nothing = ctypes.create_string_buffer(24)
    _check(libc.capset(header, nothing), "capset")


def _restrict_files(libc: ctypes.CDLL, writable: list[str], hidden: list[str]) -> list[str]:
    """Landlock; what it does not keep on this kernel."""
    abi = libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return [*_BY_LANDLOCK]
    on_file = _WRITE_FILE | _READ_FILE | (_TRUNCATE if abi >= 3 else 0)
    rights = on_file | _CHANGE_FOLDER | (_REFER if abi >= 2 else 0)
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if abi >= 6 else 0
    attributes = struct.pack("<QQQ", rights, 0, scoped)[: 24 if abi >= 6 else 8]
    size = ctypes.c_size_t(len(attributes))
    rules = _check(libc.syscall(_LANDLOCK_CREATE, attributes, size, 0), "landlock")

    def allow(path: str, access: int, flags: int = 0) -> None:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
        try:
            rule = struct.pack("<Qi", access, place)
            if libc.syscall(_LANDLOCK_ADD, rules, 1, rule, 0) < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(place)

    for path in [*writable, "/dev/null"]:
        try:
            allow(path, rights if os.path.isdir(path) else on_file)
        except OSError as error:
            raise RuntimeError(f"limits.writable: {path}: {error.strerror}") from None
    readable, is_complete = _all_but(hidden)
    for path in readable:
        with contextlib.suppress(OSError):  # gone by now, or no place for a rule
            allow(path, _READ_FILE, os.O_NOFOLLOW)
    _check(libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock")
    os.close(rules)
    return [] if is_complete else [_READING]


def _all_but(hidden: list[str]) -> tuple[list[str], bool]:
    """Paths that together hold every file outside `hidden`, since Landlock knows no exceptions.

    Beside a hidden path everything is named that is there now; what comes to such a folder later
    cannot be read. False when a folder on the way cannot be listed: then all in it is named.
    """
    there = {os.path.realpath(path) for path in hidden if os.path.exists(path)}
    ways = {str(parent) for path in there for parent in Path(path).parents}
    if not ways:
        return ["/"], True
    named, is_complete = there | ways, True
    readable: list[str] = []
    for folder in sorted(ways - there):
        if any(str(parent) in there for parent in Path(folder).parents):
            continue
        try:
            with os.scandir(folder) as entries:
                # A link would grant what it leads to, which is named where it lies.
                beside = [entry.path for entry in entries if not entry.is_symlink()]
        except OSError:
            is_complete = False
            readable.append(folder)
        else:
            readable += [path for path in beside if path not in named]
    return readable, is_complete


def _filter_calls(libc: ctypes.CDLL, limits: dict[str, Any]) -> bool:
    """seccomp; False without it, and on a machine whose system calls are not listed."""
    listed = runpy.run_path(str(Path(__file__).with_name("syscall_filter.py")))
    parent = os.getppid()
    program = listed["filter_program"](
        platform.machine(),
        limits,
        pid=os.getpid(),
        parent=parent,
        parent_group=os.getpgid(parent),
    )
    if program is None:
        return False
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(head), 0, 0) == 0


def _check(result: int, what: str) -> int:
    if result < 0:
        raise RuntimeError(f"cannot limit this process: {what}: {os.strerror(ctypes.get_errno())}")
    return result
