"""Requests that a client sends again: they get the answer of the first, never a second sample.

| a request                                     | gets                                           |
|-----------------------------------------------|------------------------------------------------|
| with an `Idempotency-Key` seen before         | the answer of that request, in flight or given |
| with `x-stainless-retry-count` above 0        | that of an equal request, in flight or given   |
| without that header, equal to one in flight   | its answer                                     |
| with `x-stainless-retry-count: 0`             | an answer of its own                           |

SDKs send that header with every request: two equal first attempts are two questions, as of an agent
that samples twice. A request is cancelled when all clients that wait for it have left. An attempt
that failed is not remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from areal.agents.streams import ReplyStream

_MAX_CALLS = 32  # of one session that are remembered; a retry follows soon
_MAX_KEY = 256  # characters


@dataclass(frozen=True, slots=True)
class Attempt:
    name: str  # equal for the attempts of one request
    is_retry: bool
    may_join: bool  # an equal request in flight

    @classmethod
    def of(cls, path: str, headers: Mapping[str, str], body: bytes) -> Attempt:
        count = headers.get("x-stainless-retry-count", "")
        is_retry = count.isdecimal() and count.strip("0") != ""
        if key := headers.get("idempotency-key", "")[:_MAX_KEY]:
            return cls(f"key {path} {key}", is_retry=True, may_join=True)
        name = hashlib.sha256(path.encode() + b"\0" + body).hexdigest()
        return cls(name, is_retry, may_join=is_retry or not count)


class SharedCall:
    """A call of the model, in flight or answered, and the number of clients that wait for it.

    `work` returns the reply as JSON, or nothing if it went to `stream`; `stream` keeps all of it.
    """

    def __init__(self, work: Coroutine[Any, Any, bytes], stream: ReplyStream) -> None:
        self.stream = stream
        self.task = asyncio.create_task(work, name="agent-call")
        self.task.add_done_callback(self._close)
        self.num_waiting = 0

    @property
    def has_failed(self) -> bool:
        task = self.task
        return task.done() and (task.cancelled() or task.exception() is not None)

    async def answer(self) -> bytes:
        return await asyncio.shield(self.task)

    def _close(self, task: asyncio.Task[bytes]) -> None:
        self.stream.close()
        if not task.cancelled():
            task.exception()  # retrieved: a stream has told it, and nobody may wait for an answer


class Attempts:
    """The calls of one session, by name. Used on one event loop."""

    def __init__(self) -> None:
        self._calls: dict[str, SharedCall] = {}  # oldest first

    @contextlib.contextmanager
    def join(self, attempt: Attempt, start: Callable[[], SharedCall]) -> Iterator[SharedCall]:
        """The call that answers this attempt, by `start` if there is none yet."""
        call = self._find(attempt) or self._remember(attempt.name, start())
        call.num_waiting += 1
        try:
            yield call
        finally:
            call.num_waiting -= 1
            if not call.num_waiting and not call.task.done():
                call.task.cancel()
                if self._calls.get(attempt.name) is call:
                    del self._calls[attempt.name]

    def _find(self, attempt: Attempt) -> SharedCall | None:
        call = self._calls.get(attempt.name)
        if call is None or call.has_failed:
            return None
        is_wanted = attempt.is_retry if call.task.done() else attempt.may_join
        return call if is_wanted else None

    def _remember(self, name: str, call: SharedCall) -> SharedCall:
        self._calls.pop(name, None)
        self._calls[name] = call
        done = [name for name, other in self._calls.items() if other.task.done()]
        for oldest in done[: max(0, len(self._calls) - _MAX_CALLS)]:
            del self._calls[oldest]
        return call
