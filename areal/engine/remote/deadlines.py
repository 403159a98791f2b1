"""Time limits of requests, on a clock that stops while servers are unavailable on purpose.

Any thread may stop it:

    deadlines = Deadlines(60.0)
    async with deadlines.limit(): ...      # TimeoutError after 60 seconds of the clock
    deadlines.stop(); deadlines.resume()

A limit entered while the clock is stopped starts with its full time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Deadlines:
    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._lock = threading.Lock()  # guards all below
        self._due: dict[asyncio.Timeout, tuple[asyncio.AbstractEventLoop, float]] = {}
        self._stopped_at: float | None = None
        self._stood_s = 0.0

    def __reduce__(self) -> tuple[type[Deadlines], tuple[float]]:
        """A copy in another process has its own running clock."""
        return Deadlines, (self.timeout_s,)

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        async with asyncio.timeout(None) as scope:
            with self._lock:
                due = self._clock() + self.timeout_s
                self._due[scope] = (asyncio.get_running_loop(), due)
            self._set_alarm(scope)
            try:
                yield
            finally:
                with self._lock:
                    del self._due[scope]

    def stop(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._stopped_at is None:
                self._stopped_at = time.monotonic()
            self._set_alarms()

    def resume(self) -> None:
        with self._lock:
            if self._stopped_at is not None:
                self._stood_s += time.monotonic() - self._stopped_at
                self._stopped_at = None
            self._set_alarms()

    def _clock(self) -> float:
        now = time.monotonic() if self._stopped_at is None else self._stopped_at
        return now - self._stood_s

    def _set_alarms(self) -> None:
        for scope, (events, _) in self._due.items():
            events.call_soon_threadsafe(self._set_alarm, scope)

    def _set_alarm(self, scope: asyncio.Timeout) -> None:
        """Runs on the event loop of `scope`, which may have ended by then."""
        with self._lock:
            if scope not in self._due:
                return
            events, due = self._due[scope]
            left_s = None if self._stopped_at is not None else due - self._clock()
        scope.reschedule(None if left_s is None else events.time() + left_s)
