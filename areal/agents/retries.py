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
import hashlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_MAX_ANSWERS = 32  # of one session; a retry follows soon
_MAX_KEY = 256  # characters

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class Attempt:
    name: str  # equal for the attempts of one request
    is_retry: bool
    may_join: bool  # an equal request in flight

    @classmethod
    def of(cls, path: str, headers: Mapping[str, str], body: bytes) -> Attempt:
        count = headers.get("x-stainless-retry-count", "")
        is_retry = count.isdecimal() and count.strip("0") != ""
        text = hashlib.sha256(path.encode() + b"\0" + body).hexdigest()
        if key := headers.get("idempotency-key", "")[:_MAX_KEY]:
            return cls(f"key {path} {key}", is_retry=True, may_join=True)
        return cls(text, is_retry, may_join=is_retry or not count)


@dataclass(slots=True, eq=False)
class _InFlight(Generic[A]):
    task: asyncio.Task[A]
    num_waiting: int = 0


class Attempts(Generic[A]):
    """The requests of one session, by name. Used on one event loop."""

    def __init__(self) -> None:
        self._in_flight: dict[str, _InFlight[A]] = {}
        self._answers: dict[str, A] = {}  # oldest first

    async def answer(self, attempt: Attempt, work: Callable[[], Coroutine[Any, Any, A]]) -> A:
        running = self._in_flight.get(attempt.name) if attempt.may_join else None
        if running is None:
            if attempt.is_retry and attempt.name in self._answers:
                return self._answers[attempt.name]
            task = asyncio.create_task(self._run(attempt.name, work), name="agent-call")
            running = self._in_flight[attempt.name] = _InFlight(task)
        running.num_waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.num_waiting -= 1
            if not running.num_waiting:
                running.task.cancel()
                if self._in_flight.get(attempt.name) is running:
                    del self._in_flight[attempt.name]

    async def _run(self, name: str, work: Callable[[], Coroutine[Any, Any, A]]) -> A:
        answer = await work()
        self._answers.pop(name, None)
        self._answers[name] = answer
        if len(self._answers) > _MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]
        return answer
