"""Replies and stream chunks of the chat and completion API, as dicts ready for JSON.

    head = ReplyHead(body, call, "chatcmpl-1", created, [prompt_ids], tokenizer)
    reader = ChatReader(call, tokenizer, tool_format="hermes", stop_ids=frozenset([2]))
    stream.push(reader.push([5, 7]), [5, 7], logprobs)            # chunks of a `ChatStream(head)`
    ...
    reader.finish()
    chat_reply(Completion(head, [reader.output(tokens, logprobs, "stop")]))

One `Output` or `ChatOutput` is one choice. Invariant: the chunks of a choice join to what the whole
reply says of it, however its tokens are cut into pushes. `tokenizer` of a reply is used only where
log-probabilities were requested, to name their tokens. They cover every sampled token, also a stop
token that the text does not show.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from areal.api.config.inference import GenerationHyperparameters
from areal.api.io_struct import StopReason
from areal.openai.parsing.formats import TOOL_FORMATS
from areal.openai.parsing.parser import (
    Content,
    Event,
    OutputParser,
    Reasoning,
    ToolCall,
    fold,
    joined,
)
from areal.openai.requests import ChatCall, CompletionCall
from areal.openai.text_stream import TextStream, token_bytes, token_text

Chunk = dict[str, Any]
Usage = dict[str, Any]  # see usage_of
C = TypeVar("C", ChatCall, CompletionCall)


@dataclass(frozen=True, slots=True)
class Output:
    """One sampled output; `text` is the part visible to the client (see visible_text)."""

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    text: str
    stop_string: str | None = None  # that ended it
    echo: Echo | None = None  # if the prompt is to be told too


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is repeated before its output. Nothing predicts the first token: None."""

    text: str
    token_ids: list[int]
    logprobs: list[float | None]
    top: list[dict[str, float] | None] | None  # of prompt and output: likely tokens at each place


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """One sampled output; `parts` are those of its ChatReader."""

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    parts: list[Event]
    stop_string: str | None = None  # that ended it

    @property
    def finish_reason(self) -> str:
        has_calls = any(isinstance(part, ToolCall) for part in self.parts)
        return finish_reason(self.stop_reason, has_calls=has_calls)


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


_NO_ECHO = Echo("", [], [], None)


class TextReader:
    """The tokens of one output, read as visible text.

    A last token in `stop_ids` is not part of the text; `keep` as in TextStream.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        stop_ids: Collection[int],
        keep: frozenset[str] = frozenset(),
    ) -> None:
        self._text = TextStream(tokenizer, gconfig, keep=keep)
        self._stop_ids = stop_ids
        self._held: list[int] = []  # a stop token, unless more follow
        self._texts: list[str] = []

    def push(self, tokens: Sequence[int]) -> str:
        """What is final now, without what was returned before."""
        tokens = [*self._held, *tokens]
        self._held = tokens[-1:] if tokens and tokens[-1] in self._stop_ids else []
        return self._note(self._text.push(tokens[: len(tokens) - len(self._held)]))

    def finish(self) -> str:
        return self._note(self._text.finish())

    @property
    def text(self) -> str:
        """All of it, so far."""
        return "".join(self._texts)

    @property
    def stop_string(self) -> str | None:
        """The stop string at which the text ends."""
        return self._text.stop_string

    def output(self, tokens: list[int], logprobs: list[float], stop_reason: StopReason) -> Output:
        """What was read, of these tokens."""
        return Output(tokens, logprobs, stop_reason, self.text, self.stop_string)

    def _note(self, text: str) -> str:
        self._texts.append(text)
        return text


class ChatReader:
    """The tokens of one output, read as reasoning, content and tool calls.

    `stop_ids` as in TextReader; the other options are those of OutputParser.
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
        self._text = TextReader(call.gconfig, tokenizer, stop_ids=stop_ids, keep=marks)
        self._parser = OutputParser(
            tool_format, tools=call.tools, reasoning=reasoning, in_reasoning=in_reasoning
        )
        self._max_calls = None if call.parallel_tool_calls else 1
        self._events: list[Event] = []

    def push(self, tokens: Sequence[int]) -> list[Event]:
        """What is final now, without what was returned before."""
        text = self._text.push(tokens)
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
        return self._text.stop_string

    def output(
        self, tokens: list[int], logprobs: list[float], stop_reason: StopReason
    ) -> ChatOutput:
        """What was read, of these tokens."""
        return ChatOutput(tokens, logprobs, stop_reason, self.parts, self.stop_string)

    def _note(self, events: list[Event]) -> list[Event]:
        if self._max_calls is not None:
            events = [one for one in events if not self._is_beyond(one)]
        self._events += events
        return events

    def _is_beyond(self, event: Event) -> bool:
        return isinstance(event, ToolCall) and event.index >= (self._max_calls or 0)


