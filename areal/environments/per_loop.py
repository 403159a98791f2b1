"""PerLoop: one thing for all episodes of an event loop, started when the first one needs it.

    server = PerLoop(start, is_usable)
    one = await server.get()          # the same for everybody, until it is not usable any more

Who waits for the start may give up; the start goes on for the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    def __init__(self, start: Callable[[], Awaitable[T]], is_usable: Callable[[T], bool]) -> None:
        self._start = start
        self._is_usable = is_usable
        self._current: dict[asyncio.AbstractEventLoop, asyncio.Future[T]] = {}

    async def get(self) -> T:
        loop = asyncio.get_running_loop()
        started = self._current.get(loop)
        if started is None or (started.done() and not self._is_good(started)):
            started = self._current[loop] = asyncio.ensure_future(self._start())
        return await asyncio.shield(started)

    def _is_good(self, started: asyncio.Future[T]) -> bool:
        if started.cancelled() or started.exception() is not None:
            return False
        return self._is_usable(started.result())
