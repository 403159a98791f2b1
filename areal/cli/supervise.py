"""Runs the rest of the command in a child process, and starts that again when it dies.

    code = supervise(retries=3, newest_point=...)
    if code is not None:       # the parent: the last child has ended
        return code
    ...                        # the child: train

    parent   waits for: the child             unblocked by: its end
             on SIGINT, SIGTERM: hands them on, and starts nothing any more
    child    a session of its own, so that Ctrl-C reaches it once, through the parent; the kernel
             ends it when the parent dies (Linux)

The fork is taken before torch is loaded: the parent is small, has one thread and opens no device.

    how the child ended            what follows
    0, 2 (user's mistake), 130     the end
    1 (a fault of the world)       started again if it got as far as a new recover point,
                                   unless it said `stay_down()` (utils/restart.py)
    a signal (kill -9, segfault),  started again, `retries` times without a new recover point
    or 1 after `come_again()`
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

from areal.utils import restart

_FORWARDED = (signal.SIGINT, signal.SIGTERM)
_INTERRUPTED = 130
_PR_SET_PDEATHSIG = 1


def supervise(*, retries: int, newest_point: Callable[[], int | None]) -> int | None:
    """None in every child, which is to do the work; in the parent the exit code of the last one.

    `newest_point` is the step of the newest recover point: by it the run is seen to get on.
    """
    strikes = 0
    while True:
        before = newest_point()
        child = _Child()
        if child.is_here:
            return None
        code = child.wait()
        point = newest_point()
        got_on = point != before
        if child.was_told_to_end:
            return _INTERRUPTED
        if code in (0, 2, _INTERRUPTED) or (code > 0 and not _may_come_again(child, got_on)):
            return code
        strikes = 1 if got_on else strikes + 1
        how = _how_it_ended(code)
        if strikes > retries:
            _say(f"error: the training process {how}, {strikes} times without a new recover point")
            return 1
        origin = "the start" if point is None else f"the recover point of step {point + 1}"
        _say(f"the training process {how}; going on from {origin} (restart {strikes} of {retries})")


def _may_come_again(child: _Child, got_on: bool) -> bool:
    """After an exit code that is neither the end nor a mistake."""
    return child.wish == restart.COME_AGAIN or (got_on and child.wish != restart.STAY_DOWN)


class _Child:
    """A fork of this process; `is_here` tells the two apart."""

    def __init__(self) -> None:
        self.was_told_to_end = False
        self.wish = b""  # what it has said
        self._reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent_pid = os.getpid()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        self._pid = os.fork()
        self.is_here = self._pid == 0
        if self.is_here:
            os.close(self._reader)
            restart.answer_to(writer)
            os.setsid()
            _die_with(parent_pid)
        else:
            os.close(writer)
            self._previous = {signum: signal.signal(signum, self._hand_on) for signum in _FORWARDED}
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def wait(self) -> int:
        """Its exit code, negative for the signal that ended it."""
        _, status = os.waitpid(self._pid, 0)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        # Not waiting for the end of the pipe: a process the child has forked may still hold it.
        os.set_blocking(self._reader, False)
        with open(self._reader, "rb", buffering=0) as said:
            self.wish = said.read(1) or b""
        return os.waitstatus_to_exitcode(status)

    def _hand_on(self, signum: int, frame: object) -> None:
        self.was_told_to_end = True
        os.kill(self._pid, signum)


def _die_with(parent_pid: int) -> None:
    """End when that parent does (Linux)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _say(text: str) -> None:
    print(f"areal: {text}", file=sys.stderr, flush=True)
