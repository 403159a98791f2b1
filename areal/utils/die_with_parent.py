"""The kernel kills a process when its parent dies, even by `kill -9` (Linux; a no-op elsewhere).

    die_with(parent_pid)                                    in a fork of the parent
    python -I -S die_with_parent.py PARENT_PID PROGRAM ...  becomes the program: the rule outlives
                                                            exec

As a program it keeps the time between fork and exec empty: there, a child of a multi-threaded
process can hang or crash in the handlers of its libraries. Imports little, as it delays each start.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def die_with(parent_pid: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent_pid:  # it died before prctl
        os._exit(1)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
