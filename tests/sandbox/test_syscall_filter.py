"""The filter of system calls, run by a small interpreter of its language, for both machines."""

from __future__ import annotations

import struct

import pytest

from areal.sandbox.confine import _EVERYWHERE, SYSTEM_CALLS, filter_program

OPEN = {"max_processes": 3, "network": True}
SHUT = {"max_processes": 0, "network": False}
ALLOW, NOT_DONE, EPERM, ENOSYS = 0x7FFF0000, 0x00050000, 0x00050001, 0x00050026
PID, PARENT, GROUP, STRANGER = 4321, 1234, 1200, 777
MINUS_ONE = (1 << 64) - 1
A_THREAD = 0x3D0F00  # as pthread_create asks for one


def verdict(program, arch, number, *arguments):
    """What the kernel would answer: classic BPF over `struct seccomp_data`."""
    data = struct.pack("<iIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    at = accumulator = 0
    while True:
        code, yes, no, value = struct.unpack_from("<HBBI", program, 8 * at)
        at += 1
        if code == 0x20:  # load
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:  # return
            return value
        else:
            jumps = {
                0x15: accumulator == value,
                0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }
            at += yes if jumps[code] else no


@pytest.fixture(params=SYSTEM_CALLS)
def ask(request):
    """ask(limits, name or number, *arguments) -> the answer of a worker's filter."""
    arch, numbers = SYSTEM_CALLS[request.param]
    numbers = numbers | _EVERYWHERE

    def ask(limits, call, *arguments, arch=arch):
        program = filter_program(
            request.param, limits, pid=PID, parents=(1, PARENT), parent_group=GROUP
        )
        assert len(program) // 8 < 4096  # what the kernel takes
        number = numbers.get(call, -1) if isinstance(call, str) else call
        return verdict(program, arch, number, *arguments)

    ask.numbers = numbers
    ask.arch = arch
    return ask


@pytest.mark.parametrize("limits", [OPEN, SHUT], ids=["open", "shut"])
def test_what_is_never_allowed(ask, limits):
    for name in ("ptrace", "process_vm_readv", "pidfd_getfd", "pidfd_send_signal", "tkill"):
        assert ask(limits, name) == EPERM
    for name in ("shmget", "msgget", "mq_open", "unshare", "mount", "fsopen", "keyctl", "bpf"):
        assert ask(limits, name) == EPERM
    for name in ("clone3", "io_uring_setup", "memfd_create", "vmsplice"):
        assert ask(limits, name) == ENOSYS
    for number in (452, 463, 469, 600, 0x40000000 + 41):  # later than the list; x32
        assert ask(limits, number) == ENOSYS
    assert ask(limits, 0, arch=ask.arch ^ 1) == EPERM  # another set of calls


@pytest.mark.parametrize("limits", [OPEN, SHUT], ids=["open", "shut"])
def test_a_process_may_change_itself_alone(ask, limits):
    for name in ("prlimit64", "sched_setaffinity", "sched_setscheduler", "move_pages"):
        for pid, answer in ((0, ALLOW), (PID, ALLOW), (PARENT, EPERM), (STRANGER, EPERM)):
            assert ask(limits, name, pid) == answer
    assert ask(limits, "setpriority", 0, 0) == ask(limits, "ioprio_set", 1, PID) == ALLOW
    assert ask(limits, "setpriority", 0, PARENT) == ask(limits, "ioprio_set", 1, PARENT) == EPERM
    assert ask(limits, "setpriority", 2, 0) == ask(limits, "ioprio_set", 3, 0) == EPERM  # a user
    assert ask(limits, "prctl", 15) == ALLOW  # PR_SET_NAME
    assert ask(limits, "prctl", 1, 9) == ALLOW
    for dangerous in ((1, 0), (1, 18), (4, 0), (36, 0)):
        assert ask(limits, "prctl", *dangerous) == EPERM
    for command in (8, 10, 15, 1024, 1031):
        assert ask(limits, "fcntl", 3, command) == EPERM
    assert ask(limits, "fcntl", 3, 6) == ask(limits, "ioctl", 1, 0x5413) == ALLOW
    assert ask(limits, "ioctl", 1, 0x5412) == EPERM


def test_signals(ask):
    for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
        assert ask(SHUT, name, PID) == ask(SHUT, name, 0) == ALLOW
        for other in (PARENT, STRANGER, MINUS_ONE, (1 << 64) - GROUP):
            assert ask(SHUT, name, other) == EPERM
        assert ask(OPEN, name, STRANGER) == ALLOW  # may be a child of its own
        for other in (PARENT, MINUS_ONE, (1 << 64) - GROUP):
            assert ask(OPEN, name, other) == EPERM


def test_processes_and_threads(ask):
    for name in {"fork", "vfork"} & ask.numbers.keys():
        assert (ask(SHUT, name), ask(OPEN, name)) == (EPERM, ALLOW)
    assert ask(SHUT, "clone", A_THREAD) == ask(OPEN, "clone", A_THREAD) == ALLOW
    assert (ask(SHUT, "clone", 17), ask(OPEN, "clone", 17)) == (EPERM, ALLOW)
    for flags in (0x10000000, 0x20000, 0x40000000, 0x8000):  # new user, mounts, network; sibling
        assert ask(OPEN, "clone", flags | 17) == ask(SHUT, "clone", flags | A_THREAD) == EPERM


@pytest.mark.parametrize("limits", [OPEN, SHUT], ids=["open", "shut"])
def test_memory_is_private(ask, limits):
    def mapped(flags):
        return ask(limits, "mmap", 0, 1 << 20, 3, flags)

    assert mapped(0x22) == mapped(0x20022) == mapped(0x01) == mapped(0x02) == ALLOW
    assert mapped(0x21) == mapped(0x23) == mapped(0x122) == EPERM


def test_sockets(ask):
    for family in (2, 10, 16):
        assert (ask(OPEN, "socket", family), ask(SHUT, "socket", family)) == (ALLOW, EPERM)
    for family in (1, 17, 38, 40):
        assert ask(OPEN, "socket", family) == EPERM
    for limits in (OPEN, SHUT):
        assert ask(limits, "socketpair", 1, 0x80001) == ALLOW
        assert ask(limits, "socketpair", 1, 2) == ask(limits, "socketpair", 1, 5) == EPERM


@pytest.mark.parametrize("limits", [OPEN, SHUT], ids=["open", "shut"])
def test_buffers_of_sockets_keep_their_size(ask, limits):
    for option in (7, 8, 32, 33):
        assert ask(limits, "setsockopt", 3, 1, option) == NOT_DONE
    assert ask(limits, "setsockopt", 3, 1, 2) == ask(limits, "setsockopt", 3, 6, 7) == ALLOW
    for name in {"inotify_init", "inotify_init1"} & ask.numbers.keys():
        assert ask(limits, name) == EPERM


def test_modes_of_files_are_left_as_they_are(ask):
    for name in ("fchmod", "fchmodat", "fchown", "fchownat", "setxattr", "fremovexattr"):
        assert (ask(SHUT, name), ask(OPEN, name)) == (NOT_DONE, ALLOW)


def test_all_other_calls_are_allowed(ask):
    for number in set(range(452)) - set(ask.numbers.values()):
        assert ask(SHUT, number) == ALLOW


def test_a_machine_that_is_not_listed_has_no_filter():
    assert filter_program("riscv64", SHUT, pid=PID, parents=(1, PARENT), parent_group=GROUP) is None
