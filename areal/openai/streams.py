"""The events of a reply on its way, from its head to its end, and how an API writes them.

    encoder = api.encoder(head)                                    # of one choice, see apis.py
    events = [*encoder.begin(), *encoder.push(reader.push(tokens), tokens, logprobs), ...]
    events += encoder.finish(output, usage)
    data = b"".join(map(api.events.frame, events)) + api.events.end

Invariant: the events of a stream fold to the reply that the same output has without one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from areal.api.json_text import dumps
from areal.openai.errors import WireError, error_body
from areal.openai.parsing.parser import Event, ToolCall, joined
from areal.openai.replies import (
    ChatOutput,
    ChatStream,
    CompletionStream,
    Output,
    ReplyHead,
    Usage,
    usage_chunk,
)
from areal.openai.requests import ChatCall

WireEvent = dict[str, Any]


class Encoder(Protocol):
    """One choice as the events of its API. `fail` takes the place of what is left."""

    def begin(self) -> Sequence[WireEvent]: ...

    def push(
        self, read: Any, tokens: Sequence[int], logprobs: Sequence[float]
    ) -> Sequence[WireEvent]:
        """`read`: what the choice's reader says of the tokens: parser events, or a text."""
        ...

    def finish(self, output: Any, usage: Usage | None) -> Sequence[WireEvent]:
        """`output`: ChatOutput or Output. `usage` of the reply, None unless it ends with this."""
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

    def framed(self, events: Sequence[WireEvent]) -> bytes:
        return b"".join(map(self.frame, events))


DATA_EVENTS = EventFormat(data_event, end=b"data: [DONE]\n\n")


class ChunkEncoder:
    """OpenAI's chunks, those of `stream_class`."""

    stream_class: type[ChatStream] | type[CompletionStream]

    def __init__(self, head: ReplyHead[Any]) -> None:
        self._head = head
        self._stream = self.stream_class(head)

    def begin(self) -> list[WireEvent]:
        return self._stream.begin()

    def push(self, read: Any, tokens: Sequence[int], logprobs: Sequence[float]) -> list[WireEvent]:
        return self._stream.push(read, tokens, logprobs)

    def finish(self, output: ChatOutput | Output, usage: Usage | None) -> list[WireEvent]:
        last = self._stream.finish(output.stop_reason, output.stop_string)
        if usage is not None and self._head.call.include_usage:
            last.append(usage_chunk(self._head.call, self._head.id, self._head.created, usage))
        return last

    def fail(self, error: WireError) -> list[WireEvent]:
        return [error_body(error)]


class ChatEncoder(ChunkEncoder):
    stream_class = ChatStream


class TextEncoder(ChunkEncoder):
    """Of completions, which are no chats."""

    stream_class = CompletionStream


class PartEncoder(ABC):
    """For an API whose replies are lists of parts: each part is opened, extended and closed.

    Such a reply has one choice.
    """

    def __init__(self, head: ReplyHead[ChatCall]) -> None:
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

    @abstractmethod
    def ended(self, output: ChatOutput, usage: Usage) -> Iterator[WireEvent]:
        """After the last part."""

    def push(
        self, read: Sequence[Event], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> list[WireEvent]:
        found: list[WireEvent] = []
        for event in read:
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

    def finish(self, output: ChatOutput, usage: Usage | None) -> list[WireEvent]:
        assert usage is not None, "the only choice is the last one"
        is_cut = output.finish_reason == "length"
        return [*self.close_part(is_cut=is_cut), *self.ended(output, usage)]

    def close_part(self, *, is_cut: bool = False) -> list[WireEvent]:
        if not self._part:
            return []
        (part,), self._part = joined(self._part), []
        return list(self.closed(part, is_cut=is_cut))
