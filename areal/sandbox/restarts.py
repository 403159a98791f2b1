"""When a pool starts its next reward worker after others have died, and when it gives up.

A worker that dies by itself (a crash, `os._exit`) tells something about the function; one that is
killed from outside (`kill -9`, the out-of-memory killer) tells something about the machine, which
may pass. So the first is counted, and the second has time.
"""

from __future__ import annotations

import errno
import signal
from dataclasses import dataclass

FIRST_DELAY_S = 0.1  # before the second start in a row; doubles
MAX_DELAY_S = 5.0
GIVE_UP_S = 120.0  # of starts that something outside ends
KILLS_PER_RETRY = 5  # how often a call may be interrupted from outside, per retry it has

_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}
_PASSING = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT}


def is_from_outside(code: int | None) -> bool:
    """Whether a process with this exit code was ended by somebody else."""
    return code is not None and -code in _FROM_OUTSIDE


def is_passing(error: OSError) -> bool:
    """Whether what is missing to start a process may come back."""
    return error.errno in _PASSING


@dataclass(slots=True)
class Restarts:
    """Times are those of the event loop."""

    max_failed_starts: int
    _deaths: int = 0  # in a row, without a call that returned
    _not_before: float = 0.0
    _failed_starts: int = 0  # in a row, without a worker that was ready
    _failing_since: float | None = None

    def delay_s(self, now: float) -> float:
        """How long the next start must wait."""
        return max(0.0, self._not_before - now)

    def on_death(self, now: float) -> None:
        if now < self._not_before:  # one blow may end many workers
            return
        self._deaths += 1
        if self._deaths > 1:
            delay_s = min(FIRST_DELAY_S * 2 ** min(self._deaths - 2, 10), MAX_DELAY_S)
            self._not_before = now + delay_s

    def on_ready(self) -> None:
        self._failed_starts, self._failing_since = 0, None

    def on_returned(self) -> None:
        self._deaths = 0

    def on_failed_start(self, now: float, *, from_outside: bool) -> bool:
        """Whether there is no hope of another one."""
        if self._failing_since is None:
            self._failing_since = now
        if not from_outside:
            self._failed_starts += 1
        is_hopeless = (
            self._failed_starts > self.max_failed_starts or now - self._failing_since > GIVE_UP_S
        )
        if is_hopeless:
            self.on_ready()  # calls that come later have another chance
        return is_hopeless