def chat_reply(done: Completion[ChatCall]) -> dict[str, Any]:
    """The prompt's ids are told to who asks for token ids."""
    head, call, choices = done.head, done.head.call, []
    for index, output in enumerate(done.outputs):
        choices.append(
            {
                "index": index,
                "message": chat_message(output.parts),
                "logprobs": chat_logprobs(head.tokenizer, output.token_ids, output.logprobs)
                if call.logprobs
                else None,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_string,
                **({"token_ids": output.token_ids} if call.return_token_ids else {}),
            }
        )
    return {
        **_head(call, head.id, head.created, "chat.completion"),
        **({"prompt_token_ids": head.prompt_ids} if call.return_token_ids else {}),
        "choices": choices,
        "usage": done.usage,
    }


def chat_message(parts: Sequence[Event]) -> dict[str, Any]:
    parsed = fold(parts)
    content = None if parsed.calls and not parsed.content else parsed.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [tool_call.as_dict() for tool_call in parsed.calls]
    return message


def completion_reply(done: Completion[CompletionCall]) -> dict[str, Any]:
    """Outputs in prompt order, n per prompt. The prompts are told to who asks for token ids."""
    head, call, choices = done.head, done.head.call, []
    for index, output in enumerate(done.outputs):
        logprobs, echo = None, output.echo or _NO_ECHO
        if call.logprobs:
            tokens = [*echo.token_ids, *output.token_ids]
            values = [*echo.logprobs, *output.logprobs]
            logprobs = completion_logprobs(head.tokenizer, tokens, values)
            logprobs["top_logprobs"] = echo.top
        choices.append(
            {
                "index": index,
                "text": echo.text + output.text,
                "logprobs": logprobs,
                "finish_reason": finish_reason(output.stop_reason),
                "stop_reason": output.stop_string,
            }
        )
        if call.return_token_ids:
            prompt_ids = head.of_choice(index).prompt_ids
            choices[-1] |= {"prompt_token_ids": prompt_ids, "token_ids": output.token_ids}
    return {
        **_head(call, head.id, head.created, "text_completion"),
        "choices": choices,
        "usage": done.usage,
    }


class _ChoiceStream(Generic[C]):
    """The chunks of one choice. The prompt's ids are told to who asks for token ids."""

    def __init__(self, head: ReplyHead[C]) -> None:
        self._call = head.call
        self._place = (head.call, head.id, head.created, head.choice)
        self._tokenizer = head.tokenizer
        self._prompt_ids = head.prompt_ids

    def begin(self) -> list[Chunk]:
        """Chunks before the first token."""
        return []


