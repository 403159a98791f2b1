"""A program whose descendants all end with it, and with the process that started it (Linux).

    python -I -S guarded_program.py PARENT_PID '["PROGRAM", ...]'

For programs of others, which start processes of their own: an inference engine that ignores SIGTERM
while it computes, or is in a session of its own, would keep its GPU and its port. This process
stays the parent of the program, and orphans of the program become its children.

    the program ends               all its descendants are killed; this process ends as it did
    SIGTERM, or PARENT_PID died    SIGTERM to the program; after a grace period all are killed
    this process is killed         the kernel kills the program

The command is one word of JSON, so that a search for processes by words finds the program only.
Runs without areal's packages on its path: it imports the standard library only, and little of it.
"""

import ctypes
import json
import os
import signal
import sys
import time

GRACE_S = 5.0  # from SIGTERM to SIGKILL
_REAP_S = 10.0  # a killed process may hang in a driver of the kernel
_AWAITED = (signal.SIGCHLD, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36


def main(parent_pid: int, argv: list[str]) -> None:
    # Blocked and waited for: handlers could run in the wrong moment, or one within another, as the
    # kernel tells of each thread of a dead parent. SIGUSR1 would end this process.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would never come
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [*_AWAITED, signal.SIGUSR1])
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    program = os.fork()
    if program == 0:
        _become(argv, guard, old_mask)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # it died before prctl
        os.kill(guard, signal.SIGTERM)
    status = _wait_for(program)
    _kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # as it ended, but without a second core dump
        _prctl(_PR_SET_DUMPABLE, 0)
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(guard, -code)
        time.sleep(_REAP_S)  # the signal is on its way
    os._exit(code if code >= 0 else 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, int(value))


def _become(argv: list[str], guard: int, mask: set[int]) -> None:
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == guard:  # else it died before prctl
            os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error}\n")
    finally:
        os._exit(127)


def _wait_for(program: int) -> int:
    """Its status; passes SIGTERM on, and kills it after the grace period."""
    deadline = None
    while True:
        pid = 1
        while pid:
            pid, status = os.waitpid(-1, os.WNOHANG)  # also orphans of the program
            if pid == program:
                return status
        if deadline is None:
            number = signal.sigwait(_AWAITED)
        else:
            got = signal.sigtimedwait(_AWAITED, max(deadline - time.monotonic(), 0.0))
            number = signal.SIGKILL if got is None else got.si_signo
        if number == signal.SIGCHLD:
            continue
        os.kill(program, number)  # still a process of ours, if only a dead one
        if number == signal.SIGKILL:
            deadline = None
        elif deadline is None:
            deadline = time.monotonic() + GRACE_S


def _kill_descendants() -> None:
    """Those of a killed process become children of this one, so that none is missed."""
    deadline = time.monotonic() + _REAP_S
    try:
        while time.monotonic() < deadline:
            for pid in _descendants():
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:  # it has just ended
                    continue
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
            time.sleep(0.005)
    except ChildProcessError:  # none is left
        return


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        children.setdefault(parent, []).append(int(name))
    found = list(children.get(os.getpid(), ()))
    for pid in found:
        found += children.get(pid, ())
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
