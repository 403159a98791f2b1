"""What a reward worker does to itself before it loads a user's function; none of it can be undone.

| limit                        | kept by                                                           |
|------------------------------|-------------------------------------------------------------------|
| memory, CPU, file size       | resource limits                                                   |
| processes                    | a seccomp filter (0), else a resource limit                       |
| network                      | the same filter: no socket can be opened                          |
| files outside its folders    | Landlock: read, not written                                       |
| other processes' memory      | Landlock, the filter, no capabilities: nobody else's environment, |
|                              | memory or, on newer kernels, signals                              |

Only the standard library: `reward_worker` runs this file by its path.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import resource
import struct
import sys
from typing import Any

_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_EPERM, _ENOSYS = 1, 38

# machine -> (its name for the kernel's audit, numbers of the system calls below)
_SYSTEM_CALLS = {
    "x86_64": (
        0xC000003E,
        {"clone": 56, "fork": 57, "vfork": 58, "socket": 41, "ptrace": 101}
        | {"process_vm_readv": 310, "process_vm_writev": 311},
    ),
    "aarch64": (
        0xC00000B7,
        {"clone": 220, "socket": 198, "ptrace": 117}
        | {"process_vm_readv": 270, "process_vm_writev": 271},
    ),
}
_EVERYWHERE = {"clone3": 435, "io_uring_setup": 425, "pidfd_getfd": 438}
_SPYING = ("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd")
_X32_CALLS = 0x40000000  # a second set of numbers for the same calls on x86_64
_CLONE_THREAD = 0x00010000

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 13))  # make and remove entries of any kind
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
_BY_LANDLOCK = ("writing files", "reading other processes")


def confine(limits: dict[str, Any], folder: str) -> list[str]:
    """Apply `limits` (the fields of ProcessLimits); what this system cannot keep is returned.

    RuntimeError when that is something the user has asked for.
    """
    _limit_resources(limits)
    if sys.platform != "linux":
        if not limits["network"]:
            raise RuntimeError(f"limits.network=false cannot be kept on {sys.platform}; remove it")
        return [*_BY_LANDLOCK, "starting processes"]
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    is_restricted = _restrict_writes(libc, [folder, *limits["writable"]])
    unkept = [] if is_restricted else [*_BY_LANDLOCK]
    if os.geteuid() == 0:
        _drop_capabilities(libc)
    if not _filter_calls(libc, limits):
        if not limits["network"]:
            raise RuntimeError(
                f"limits.network=false cannot be kept on a {platform.machine()}; remove it"
            )
        unkept.append("starting processes")
    return unkept


def limit_cpu(seconds: float) -> None:
    """From now on, counted over all threads; the kernel then ends the process by SIGXCPU."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    total = math.ceil(used.ru_utime + used.ru_stime + seconds)
    _lower(resource.RLIMIT_CPU, max(total, 1), keep_hard=True)


def _limit_resources(limits: dict[str, Any]) -> None:
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, limits["file_size_mb"] << 20)
    # Not RLIMIT_AS: libraries reserve far more addresses than they ever use.
    _lower(resource.RLIMIT_DATA, int(limits["memory_gb"] * (1 << 30)))
    if limits["max_processes"] > 0 and sys.platform == "linux":
        _lower(resource.RLIMIT_NPROC, _num_tasks_of_user() + limits["max_processes"])


def _lower(kind: int, wanted: int, *, keep_hard: bool = False) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(kind, (wanted, hard if keep_hard else wanted))


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


def _restrict_writes(libc: ctypes.CDLL, folders: list[str]) -> bool:
    """Landlock; False on a kernel that has none."""
    abi = libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if abi < 1:
        return False
    on_file = _WRITE_FILE | (_TRUNCATE if abi >= 3 else 0)
    rights = on_file | _CHANGE_FOLDER | (_REFER if abi >= 2 else 0)
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if abi >= 6 else 0
    attributes = struct.pack("<QQQ", rights, 0, scoped)[: 24 if abi >= 6 else 8]
    size = ctypes.c_size_t(len(attributes))
    rules = _check(libc.syscall(_LANDLOCK_CREATE, attributes, size, 0), "landlock")
    for path in [*folders, "/dev/null"]:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(f"limits.writable: {path}: {error.strerror}") from None
        rule = struct.pack("<Qi", rights if os.path.isdir(path) else on_file, place)
        _check(libc.syscall(_LANDLOCK_ADD, rules, 1, rule, 0), f"landlock, {path}")
        os.close(place)
    _check(libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock")
    os.close(rules)
    return True


def _filter_calls(libc: ctypes.CDLL, limits: dict[str, Any]) -> bool:
    """seccomp; False on a machine whose system calls are not listed here."""
    if platform.machine() not in _SYSTEM_CALLS:
        return False
    audit, numbers = _SYSTEM_CALLS[platform.machine()]
    program = _program(audit, numbers | _EVERYWHERE, limits)
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    done = libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(head), 0, 0)
    _check(done, "seccomp")
    return True


def _program(audit: int, numbers: dict[str, int], limits: dict[str, Any]) -> bytes:
    """The filter in the kernel's own small language: 8 bytes per instruction."""

    def load(offset: int) -> bytes:
        return struct.pack("<HBBI", 0x20, 0, 0, offset)

    def answer(errno: int) -> bytes:
        return struct.pack("<HBBI", 0x06, 0, 0, 0x00050000 | errno if errno else 0x7FFF0000)

    def when(test: int, value: int, then: bytes) -> bytes:
        return struct.pack("<HBBI", test, 0, len(then) // 8, value) + then

    equal, at_least, has_bits = 0x15, 0x35, 0x45
    refused = [*_SPYING]
    if not limits["network"]:
        refused += ["socket", "io_uring_setup"]  # the latter opens sockets too
    if limits["max_processes"] == 0:
        refused += [name for name in ("fork", "vfork") if name in numbers]
    program = load(4) + struct.pack("<HBBI", equal, 1, 0, audit) + answer(_EPERM) + load(0)
    if "fork" in numbers:
        program += when(at_least, _X32_CALLS, answer(_EPERM))
    program += b"".join(when(equal, numbers[name], answer(_EPERM)) for name in refused)
    if limits["max_processes"] == 0:
        # Its flags lie behind a pointer, where a filter cannot look: glibc then takes clone.
        program += when(equal, numbers["clone3"], answer(_ENOSYS))
        threads_only = load(16) + when(has_bits, _CLONE_THREAD, answer(0)) + answer(_EPERM)
        program += when(equal, numbers["clone"], threads_only)
    return program + answer(0)


def _check(result: int, what: str) -> int:
    if result < 0:
        raise RuntimeError(f"cannot limit this process: {what}: {os.strerror(ctypes.get_errno())}")
    return result
