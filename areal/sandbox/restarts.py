"""Restart policy of a worker pool: when the next worker starts after a death, when to give up.

A worker that dies by itself (a crash, `os._exit`) points at the function: such deaths are counted.
One killed from outside (`kill -9`, the OOM killer) points at the machine, whose condition may be
transient: such deaths have a time limit instead.
"""

from __future__ import annotations

import errno
import signal
from dataclasses import dataclass

from areal.utils.child_process import RestartBudget

FIRST_DELAY_S = 0.1  # before the second start in a row; doubles
MAX_DELAY_S = 5.0
GIVE_UP_S = 120.0  # of starts that were killed from outside
KILLS_PER_RETRY = 5  # outside kills a call survives, per retry it has

_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}
_PASSING = {errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT}


def is_from_outside(code: int | None) -> bool:
    """Whether another process ended the one with this exit code."""
    return code is not None and -code in _FROM_OUTSIDE


def is_passing(error: OSError) -> bool:
    """Whether the resource missing to start a process may come back."""
    return error.errno in _PASSING


@dataclass(slots=True)
class Restarts:
    """Times are event-loop times."""

    failed_starts: RestartBudget  # in a row, without a worker that was ready
    _deaths: int = 0  # in a row, without a call that returned
    _not_before: float = 0.0
    _failing_since: float | None = None

    def delay_s(self, now: float) -> float:
        """How long the next start has to wait."""
        return max(0.0, self._not_before - now)

    def on_death(self, now: float) -> None:
        if now < self._not_before:  # one cause may end many workers
            return
        self._deaths += 1
        if self._deaths > 1:
            delay_s = min(FIRST_DELAY_S * 2 ** min(self._deaths - 2, 10), MAX_DELAY_S)
            self._not_before = now + delay_s

    def on_ready(self) -> None:
        self.failed_starts.renew()
        self._failing_since = None

    def on_returned(self) -> None:
        self._deaths = 0

    def on_failed_start(self, now: float, *, from_outside: bool) -> bool:
        """Whether to give up starting workers."""
        if self._failing_since is None:
            self._failing_since = now
        is_spent = not from_outside and not self.failed_starts.spend()
        is_hopeless = is_spent or now - self._failing_since > GIVE_UP_S
        if is_hopeless:
            self.on_ready()  # later calls start with a fresh budget
        return is_hopeless
