"""A reply on its way: what is known before its first token, its end, and the events between.

    encoder = api.encoder(head)                                    # of one choice, see apis.py
    events = [*encoder.begin(), *encoder.push(reader.push(tokens), tokens, logprobs), ...]
    events += encoder.finish(output, usage)
    data = b"".join(map(api.events.frame, events)) + api.events.end

Invariant: the events of a stream fold to the reply that the same output has without one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from areal.api.json_text import dumps
from areal.openai.errors import WireError, error_body
from areal.openai.parsing.parser import Event, ToolCall, joined
from areal.openai.replies import (
    ChatOutput,
    ChatStream,
    CompletionStream,
    Output,
    usage_chunk,
    usage_of,
)
from areal.openai.requests import ChatCall, CompletionCall

WireEvent = dict[str, Any]
Usage = dict[str, Any]  # see usage_of
C = TypeVar("C", ChatCall, CompletionCall)


@dataclass(frozen=True, slots=True)
class ReplyHead(Generic[C]):
    """What is known of a reply before its first token."""

    asked: dict[str, Any]  # the request body, in its API's format
    call: C
    id: str
    created: int  # Unix seconds
    prompts: list[list[int]]  # one, if it is a chat
    tokenizer: Any
    choice: int = 0  # of which choice, for an Encoder

    def of_choice(self, choice: int) -> ReplyHead[C]:
        return replace(self, choice=choice)

    @property
    def prompt_ids(self) -> list[int]:
        """Each prompt has `n_samples` choices."""
        return self.prompts[self.choice // self.call.gconfig.n_samples]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def num_cached(self, found: Sequence[int]) -> int:
        """Tokens of all prompts, by what each choice found. The samples of a prompt compute it
        once: the first of them found the least."""
        n = self.call.gconfig.n_samples
        return sum(min(found[start : start + n]) for start in range(0, len(found), n))


@dataclass(frozen=True, slots=True)
class Completion(Generic[C]):
    """All that was sampled for one call, whatever its API."""

    head: ReplyHead[C]
    outputs: Sequence[Any]  # of the choices: ChatOutput, or Output if it is no chat
    cached_tokens: int = 0  # of the prompts

    @property
    def usage(self) -> Usage:
        num_sampled = sum(len(output.token_ids) for output in self.outputs)
        return usage_of(self.head.num_prompt_tokens, num_sampled, self.cached_tokens)


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
        self._place = head.call, head.id, head.created
        self._stream = self.stream_class(
            *self._place, head.tokenizer, head.choice, prompt_ids=head.prompt_ids
        )

    def begin(self) -> list[WireEvent]:
        return self._stream.begin()

    def push(self, read: Any, tokens: Sequence[int], logprobs: Sequence[float]) -> list[WireEvent]:
        return self._stream.push(read, tokens, logprobs)

    def finish(self, output: ChatOutput | Output, usage: Usage | None) -> list[WireEvent]:
        last = self._stream.finish(output.stop_reason, output.stop_string)
        return [*last, *_usage_chunks(*self._place, usage)]

    def fail(self, error: WireError) -> list[WireEvent]:
        return [error_body(error)]


class ChatEncoder(ChunkEncoder):
    stream_class = ChatStream


class TextEncoder(ChunkEncoder):
    """Of completions, which are no chats."""

    stream_class = CompletionStream


def _usage_chunks(
    call: ChatCall | CompletionCall, name: str, created: int, usage: Usage | None
) -> list[WireEvent]:
    if usage is None or not call.include_usage:
        return []
    return [usage_chunk(call, name, created, usage)]


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
