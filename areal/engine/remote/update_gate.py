"""The door that requests pass one by one and that a weight update closes behind them.

    event loop:       version = await gate.enter(timeout_s)   ... one request ...   gate.leave()
    trainer's thread: gate.close();  gate.wait_empty(s);  <new weights>;  gate.open(version)

What was let in under a version has left before the next one loads: every token of a request is
therefore of the version that `enter` returned. `fail` opens the door to an error instead.
"""

from __future__ import annotations

import asyncio
import threading


class UpdateGate:
    def __init__(self) -> None:
        self.version = 0
        self._changed = threading.Condition()
        self._is_open = True
        self._num_inside = 0
        self._failure: str | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    async def enter(self, timeout_s: float) -> int:
        """Waits while the gate is closed; the version that serves. TimeoutError after `timeout_s`.

        RuntimeError when an update has failed: no version serves then.
        """
        async with asyncio.timeout(timeout_s):
            while (waiter := self._pass_or_wait()) is not None:
                try:
                    await waiter
                finally:
                    with self._changed:
                        self._waiters.discard(waiter)
        return self.version

    def leave(self) -> None:
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_open = False

    def wait_empty(self, timeout_s: float) -> bool:
        """Whether everybody left in time. Blocks: not for the event loop."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_inside == 0, timeout_s)

    def open(self, version: int) -> None:
        with self._changed:
            self.version, self._is_open, self._failure = version, True, None
            self._wake_all()

    def fail(self, reason: str) -> None:
        """Whoever comes, or waits, is told `reason`."""
        with self._changed:
            self._is_open, self._failure = True, reason
            self._wake_all()

    def serves(self, version: int) -> bool:
        """Whether requests go in, and `version` is what they get."""
        with self._changed:
            return self._is_open and self.version == version

    def _pass_or_wait(self) -> asyncio.Future[None] | None:
        """None: the caller is in. Else what to wait for before it may try again."""
        with self._changed:
            if self._failure is not None:
                raise RuntimeError(self._failure)
            if self._is_open:
                self._num_inside += 1
                return None
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            return waiter

    def _wake_all(self) -> None:
        for waiter in self._waiters:
            waiter.get_loop().call_soon_threadsafe(_wake, waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
