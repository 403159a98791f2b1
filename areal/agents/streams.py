"""The streamed reply of one call, from the call that writes it to the responses that read it.

    the call       stream.open(encoder); stream.push(read, tokens, logprobs); ...; stream.put(end)
                      |  the `Encoder` of the route's API makes its events
    the response   async for data in stream.read(keep_alive_s): ...

`ReplyStream` produces bytes of server-sent events; its readers wait for the next event. It
begins with the first token, or after a long wait, so that a request that fails before gets an error
status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from areal.openai.errors import WireError
from areal.openai.replies import Usage
from areal.openai.streams import Encoder, EventFormat, WireEvent


class ReplyStream:
    """Written by one call, read by any number of responses. Used on one event loop."""

    def __init__(self, events: EventFormat) -> None:
        self._format = events
        self._encoders: Sequence[Encoder] = ()  # of the choices, once it is open
        self._data = bytearray()
        self._changed = asyncio.Event()
        self._is_closed = False

    @property
    def has_begun(self) -> bool:
        """Whether something was, or is about to be sent: too late for an error status."""
        return bool(self._data)

    def open(self, *encoders: Encoder) -> None:
        """The request is understood, and wants a stream; one encoder for each choice."""
        self._encoders = encoders

    def push(
        self, read: Any, tokens: Sequence[int], logprobs: Sequence[float], choice: int = 0
    ) -> None:
        begun = self._begun()  # before `push`: an encoder may number its events
        self.put(begun + self._format.framed(self._encoders[choice].push(read, tokens, logprobs)))

    def last(self, reads: Sequence[Any], outputs: Sequence[Any], usage: Usage) -> bytes:
        """What is left to `put`, with what the reader of each choice had held back."""
        events: list[WireEvent] = []
        for encoder, read, output in zip(self._encoders, reads, outputs, strict=True):
            is_last = encoder is self._encoders[-1]
            events += encoder.push(read, [], [])
            events += encoder.finish(output, usage if is_last else None)
        return self._format.framed(events) + self._format.end

    def fail(self, error: WireError) -> None:
        self.put(self._format.framed(self._encoders[0].fail(error)))

    def put(self, data: bytes) -> None:
        if data:
            self._data += data
            self._wake()

    def close(self) -> None:
        """Nothing more will come."""
        self._is_closed = True
        self._wake()

    async def read(self, keep_alive_s: float) -> AsyncIterator[bytes]:
        """All of it, from its beginning, as it comes; a keep-alive after each long wait.

        Nothing if it is closed without ever being open.
        """
        position = 0
        while position < len(self._data) or not self._is_closed:
            alive = b""
            if position == len(self._data):
                try:
                    async with asyncio.timeout(keep_alive_s):
                        await self._changed.wait()
                except TimeoutError:
                    if not self._encoders:
                        continue
                    self._data += self._begun()
                    alive = self._format.keep_alive
            data = bytes(self._data[position:]) + alive
            position = len(self._data)
            if data:
                yield data

    def _begun(self) -> bytes:
        if self.has_begun:
            return b""
        return b"".join(self._format.framed(encoder.begin()) for encoder in self._encoders)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
