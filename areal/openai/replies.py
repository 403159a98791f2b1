"""Replies and stream chunks of the chat and completion API, as dicts ready for JSON.

    reader = ChatReader(call, tokenizer, tool_format="hermes", stop_ids=frozenset([2]))
    stream.push(reader.push([5, 7]), [5, 7], logprobs)            # chunks of a `ChatStream`
    ...
    reader.finish()
    chat_reply(call, ..., [ChatOutput(tokens, logprobs, "stop", reader.parts)], ...)

One `Output` or `ChatOutput` is one choice. Invariant: the chunks of a choice join to what the whole
reply says of it, however its tokens are cut into pushes. `tokenizer` of a reply is used only where
log-probabilities were requested, to name their tokens. They cover every sampled token, also a stop
token that the text does not show.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from areal.api.io_struct import StopReason
from areal.openai.parsing.formats import TOOL_FORMATS
from areal.openai.parsing.parser import Content, Event, OutputParser, Reasoning, fold, joined
from areal.openai.requests import ChatCall, CompletionCall
from areal.openai.text_stream import TextStream, token_bytes, token_text

Chunk = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Output:
    """One sampled output; `text` is the part visible to the client (see visible_text)."""

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    text: str


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """One sampled output; `parts` are those of its ChatReader."""

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    parts: list[Event]


class ChatReader:
    """The tokens of one output, read as reasoning, content and tool calls.

    A last token in `stop_ids` is not part of the text; the other options are those of OutputParser.
    """

    def __init__(
        self,
        call: ChatCall,
        tokenizer: Any,
        *,
        tool_format: str,
        stop_ids: Collection[int],
        reasoning: str = "auto",
        in_reasoning: bool = False,
    ) -> None:
        marks = TOOL_FORMATS[tool_format].marks(has_tools=bool(call.tools))
        self._text = TextStream(tokenizer, call.gconfig, keep=marks)
        self._parser = OutputParser(
            tool_format, tools=call.tools, reasoning=reasoning, in_reasoning=in_reasoning
        )
        self._stop_ids = stop_ids
        self._held: list[int] = []  # a stop token, unless more follow
        self._events: list[Event] = []

    def push(self, tokens: list[int]) -> list[Event]:
        """What is final now, without what was returned before."""
        tokens = [*self._held, *tokens]
        self._held = tokens[-1:] if tokens and tokens[-1] in self._stop_ids else []
        text = self._text.push(tokens[: len(tokens) - len(self._held)])
        return self._note(self._parser.push(text) if text else [])

    def finish(self) -> list[Event]:
        """The rest. An output that is neither content nor a call has an empty content."""
        events = [*self._parser.push(self._text.finish()), *self._parser.finish()]
        if all(isinstance(event, Reasoning) for event in (*self._events, *events)):
            events.append(Content(""))
        return self._note(events)

    @property
    def parts(self) -> list[Event]:
        """Everything so far, in the order of the output; no text follows one of its own kind."""
        return joined(self._events)

    @property
    def stop_string(self) -> str | None:
        """The stop string at which the text ends."""
        return self._text.stop_string

    def _note(self, events: list[Event]) -> list[Event]:
        self._events += events
        return events


def chat_reply(
    call: ChatCall,
    completion_id: str,
    created: int,
    outputs: Sequence[ChatOutput],
    prompt_tokens: int,
    tokenizer: Any,
) -> dict[str, Any]:
    """`created` in Unix seconds."""
    choices = []
    for index, output in enumerate(outputs):
        parsed = fold(output.parts)
        content = None if parsed.calls and not parsed.content else parsed.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            message["tool_calls"] = [tool_call.as_dict() for tool_call in parsed.calls]
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": chat_logprobs(tokenizer, output.token_ids, output.logprobs)
                if call.logprobs
                else None,
                "finish_reason": finish_reason(output.stop_reason, has_calls=bool(parsed.calls)),
            }
        )
    return {
        **_head(call, completion_id, created, "chat.completion"),
        "choices": choices,
        "usage": _usage(outputs, prompt_tokens),
    }


def completion_reply(
    call: CompletionCall,
    completion_id: str,
    created: int,
    outputs: Sequence[Output],
    prompt_tokens: int,
    tokenizer: Any,
) -> dict[str, Any]:
    """`outputs` in prompt order, n per prompt; `prompt_tokens` is the sum over all prompts."""
    choices = []
    for index, output in enumerate(outputs):
        logprobs = None
        if call.logprobs:
            logprobs = completion_logprobs(tokenizer, output.token_ids, output.logprobs)
        choices.append(
            {
                "index": index,
                "text": output.text,
                "logprobs": logprobs,
                "finish_reason": finish_reason(output.stop_reason),
            }
        )
    return {
        **_head(call, completion_id, created, "text_completion"),
        "choices": choices,
        "usage": _usage(outputs, prompt_tokens),
    }


class ChatStream:
    """The chunks of one choice."""

    def __init__(
        self, call: ChatCall, completion_id: str, created: int, tokenizer: Any, index: int = 0
    ) -> None:
        self._call = call
        self._place = (call, completion_id, created, index)
        self._tokenizer = tokenizer
        self._has_calls = False

    def begin(self) -> list[Chunk]:
        return [chat_chunk(*self._place, {"role": "assistant", "content": ""})]

    def push(
        self, events: Sequence[Event], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> list[Chunk]:
        """One chunk per event; the first has the log-probabilities of all `tokens`."""
        details = None
        if self._call.logprobs and tokens:
            details = chat_logprobs(self._tokenizer, tokens, logprobs)
        deltas = [self._delta(event) for event in events]
        if details is not None and not deltas:
            deltas = [{"content": ""}]
        return [
            chat_chunk(*self._place, delta, logprobs=None if number else details)
            for number, delta in enumerate(deltas)
        ]

    def finish(self, stop_reason: StopReason) -> list[Chunk]:
        reason = finish_reason(stop_reason, has_calls=self._has_calls)
        return [chat_chunk(*self._place, {}, finish_reason=reason)]

    def _delta(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text}
        if isinstance(event, Content):
            return {"content": event.text}
        self._has_calls = True
        return {"tool_calls": [{"index": event.index, **event.as_dict()}]}


def chat_chunk(
    call: ChatCall,
    completion_id: str,
    created: int,
    index: int,
    delta: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    """One chunk of choice `index`: first {"role": "assistant", "content": ""}, last {}."""
    choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    return _chunk(call, completion_id, created, "chat.completion.chunk", [choice])


def completion_chunk(
    call: CompletionCall,
    completion_id: str,
    created: int,
    index: int,
    text: str,
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
    return _chunk(call, completion_id, created, "text_completion", [choice])


def usage_chunk(
    call: ChatCall | CompletionCall, completion_id: str, created: int, usage: dict[str, int]
) -> dict[str, Any]:
    """The last chunk of a stream whose request has `include_usage`."""
    kind = "chat.completion.chunk" if isinstance(call, ChatCall) else "text_completion"
    return {**_chunk(call, completion_id, created, kind, []), "usage": usage}


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def finish_reason(stop_reason: StopReason, *, has_calls: bool = False) -> str:
    """OpenAI's finish reason; "abort" (the server ended the request) is an extension."""
    return "tool_calls" if has_calls and stop_reason == "stop" else stop_reason


