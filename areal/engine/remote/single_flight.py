"""Work that is done once for all who need it: the first starts it, the others wait for the same.

In: a key and what to do. Out: its result, to everyone. It goes on when one who waits is cancelled.
Used on one event loop: there is no lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any


class SharedWork:
    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[Any]] = {}

    def start(
        self, key: Hashable, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any
    ) -> asyncio.Task[Any]:
        """Begins `work(*args)`, unless the one of this key still runs."""
        if key not in self._tasks:
            task = self._tasks[key] = asyncio.create_task(work(*args), name=str(key))
            task.add_done_callback(lambda _: self._tasks.pop(key))
            # Whoever waits gets the exception; when nobody does, asyncio shall not complain.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._tasks[key]

    async def do(
        self, key: Hashable, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any
    ) -> Any:
        """What `work(*args)` returns or raises."""
        return await asyncio.shield(self.start(key, work, *args))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
