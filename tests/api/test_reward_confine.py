"""The filter of system calls, run by a small interpreter of its language, for both machines."""

from __future__ import annotations

import struct

import pytest

from areal.api.reward_confine import _EVERYWHERE, _SYSTEM_CALLS, _program

OPEN = {"max_processes": 3, "network": True}
SHUT = {"max_processes": 0, "network": False}
ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026


def verdict(program, arch, number, first_argument=0):
    """What the kernel would answer: classic BPF over `struct seccomp_data`."""
    data = struct.pack("<iIQQ", number, arch, 0, first_argument) + bytes(40)
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


@pytest.mark.parametrize("machine", _SYSTEM_CALLS)
def test_verdicts(machine):
    arch, numbers = _SYSTEM_CALLS[machine]
    numbers = numbers | _EVERYWHERE
    shut, free = _program(arch, numbers, SHUT), _program(arch, numbers, OPEN)
    for name in ("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd"):
        assert verdict(shut, arch, numbers[name]) == verdict(free, arch, numbers[name]) == EPERM
    for name in {"socket", "io_uring_setup", "fork", "vfork"} & numbers.keys():
        assert verdict(shut, arch, numbers[name]) == EPERM
        assert verdict(free, arch, numbers[name]) == ALLOW
    assert verdict(shut, arch, numbers["clone3"]) == ENOSYS
    assert verdict(free, arch, numbers["clone3"]) == ALLOW
    a_thread = 0x3D0F00  # as pthread_create asks for one
    assert verdict(shut, arch, numbers["clone"], a_thread) == ALLOW
    assert verdict(shut, arch, numbers["clone"], 17) == EPERM  # fork()
    assert verdict(free, arch, numbers["clone"], 17) == ALLOW
    known = set(numbers.values())
    for other in set(range(500)) - known:
        assert verdict(shut, arch, other) == ALLOW
    assert verdict(shut, arch ^ 1, numbers["socket"]) == EPERM  # another set of calls


def test_the_second_numbers_of_x86_are_shut():
    arch, numbers = _SYSTEM_CALLS["x86_64"]
    program = _program(arch, numbers | _EVERYWHERE, SHUT)
    assert verdict(program, arch, 0x40000000 + numbers["socket"]) == EPERM
