"""What the engine says to one HTTP request, brought from its thread to the event loop.

    async with Receiver(engine_loop, receive) as receiver:
        receiver.submit(requests)
        while receiver.unfinished and (results := await receiver.next()) is not None:
            ...

The engine thread never waits: it hands results over once per step, and they queue here. When the
block is left, for whatever reason, requests that have not ended are discarded; a client that goes
away ends the wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from areal.engine.native.loop import EngineLoop
from areal.engine.native.sequence import GenRequest, Progress
from areal.engine.native.wire import Refusal, Reply

Result = Reply | Refusal | Progress


class Receiver:
    def __init__(self, engine: EngineLoop, receive: Any) -> None:
        """`receive` is that of ASGI, after the body was read."""
        self._engine = engine
        self._receive = receive
        self._events = asyncio.get_running_loop()
        # Bounded by the number of tokens, plus one None when the client has left.
        self._results: asyncio.Queue[Sequence[Result] | None] = asyncio.Queue()
        self.unfinished: set[str] = set()  # rids whose Reply or Refusal `next` has not returned

    async def __aenter__(self) -> Receiver:
        self._watcher = asyncio.create_task(self._watch(), name="client-watch")
        return self

    async def __aexit__(self, *error: object) -> None:
        self._watcher.cancel()
        if self.unfinished:
            self._engine.discard(self.unfinished)

    def submit(self, requests: Sequence[GenRequest], refused: Sequence[Refusal] = ()) -> None:
        """`refused` are results known before: they come first."""
        self.unfinished.update(one.rid for one in (*requests, *refused))
        if refused:
            self._results.put_nowait(refused)
        if requests:
            self._engine.submit(requests, self._deliver)

    async def next(self) -> list[Result] | None:
        """All results that are there, at least one; None when the client has left."""
        results: list[Result] = []
        while not results or not self._results.empty():
            more = await self._results.get()
            if more is None:
                return None
            results += more
        ended = [one.rid for one in results if not isinstance(one, Progress)]
        self.unfinished.difference_update(ended)
        return results

    def _deliver(self, results: Sequence[Result]) -> None:  # on the engine thread
        self._events.call_soon_threadsafe(self._results.put_nowait, results)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._results.put_nowait(None)
