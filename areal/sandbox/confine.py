"""Confinement of a sandbox worker: irreversible limits, applied before it loads user code.

| limit                       | enforced by                                                        |
|-----------------------------|--------------------------------------------------------------------|
| memory, file size           | resource limits; `watch` and a cgroup count what they miss         |
| processes                   | seccomp (0 allowed), else a resource limit and `watch`             |
| network                     | seccomp: IP sockets only, or none                                  |
| files outside its folders   | Landlock: no writes; no reads of key files and of the run's folder |
| other processes             | Landlock, seccomp, no capabilities: no access to their memory or   |
|                             | environment, no signals, limits or priorities                      |

CPU time and disk usage are enforced by `watch` alone. Standard library only: `worker` loads this
file by its path.

The seccomp filter is classic BPF, 8 bytes per instruction:

| result          | for                                                                          |
|-----------------|------------------------------------------------------------------------------|
| EPERM           | access to other processes (memory, signals, limits, priorities), memory that |
|                 | no limit counts, namespaces and mounts, unneeded kernel facilities           |
| ENOSYS          | calls a filter cannot inspect and calls newer than this list, so that        |
|                 | libraries fall back to an older call                                         |
| 0, not executed | sizes of socket buffers; file modes, owners and attributes, which Landlock   |
|                 | does not cover: executed where processes are allowed, as compilers need them |
| by argument     | signals and priorities for itself, threads but no processes, IP sockets,     |
|                 | private memory                                                               |
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable
from typing import Any

_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_WRITE_FILE, _READ_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 2, 1 << 13, 1 << 14
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 13))  # create and remove entries of any kind
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
_STACK = 8 << 20
NO_CORE = 1  # RLIMIT_CORE: at 0 a core is still handed to a program, if the system names one
_OPEN_FILES = 4096
_READING = "reading the run's folder and keys"
_BY_LANDLOCK = ("writing files", "reading other processes", _READING)
_BY_FILTER = ("starting processes", "shared memory", "reaching other processes")
_BY_THE_WATCH = ("CPU time", "disk space")


def confine(limits: dict[str, Any], folder: str) -> list[str]:
    """Apply `limits` (the fields of ProcessLimits, and `hidden`: paths it must not read).

    Returns the limits this system cannot enforce; RuntimeError if the user set one of them.
    """
    _limit_resources(limits)
    if sys.platform != "linux":
        _insist_on_network(limits, sys.platform)
        return [*_BY_LANDLOCK, *_BY_FILTER, *_BY_THE_WATCH]
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    unkept = _restrict_files(libc, [folder, *limits["writable"]], limits["hidden"])
    drop_capabilities(libc)
    if not _filter_calls(libc, limits):
        _insist_on_network(limits, f"a {os.uname().machine} with this kernel")
        unkept += _BY_FILTER
    return unkept


def _insist_on_network(limits: dict[str, Any], system: str) -> None:
    if not limits["network"]:
        raise RuntimeError(f"limits.network=false cannot be kept on {system}; remove it")


def _limit_resources(limits: dict[str, Any]) -> None:
    memory = int(limits["memory_gb"] * (1 << 30))
    _lower(resource.RLIMIT_CORE, NO_CORE)
    _lower(resource.RLIMIT_FSIZE, limits["file_size_mb"] << 20)
    # Not RLIMIT_AS: libraries reserve far more addresses than they ever use.
    _lower(resource.RLIMIT_DATA, memory)
    # RLIMIT_DATA does not count stacks. Thread stacks are allocated as large as the soft limit.
    soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
    _lower(resource.RLIMIT_STACK, memory, soft=_STACK if soft == resource.RLIM_INFINITY else soft)
    # Pipes and sockets hold kernel memory that no process is charged for.
    _lower(resource.RLIMIT_NOFILE, _OPEN_FILES, soft=resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if limits["max_processes"] > 0 and sys.platform == "linux":
        _lower(resource.RLIMIT_NPROC, _num_tasks_of_user() + limits["max_processes"])


def _lower(kind: int, wanted: int, *, soft: int | None = None) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(kind, (wanted if soft is None else min(soft, wanted), wanted))


def _num_tasks_of_user() -> int:
    """Threads of this user: the unit RLIMIT_NPROC counts."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:  # it has just exited
                continue
    return count