def chat_logprobs(
    tokenizer: Any, token_ids: Sequence[int], logprobs: Sequence[float]
) -> dict[str, Any]:
    content = []
    for token, logprob in zip(token_ids, logprobs, strict=True):
        raw = token_bytes(tokenizer, token)
        content.append(
            {
                "token": token_text(tokenizer, token),
                "logprob": logprob,
                "bytes": None if raw is None else list(raw),
                "top_logprobs": [],
            }
        )
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Any, token_ids: Sequence[int], logprobs: Sequence[float], *, text_offset: int = 0
) -> dict[str, Any]:
    """`text_offset`: number of characters before these tokens."""
    tokens = [token_text(tokenizer, token) for token in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": list(logprobs),
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _usage(outputs: Sequence[Output | ChatOutput], prompt_tokens: int) -> dict[str, int]:
    return usage_of(prompt_tokens, sum(len(output.token_ids) for output in outputs))


def _chunk(call, completion_id: str, created: int, kind: str, choices: list) -> dict[str, Any]:
    chunk = {**_head(call, completion_id, created, kind), "choices": choices}
    return {**chunk, "usage": None} if call.include_usage else chunk


def _head(
    call: ChatCall | CompletionCall, completion_id: str, created: int, kind: str
) -> dict[str, Any]:
    return {"id": completion_id, "object": kind, "created": created, "model": call.model}