class ChatStream(_ChoiceStream[ChatCall]):
    _has_calls = False

    def begin(self) -> list[Chunk]:
        chunk = chat_chunk(*self._place, {"role": "assistant", "content": ""})
        if self._call.return_token_ids:
            chunk["prompt_token_ids"] = self._prompt_ids
        return [chunk]

    def push(
        self, events: Sequence[Event], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> list[Chunk]:
        """One chunk per event; the first has the ids and log-probabilities of all `tokens`."""
        details = None
        if self._call.logprobs and tokens:
            details = chat_logprobs(self._tokenizer, tokens, logprobs)
        shows_ids = self._call.return_token_ids and bool(tokens)
        deltas = [self._delta(event) for event in events]
        if (details is not None or shows_ids) and not deltas:
            deltas = [{"content": ""}]
        chunks = [
            chat_chunk(*self._place, delta, logprobs=None if number else details)
            for number, delta in enumerate(deltas)
        ]
        if shows_ids:
            chunks[0]["choices"][0]["token_ids"] = list(tokens)
        return chunks

    def finish(self, stop_reason: StopReason, stop_string: str | None) -> list[Chunk]:
        reason = finish_reason(stop_reason, has_calls=self._has_calls)
        chunk = chat_chunk(*self._place, {}, finish_reason=reason)
        chunk["choices"][0]["stop_reason"] = stop_string
        return [chunk]

    def _delta(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text}
        if isinstance(event, Content):
            return {"content": event.text}
        self._has_calls = True
        return {"tool_calls": [{"index": event.index, **event.as_dict()}]}


class CompletionStream(_ChoiceStream[CompletionCall]):
    """The chunks of one choice of /v1/completions."""

    _num_letters = 0  # of all tokens so far, for the offsets of log-probabilities

    def push(self, text: str, tokens: Sequence[int], logprobs: Sequence[float]) -> list[Chunk]:
        must_show = bool(tokens) and (self._call.logprobs or self._call.return_token_ids)
        return [self._chunk(text, tokens, logprobs)] if text or must_show else []

    def finish(self, stop_reason: StopReason, stop_string: str | None) -> list[Chunk]:
        chunk = self._chunk("", [], [])
        reasons = {"finish_reason": finish_reason(stop_reason), "stop_reason": stop_string}
        chunk["choices"][0] |= reasons
        return [chunk]

    def _chunk(self, text: str, tokens: Sequence[int], logprobs: Sequence[float]) -> Chunk:
        details = None
        if self._call.logprobs:
            details = completion_logprobs(
                self._tokenizer, tokens, logprobs, text_offset=self._num_letters
            )
            self._num_letters += sum(map(len, details["tokens"]))
        chunk = completion_chunk(*self._place, text, logprobs=details)
        if self._call.return_token_ids:
            ids = {"prompt_token_ids": self._prompt_ids, "token_ids": list(tokens)}
            chunk["choices"][0] |= ids
        return chunk


def generate_reply(done: Completion[CompletionCall]) -> dict[str, Any]:
    """vLLM's reply of tokens, which it names by their ids."""
    head, choices = done.head, []
    for index, output in enumerate(done.outputs):
        logprobs = None
        if head.call.logprobs:
            pairs = zip(output.token_ids, output.logprobs, strict=True)
            named = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
            logprobs = {"content": [{**one, "bytes": None, "top_logprobs": []} for one in named]}
        choices.append(
            {
                "index": index,
                "token_ids": output.token_ids,
                "logprobs": logprobs,
                "finish_reason": finish_reason(output.stop_reason),
            }
        )
    request_id = head.asked.get("request_id") or head.id
    return {"request_id": request_id, "choices": choices, "prompt_logprobs": None}


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
) -> dict[str, Any]:
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
    return _chunk(call, completion_id, created, "text_completion", [choice])


def usage_chunk(
    call: ChatCall | CompletionCall, completion_id: str, created: int, usage: Usage
) -> dict[str, Any]:
    """The last chunk of a stream whose request has `include_usage`."""
    kind = "chat.completion.chunk" if isinstance(call, ChatCall) else "text_completion"
    return {**_chunk(call, completion_id, created, kind, []), "usage": usage}


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> Usage:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
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
    tokenizer: Any,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    *,
    text_offset: int = 0,
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


def _chunk(call, completion_id: str, created: int, kind: str, choices: list) -> dict[str, Any]:
    chunk = {**_head(call, completion_id, created, kind), "choices": choices}
    return {**chunk, "usage": None} if call.include_usage else chunk


def _head(
    call: ChatCall | CompletionCall, completion_id: str, created: int, kind: str
) -> dict[str, Any]:
    return {"id": completion_id, "object": kind, "created": created, "model": call.model}
