"""The system calls of a confined process, as a seccomp filter: classic BPF, 8 bytes an instruction.

| answer          | to                                                                           |
|-----------------|------------------------------------------------------------------------------|
| EPERM           | reaching into other processes (memory, signals, limits, priorities), memory  |
|                 | that no limit counts, namespaces and mounts, kernel facilities nobody needs  |
| ENOSYS          | calls a filter cannot see into and calls newer than this list, so that       |
|                 | libraries take an older one                                                  |
| 0, not done     | modes, owners and attributes of files, which Landlock does not cover; where  |
|                 | processes are allowed they are changed, since compilers need it              |
| by its argument | a signal or a priority for itself, threads but no processes, a socket of IP, |
|                 | private memory                                                               |

Only the standard library: `confine` runs this file by its path.
"""

from __future__ import annotations

import signal
import struct
from collections.abc import Iterable
from typing import Any

# machine -> (its name for the kernel's audit, numbers of the calls that have a rule)
SYSTEM_CALLS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {"fork": 57, "vfork": 58, "clone": 56, "mmap": 9, "socket": 41, "socketpair": 53}
        | {"prctl": 157, "fcntl": 72, "ioctl": 16, "prlimit64": 302, "memfd_create": 319}
        | {"kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129}
        | {"rt_tgsigqueueinfo": 297, "setpriority": 141, "ioprio_set": 251}
        | {"sched_setparam": 142, "sched_setscheduler": 144, "sched_setaffinity": 203}
        | {"sched_setattr": 314, "migrate_pages": 256, "move_pages": 279}
        | {"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312}
        | {"shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "semop": 65, "semctl": 66}
        | {"semtimedop": 220, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71}
        | {"mq_open": 240, "mq_unlink": 241, "mq_timedsend": 242, "mq_timedreceive": 243}
        | {"mq_notify": 244, "mq_getsetattr": 245}
        | {"unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155}
        | {"chroot": 161, "personality": 135, "add_key": 248, "request_key": 249, "keyctl": 250}
        | {"perf_event_open": 298, "bpf": 321, "userfaultfd": 323, "fanotify_init": 300}
        | {"chmod": 90, "fchmod": 91, "fchmodat": 268, "chown": 92, "fchown": 93, "lchown": 94}
        | {"fchownat": 260}
        | {"setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197}
        | {"lremovexattr": 198, "fremovexattr": 199},
    ),
    "aarch64": (
        0xC00000B7,
        {"clone": 220, "mmap": 222, "socket": 198, "socketpair": 199}
        | {"prctl": 167, "fcntl": 25, "ioctl": 29, "prlimit64": 261, "memfd_create": 279}
        | {"kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138}
        | {"rt_tgsigqueueinfo": 240, "setpriority": 140, "ioprio_set": 30}
        | {"sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122}
        | {"sched_setattr": 274, "migrate_pages": 238, "move_pages": 239}
        | {"ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272}
        | {"shmget": 194, "shmat": 196, "shmctl": 195, "semget": 190, "semop": 193, "semctl": 191}
        | {"semtimedop": 192, "msgget": 186, "msgsnd": 189, "msgrcv": 188, "msgctl": 187}
        | {"mq_open": 180, "mq_unlink": 181, "mq_timedsend": 182, "mq_timedreceive": 183}
        | {"mq_notify": 184, "mq_getsetattr": 185}
        | {"unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41}
        | {"chroot": 51, "personality": 92, "add_key": 217, "request_key": 218, "keyctl": 219}
        | {"perf_event_open": 241, "bpf": 280, "userfaultfd": 282, "fanotify_init": 262}
        | {"fchmod": 52, "fchmodat": 53, "fchown": 55, "fchownat": 54}
        | {"setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14}
        | {"lremovexattr": 15, "fremovexattr": 16},
    ),
}
# Since 5.1 every machine has the same numbers.
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
# From here on nobody has looked at what they can do. Also x32, a second set for x86_64.
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
    "fanotify_init",
)
# clone3 keeps its flags behind a pointer, where a filter cannot look; io_uring makes other calls.
_ABSENT = ("clone3", "io_uring_setup", "memfd_create", "memfd_secret")
_ABOUT_FILES = (
    *("chmod", "fchmod", "fchmodat", "chown", "fchown", "lchown", "fchownat"),
    *("setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr"),
)
# call -> which argument is the process
_ABOUT_A_PROCESS = {
    **{"prlimit64": 0, "sched_setparam": 0, "sched_setscheduler": 0, "sched_setaffinity": 0},
    **{"sched_setattr": 0, "migrate_pages": 0, "move_pages": 0},
}
_SIGNALS = {"kill": 0, "tgkill": 0, "rt_sigqueueinfo": 0, "rt_tgsigqueueinfo": 0}

_CLONE_THREAD, _CLONE_PARENT = 0x00010000, 0x00008000
_CLONE_NAMESPACES = 0x7E020000
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_GROWSDOWN = 0x01, 0x20, 0x100
_AF_INET, _AF_INET6, _AF_NETLINK = 2, 10, 16  # the last one: glibc asks it for addresses
_PRIO_PROCESS, _IOPRIO_WHO_PROCESS = 0, 1
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_PR_SET_PTRACER = 0x59616D61
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE = 8, 10, 15, 1024
_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP = 0x5412, 0x541C, 0x8901, 0x8902

_LOAD, _RETURN, _EQUAL, _AT_LEAST, _HAS_BITS = 0x20, 0x06, 0x15, 0x35, 0x45


def _instruction(code: int, yes: int, no: int, value: int) -> bytes:
    return struct.pack("<HBBI", code, yes, no, value)


_ALLOW = _instruction(_RETURN, 0, 0, 0x7FFF0000)
_DONE, _EPERM, _ENOSYS = (_instruction(_RETURN, 0, 0, 0x00050000 | errno) for errno in (0, 1, 38))


def filter_program(
    machine: str, limits: dict[str, Any], *, pid: int, parent: int, parent_group: int
) -> bytes | None:
    """The filter of process `pid`, child of `parent`; None for a machine that is not listed."""
    if machine not in SYSTEM_CALLS:
        return None
    audit, numbers = SYSTEM_CALLS[machine]
    numbers = numbers | _EVERYWHERE
    rules = _rules(limits, pid=pid, parent=parent, parent_group=parent_group)
    head = _load(4) + _instruction(_EQUAL, 1, 0, audit) + _EPERM + _load(0)
    known = (_when(_EQUAL, numbers[name], rules[name]) for name in rules if name in numbers)
    return head + b"".join(known) + _when(_AT_LEAST, _FIRST_UNKNOWN, _ENOSYS) + _ALLOW


def _rules(limits: dict[str, Any], *, pid: int, parent: int, parent_group: int) -> dict[str, bytes]:
    rules = dict.fromkeys(_REFUSED, _EPERM) | dict.fromkeys(_ABSENT, _ENOSYS)
    rules |= {name: _only(index, [0, pid]) for name, index in _ABOUT_A_PROCESS.items()}
    rules["setpriority"] = _one_process(_PRIO_PROCESS, pid)
    rules["ioprio_set"] = _one_process(_IOPRIO_WHO_PROCESS, pid)
    rules["mmap"] = _private_memory()
    rules["prctl"] = _prctl()
    rules["fcntl"] = _none_of(1, [_F_SETOWN, _F_SETSIG, _F_SETOWN_EX, _F_SETLEASE])
    rules["ioctl"] = _none_of(1, [_TIOCSTI, _TIOCLINUX, _FIOSETOWN, _SIOCSPGRP])
    rules["socketpair"] = _load_argument(1) + _when(_HAS_BITS, 0xE, _EPERM) + _ALLOW  # a stream
    families = [_AF_INET, _AF_INET6, _AF_NETLINK] if limits["network"] else []
    rules["socket"] = _only(0, families)
    namespaces = _when(_HAS_BITS, _CLONE_NAMESPACES | _CLONE_PARENT, _EPERM)
    if limits["max_processes"] == 0:
        rules |= dict.fromkeys(("fork", "vfork"), _EPERM) | dict.fromkeys(_ABOUT_FILES, _DONE)
        threads = _when(_HAS_BITS, _CLONE_THREAD, _ALLOW) + _EPERM
        rules["clone"] = _load_argument(0) + namespaces + threads
        rules |= {name: _only(index, [0, pid]) for name, index in _SIGNALS.items()}
    else:
        # Its children are known to Landlock only, which lets signals go to them and nowhere else.
        rules["clone"] = _load_argument(0) + namespaces + _ALLOW
        others = [parent, -1, -parent_group]
        rules |= {name: _none_of(index, others) for name, index in _SIGNALS.items()}
    return rules


def _private_memory() -> bytes:
    """RLIMIT_DATA counts neither shared memory nor what grows like a stack."""
    anonymous = _when(_HAS_BITS, _MAP_SHARED, _EPERM) + _ALLOW
    grows = _when(_HAS_BITS, _MAP_GROWSDOWN, _EPERM)
    return _load_argument(3) + grows + _when(_HAS_BITS, _MAP_ANONYMOUS, anonymous) + _ALLOW


def _prctl() -> bytes:
    """It stays killable with its parent, and visible to it."""
    lost = [_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_PTRACER]
    refused = b"".join(_when(_EQUAL, option, _EPERM) for option in lost)
    dies = _when(_EQUAL, _PR_SET_PDEATHSIG, _only(1, [signal.SIGKILL]))
    return _load_argument(0) + refused + dies + _ALLOW


def _one_process(kind: int, pid: int) -> bytes:
    """For calls that name a kind (process, group, user) and then which one."""
    return _load_argument(0) + _when(_EQUAL, kind, _only(1, [0, pid])) + _EPERM


def _only(argument: int, values: Iterable[int]) -> bytes:
    allowed = b"".join(_when(_EQUAL, value, _ALLOW) for value in values)
    return _load_argument(argument) + allowed + _EPERM


def _none_of(argument: int, values: Iterable[int]) -> bytes:
    refused = b"".join(_when(_EQUAL, value, _EPERM) for value in values)
    return _load_argument(argument) + refused + _ALLOW


def _load_argument(index: int) -> bytes:
    """Its low half: process ids, flags and commands are 32 bits wide in the kernel, too."""
    return _load(16 + 8 * index)


def _load(offset: int) -> bytes:
    return _instruction(_LOAD, 0, 0, offset)


def _when(test: int, value: int, then: bytes) -> bytes:
    return _instruction(test, 0, len(then) // 8, value & 0xFFFFFFFF) + then
