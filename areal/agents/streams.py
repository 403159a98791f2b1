"""How a reply leaves: the APIs that agents speak, and the events of a reply that is streamed.

    the call       stream.open(encoder); stream.push(events, tokens, logprobs); ...; stream.put(end)
                      |  an `Encoder` of the route turns parser events into events of its API
    the response   async for data in stream.read(keep_alive_s): ...

`ReplyStream` consumes parser events as tokens are sampled; produces bytes of server-sent events;
its readers wait for the next event. It begins with the first token, or after a long wait, so that a
request that fails before gets an error status.

Invariant: the events of a stream fold to the reply that the same output has without one.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from areal.api.json_text import dumps
from areal.openai.errors import WireError, error_body
from areal.openai.parsing.parser import Event, ToolCall, joined
from areal.openai.replies import ChatStream, usage_chunk
from areal.openai.requests import ChatCall

if TYPE_CHECKING:
    from areal.api.interaction import InteractionCache, InteractionWithTokenLogpReward
    from areal.utils.http_body import Body

WireEvent = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What is known of a reply before its first token."""

    asked: dict[str, Any]  # the request body, in its route's format
    call: ChatCall
    id: str
    created: int  # Unix seconds
    prompt_ids: list[int]
    tokenizer: Any


@dataclass(frozen=True, slots=True)
class Completion:
    """Result of one call: the reply for the client and the interaction for the session."""

    head: ReplyHead
    parts: list[Event]  # the first output, see ChatReader
    reply: dict[str, Any]  # a chat completion in OpenAI's format, whatever the route
    interactions: list[InteractionWithTokenLogpReward]  # one for each choice

    @property
    def interaction(self) -> InteractionWithTokenLogpReward:
        return self.interactions[0]

    @property
    def message(self) -> dict[str, Any]:
        return self.reply["choices"][0]["message"]

    @property
    def finish_reason(self) -> str:
        return self.reply["choices"][0]["finish_reason"]

    @property
    def stop_string(self) -> str | None:
        """At which its text ends."""
        return self.reply["choices"][0]["stop_reason"]


class Encoder(Protocol):
    """One reply as the events of its API. `fail` takes the place of what is left."""

    def begin(self) -> Sequence[WireEvent]: ...

    def push(
        self,
        events: Sequence[Event],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        choice: int = 0,
    ) -> Sequence[WireEvent]: ...

    def finish(self, done: Any) -> Sequence[WireEvent]:
        """`done`: the result of the call, see Completion."""
        ...

    def fail(self, error: WireError) -> Sequence[WireEvent]: ...


def data_event(event: WireEvent) -> bytes:
    return f"data: {dumps(event)}\n\n".encode()


def named_event(event: WireEvent) -> bytes:
    """An event that carries its type twice, as Anthropic and /v1/responses clients expect."""
    return f"event: {event['type']}\ndata: {dumps(event)}\n\n".encode()


@dataclass(frozen=True, slots=True)
class EventFormat:
    """How the events of an API are written."""

    frame: Callable[[WireEvent], bytes] = named_event
    keep_alive: bytes = b": keep-alive\n\n"  # a comment, which clients skip
    end: bytes = b""  # after the last event of a stream that did not fail


DATA_EVENTS = EventFormat(data_event, end=b"data: [DONE]\n\n")


@dataclass(frozen=True, slots=True)
class Route:
    """One API of chats. `chat_body(body, cache)` may read the session's earlier interactions."""

    id_prefix: str  # of the ids by which clients assign rewards
    body: type[Body]
    chat_body: Callable[[dict[str, Any], InteractionCache], dict[str, Any]]
    reply: Callable[[Completion], dict[str, Any]]
    encoder: Callable[[ReplyHead], Encoder]
    note: Callable[[Completion], None]  # stores in the interaction what the client received
    error: Callable[[WireError], dict[str, Any]] = error_body
    events: EventFormat = EventFormat()


