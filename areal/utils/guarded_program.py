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
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36


def main(parent_pid: int, argv: list[str]) -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    program = os.fork()
    if program == 0:
        _become(argv, guard)

    def end(*_: object) -> None:
        os.kill(program, signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    signal.signal(signal.SIGALRM, lambda *_: os.kill(program, signal.SIGKILL))
    signal.signal(signal.SIGTERM, end)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # it died before prctl
        end()
    status = _wait_for(program)
    for number in (signal.SIGTERM, signal.SIGALRM):  # `program` is no process of ours any more
        signal.signal(number, signal.SIG_IGN)
    _kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # as it ended, but without a second core dump
        _prctl(_PR_SET_DUMPABLE, 0)
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(guard, -code)
        time.sleep(_REAP_S)  # the signal is on its way
    os._exit(code if code >= 0 else 1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, int(value))


def _become(argv: list[str], guard: int) -> None:
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == guard:  # else it died before prctl
            os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error}\n")
    finally:
        os._exit(127)


def _wait_for(program: int) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)  # also orphans of the program
        if pid == program:
            return status


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