def drop_capabilities(libc: ctypes.CDLL) -> None:
    header = ctypes.create_string_buffer(struct.pack("<Ii", 0x20080522, 0))
    nothing = ctypes.create_string_buffer(24)
    _check(libc.capset(header, nothing), "capset")


def _restrict_files(libc: ctypes.CDLL, writable: list[str], hidden: list[str]) -> list[str]:
    """Apply Landlock; returns the limits that this kernel's version does not enforce."""
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
        with contextlib.suppress(OSError):  # removed meanwhile, or of a type that takes no rule
            allow(path, _READ_FILE, os.O_NOFOLLOW)
    _check(libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock")
    os.close(rules)
    return [] if is_complete else [_READING]


def _all_but(hidden: list[str]) -> tuple[list[str], bool]:
    """Paths that together cover every file outside `hidden`: Landlock rules have no exceptions.

    Siblings of a hidden path are listed once, so entries created there later cannot be read. False
    when a parent of a hidden path cannot be listed: then all of it stays readable.
    """
    from pathlib import Path  # imported late: it would delay the start of a session

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
                # A rule on a link would grant its target, which has a rule at its own path.
                beside = [entry.path for entry in entries if not entry.is_symlink()]
        except OSError:
            is_complete = False
            readable.append(folder)
        else:
            readable += [path for path in beside if path not in named]
    return readable, is_complete


def _filter_calls(libc: ctypes.CDLL, limits: dict[str, Any]) -> bool:
    """Install seccomp; False if unsupported or if the architecture's calls are not listed."""
    parent = os.getppid()
    program = filter_program(
        os.uname().machine,
        limits,
        pid=os.getpid(),
        parents=(parent,),
        parent_group=os.getpgid(parent),
    )
    return program is not None and install_filter(libc, program)


def install_filter(libc: ctypes.CDLL, program: bytes) -> bool:
    """For this process and those it starts; needs no_new_privs."""
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(head), 0, 0) == 0


def _check(result: int, what: str) -> int:
    if result < 0:
        raise RuntimeError(f"cannot limit this process: {what}: {os.strerror(ctypes.get_errno())}")
    return result