class ReplyStream:
    """Written by one call, read by any number of responses. Used on one event loop."""

    def __init__(self, events: EventFormat) -> None:
        self._format = events
        self._encoder: Encoder | None = None
        self._data = bytearray()
        self._changed = asyncio.Event()
        self._is_closed = False

    @property
    def has_begun(self) -> bool:
        """Whether something was, or is about to be sent: too late for an error status."""
        return bool(self._data)

    def open(self, encoder: Encoder) -> None:
        """The request is understood, and wants a stream."""
        self._encoder = encoder

    def push(
        self,
        events: Sequence[Event],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        choice: int = 0,
    ) -> None:
        self.put(self._begun() + self._framed(self._open.push(events, tokens, logprobs, choice)))

    def last(self, events: Sequence[Sequence[Event]], done: Any) -> bytes:
        """What is left to `put`, with the last parser events of each choice."""
        rest = [
            wire_event
            for choice, last in enumerate(events)
            for wire_event in self._open.push(last, [], [], choice)
        ]
        return self._framed([*rest, *self._open.finish(done)]) + self._format.end

    def fail(self, error: WireError) -> None:
        self.put(self._framed(self._open.fail(error)))

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
                    if self._encoder is None:
                        continue
                    self._data += self._begun()
                    alive = self._format.keep_alive
            data = bytes(self._data[position:]) + alive
            position = len(self._data)
            if data:
                yield data

    @property
    def _open(self) -> Encoder:
        assert self._encoder is not None, "the stream is not open"
        return self._encoder

    def _begun(self) -> bytes:
        return b"" if self.has_begun else self._framed(self._open.begin())

    def _framed(self, events: Sequence[WireEvent]) -> bytes:
        return b"".join(map(self._format.frame, events))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class ChatEncoder:
    """OpenAI's chat completions: chunks."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        place, prompt = (head.call, head.id, head.created, head.tokenizer), head.prompt_ids
        choices = range(head.call.gconfig.n_samples)
        self._streams = [ChatStream(*place, choice, prompt_ids=prompt) for choice in choices]

    def begin(self) -> list[WireEvent]:
        return [chunk for stream in self._streams for chunk in stream.begin()]

    def push(
        self,
        events: Sequence[Event],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        choice: int = 0,
    ) -> list[WireEvent]:
        return self._streams[choice].push(events, tokens, logprobs)

    def finish(self, done: Completion) -> list[WireEvent]:
        head, chunks = self._head, []
        for stream, choice in zip(self._streams, done.reply["choices"], strict=True):
            chunks += stream.finish(choice["finish_reason"], choice["stop_reason"])
        if head.call.include_usage:
            chunks.append(usage_chunk(head.call, head.id, head.created, done.reply["usage"]))
        return chunks

    def fail(self, error: WireError) -> list[WireEvent]:
        return [error_body(error)]


class PartEncoder(ABC):
    """For an API whose replies are lists of parts: each part is opened, extended and closed."""

    def __init__(self, head: ReplyHead) -> None:
        self.head = head
        self.index = -1  # of the part that is open, or was last
        self._part: list[Event] = []  # the pieces of the open part

    @abstractmethod
    def opened(self, event: Event) -> Iterator[WireEvent]: ...

    @abstractmethod
    def delta(self, event: Event) -> Iterator[WireEvent]: ...

    @abstractmethod
    def closed(self, part: Event, *, is_cut: bool) -> Iterator[WireEvent]:
        """`is_cut`: the reply ended by length, within this part."""

    def push(
        self,
        events: Sequence[Event],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        choice: int = 0,
    ) -> list[WireEvent]:
        found: list[WireEvent] = []
        for event in events:
            if self._part and type(event) is not type(self._part[0]):
                found += self.close_part()
            if not self._part:
                self.index += 1
                found += self.opened(event)
            self._part.append(event)
            found += self.delta(event)
            if isinstance(event, ToolCall):
                found += self.close_part()
        return found

    def close_part(self, *, is_cut: bool = False) -> list[WireEvent]:
        if not self._part:
            return []
        (part,), self._part = joined(self._part), []
        return list(self.closed(part, is_cut=is_cut))