# call that has a rule -> its numbers on x86_64 and on aarch64
_NUMBERS = {
    **{"clone": (56, 220), "mmap": (9, 222), "socket": (41, 198), "socketpair": (53, 199)},
    **{"setsockopt": (54, 208), "inotify_init1": (294, 26)},
    **{"prctl": (157, 167), "fcntl": (72, 25), "ioctl": (16, 29), "prlimit64": (302, 261)},
    **{"memfd_create": (319, 279), "vmsplice": (278, 75)},
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138)},
    **{"rt_tgsigqueueinfo": (297, 240), "setpriority": (141, 140), "ioprio_set": (251, 30)},
    **{"sched_setparam": (142, 118), "sched_setscheduler": (144, 119)},
    **{"sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "migrate_pages": (256, 238)},
    **{"move_pages": (279, 239)},
    **{"ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271)},
    **{"kcmp": (312, 272)},
    **{"shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190)},
    **{"semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186)},
    **{"msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180)},
    **{"mq_unlink": (241, 181), "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183)},
    **{"mq_notify": (244, 184), "mq_getsetattr": (245, 185)},
    **{"unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39)},
    **{"pivot_root": (155, 41), "chroot": (161, 51), "personality": (135, 92)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    **{"perf_event_open": (298, 241), "bpf": (321, 280), "userfaultfd": (323, 282)},
    **{"fanotify_init": (300, 262)},
    **{"fchmod": (91, 52), "fchmodat": (268, 53), "fchown": (93, 55), "fchownat": (260, 54)},
    **{"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7)},
    **{"removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16)},
}
_ONLY_X86 = {"fork": 57, "vfork": 58, "inotify_init": 253, "chmod": 90, "chown": 92, "lchown": 94}
# architecture -> (its audit id, numbers of the calls that have a rule)
SYSTEM_CALLS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (0xC000003E, {name: on for name, (on, _) in _NUMBERS.items()} | _ONLY_X86),
    "aarch64": (0xC00000B7, {name: on for name, (_, on) in _NUMBERS.items()}),
}
# Calls added since Linux 5.1 have the same number on every architecture.
_EVERYWHERE = {
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "clone3": 435,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "memfd_secret": 447,
    "process_mrelease": 448,
}
# Calls from here on were not reviewed. This also covers x32, the second ABI of x86_64.
_FIRST_UNKNOWN = 452

_REFUSED = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd"),
    *("process_madvise", "process_mrelease", "pidfd_send_signal", "tkill"),
    *("shmget", "shmat", "shmctl", "semget", "semop", "semctl", "semtimedop"),
    *("msgget", "msgsnd", "msgrcv", "msgctl", "mq_open", "mq_unlink", "mq_timedsend"),
    *("mq_timedreceive", "mq_notify", "mq_getsetattr"),
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr", "personality"),
    *("add_key", "request_key", "keyctl", "perf_event_open", "bpf", "userfaultfd"),
    *("fanotify_init", "inotify_init", "inotify_init1"),  # of files that others use, too
)
# clone3's flags are behind a pointer, which a filter cannot read; io_uring issues other calls.
# A pipe that got pages by vmsplice keeps whole huge pages, which are then in no process's memory.
_ABSENT = ("clone3", "io_uring_setup", "memfd_create", "memfd_secret", "vmsplice")
_ABOUT_FILES = (
    *("chmod", "fchmod", "fchmodat", "chown", "fchown", "lchown", "fchownat"),
    *("setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr"),
)
# call -> index of the argument that names the process
_ABOUT_A_PROCESS = {
    **{"prlimit64": 0, "sched_setparam": 0, "sched_setscheduler": 0, "sched_setaffinity": 0},
    **{"sched_setattr": 0, "migrate_pages": 0, "move_pages": 0},
}
_SIGNALS = {"kill": 0, "tgkill": 0, "rt_sigqueueinfo": 0, "rt_tgsigqueueinfo": 0}

_CLONE_THREAD, _CLONE_PARENT = 0x00010000, 0x00008000
_CLONE_NAMESPACES = 0x7E020000
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_GROWSDOWN = 0x01, 0x20, 0x100
_AF_INET, _AF_INET6, _AF_NETLINK = 2, 10, 16  # netlink: glibc queries it for addresses
_SOL_SOCKET, _SO_BUFFERS = 1, (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF, and both by force
_PRIO_PROCESS, _IOPRIO_WHO_PROCESS = 0, 1
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_PR_SET_PTRACER = 0x59616D61
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE, _F_SETPIPE_SZ = 8, 10, 15, 1024, 1031
_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP = 0x5412, 0x541C, 0x8901, 0x8902

_LOAD, _RETURN, _EQUAL, _AT_LEAST, _HAS_BITS = 0x20, 0x06, 0x15, 0x35, 0x45


def _instruction(code: int, yes: int, no: int, value: int) -> bytes:
    return struct.pack("<HBBI", code, yes, no, value)


_ALLOW = _instruction(_RETURN, 0, 0, 0x7FFF0000)
_DONE, _EPERM, _ENOSYS = (_instruction(_RETURN, 0, 0, 0x00050000 | errno) for errno in (0, 1, 38))


def filter_program(
    machine: str, limits: dict[str, Any], *, pid: int, parents: tuple[int, ...], parent_group: int
) -> bytes | None:
    """Filter for process `pid`, child of `parents`; None for an architecture that is not listed."""
    if machine not in SYSTEM_CALLS:
        return None
    audit, numbers = SYSTEM_CALLS[machine]
    numbers = numbers | _EVERYWHERE
    rules = _rules(limits, pid=pid, parents=parents, parent_group=parent_group)
    head = _load(4) + _instruction(_EQUAL, 1, 0, audit) + _EPERM + _load(0)
    known = (_when(_EQUAL, numbers[name], rules[name]) for name in rules if name in numbers)
    return head + b"".join(known) + _when(_AT_LEAST, _FIRST_UNKNOWN, _ENOSYS) + _ALLOW


def _rules(
    limits: dict[str, Any], *, pid: int, parents: tuple[int, ...], parent_group: int
) -> dict[str, bytes]:
    rules = dict.fromkeys(_REFUSED, _EPERM) | dict.fromkeys(_ABSENT, _ENOSYS)
    rules |= {name: _only(index, [0, pid]) for name, index in _ABOUT_A_PROCESS.items()}
    rules["setpriority"] = _one_process(_PRIO_PROCESS, pid)
    rules["ioprio_set"] = _one_process(_IOPRIO_WHO_PROCESS, pid)
    rules["mmap"] = _private_memory()
    rules["prctl"] = _prctl()
    rules["fcntl"] = _none_of(1, [_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE, _F_SETPIPE_SZ])
    rules["ioctl"] = _none_of(1, [_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP])
    rules["socketpair"] = _load_argument(1) + _when(_HAS_BITS, 0xE, _EPERM) + _ALLOW  # a stream
    # Larger ones would hold memory that no limit counts.
    buffers = b"".join(_when(_EQUAL, name, _DONE) for name in _SO_BUFFERS)
    of_sockets = _when(_EQUAL, _SOL_SOCKET, _load_argument(2) + buffers + _ALLOW)
    rules["setsockopt"] = _load_argument(1) + of_sockets + _ALLOW
    families = [_AF_INET, _AF_INET6, _AF_NETLINK] if limits["network"] else []
    rules["socket"] = _only(0, families)
    namespaces = _when(_HAS_BITS, _CLONE_NAMESPACES | _CLONE_PARENT, _EPERM)
    if limits["max_processes"] == 0:
        rules |= dict.fromkeys(("fork", "vfork"), _EPERM) | dict.fromkeys(_ABOUT_FILES, _DONE)
        threads = _when(_HAS_BITS, _CLONE_THREAD, _ALLOW) + _EPERM
        rules["clone"] = _load_argument(0) + namespaces + threads
        rules |= {name: _only(index, [0, pid]) for name, index in _SIGNALS.items()}
    else:
        # A filter does not know its children; Landlock allows signals to them and nowhere else.
        rules["clone"] = _load_argument(0) + namespaces + _ALLOW
        others = [*parents, -1, -parent_group]
        rules |= {name: _none_of(index, others) for name, index in _SIGNALS.items()}
    return rules


def _private_memory() -> bytes:
    """RLIMIT_DATA counts neither shared mappings nor MAP_GROWSDOWN ones."""
    anonymous = _when(_HAS_BITS, _MAP_SHARED, _EPERM) + _ALLOW
    grows = _when(_HAS_BITS, _MAP_GROWSDOWN, _EPERM)
    return _load_argument(3) + grows + _when(_HAS_BITS, _MAP_ANONYMOUS, anonymous) + _ALLOW


def _prctl() -> bytes:
    """Keep the process killable with its parent, and inspectable by it."""
    lost = [_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_PTRACER]
    refused = b"".join(_when(_EQUAL, option, _EPERM) for option in lost)
    dies = _when(_EQUAL, _PR_SET_PDEATHSIG, _only(1, [signal.SIGKILL]))
    return _load_argument(0) + refused + dies + _ALLOW


def _one_process(kind: int, pid: int) -> bytes:
    """For calls that take a kind (process, group, user) and then an id."""
    return _load_argument(0) + _when(_EQUAL, kind, _only(1, [0, pid])) + _EPERM


def _only(argument: int, values: Iterable[int]) -> bytes:
    allowed = b"".join(_when(_EQUAL, value, _ALLOW) for value in values)
    return _load_argument(argument) + allowed + _EPERM


def _none_of(argument: int, values: Iterable[int]) -> bytes:
    refused = b"".join(_when(_EQUAL, value, _EPERM) for value in values)
    return _load_argument(argument) + refused + _ALLOW


def _load_argument(index: int) -> bytes:
    """Its low half: process ids, flags and commands are 32 bits wide in the kernel as well."""
    return _load(16 + 8 * index)


def _load(offset: int) -> bytes:
    return _instruction(_LOAD, 0, 0, offset)


def _when(test: int, value: int, then: bytes) -> bytes:
    return _instruction(test, 0, len(then) // 8, value & 0xFFFFFFFF) + then
