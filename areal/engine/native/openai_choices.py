"""One choice of a streamed reply: tokens in as they come, the chunks that tell them out.

Joined, the chunks of a choice say what the reply without streaming says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from areal.api.io_struct import StopReason
from areal.openai import (
    ChatCall,
    CompletionCall,
    TextStream,
    chat_chunk,
    chat_logprobs,
    completion_chunk,
    completion_logprobs,
    finish_reason,
    parse_tool_calls,
    tool_calls_may_begin,
)

Chunk = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What all choices of one reply share."""

    call: ChatCall | CompletionCall
    completion_id: str
    created: int  # Unix seconds
    tokenizer: Any
    tool_parser: str
    stop_ids: frozenset[int]  # tokens that end an output and are no text
    in_reasoning: bool = False  # outputs of a chat begin inside reasoning

    def text_tokens(self, tokens: list[int]) -> list[int]:
        return tokens[:-1] if tokens and tokens[-1] in self.stop_ids else tokens


class CompletionChoice:
    def __init__(self, head: ReplyHead, index: int) -> None:
        assert isinstance(head.call, CompletionCall)
        self._head = head
        self._call = head.call
        self._index = index
        self._text = TextStream(head.tokenizer, head.call.gconfig)
        self._num_letters = 0  # of all tokens so far, for the offsets of log-probabilities

    def begin(self) -> list[Chunk]:
        return []

    def go_on(self, tokens: list[int], logprobs: list[float]) -> list[Chunk]:
        text = self._text.push(tokens)
        return [self._chunk(text, tokens, logprobs)] if text or self._call.logprobs else []

    def end(self, tokens: list[int], logprobs: list[float], reason: StopReason) -> list[Chunk]:
        text = self._text.push(self._head.text_tokens(tokens)) + self._text.finish()
        return [self._chunk(text, tokens, logprobs, finish_reason(reason))]

    def _chunk(
        self, text: str, tokens: list[int], logprobs: list[float], reason: str | None = None
    ) -> Chunk:
        head, details = self._head, None
        if self._call.logprobs:
            details = completion_logprobs(
                head.tokenizer, tokens, logprobs, text_offset=self._num_letters
            )
            self._num_letters += sum(map(len, details["tokens"]))
        return completion_chunk(
            self._call, head.completion_id, head.created, self._index, text,
            logprobs=details, finish_reason=reason,
        )  # fmt: skip


class ChatChoice:
    """With tools, text that may be a tool call waits until the output is complete."""

    def __init__(self, head: ReplyHead, index: int) -> None:
        assert isinstance(head.call, ChatCall)
        self._head = head
        self._call = head.call
        self._index = index
        self._stream = TextStream(head.tokenizer, head.call.gconfig)
        self._text = ""  # with tools: all of it
        self._num_shown = 0

    def begin(self) -> list[Chunk]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def go_on(self, tokens: list[int], logprobs: list[float]) -> list[Chunk]:
        return self._content(self._showable(self._stream.push(tokens)), tokens, logprobs)

    def end(self, tokens: list[int], logprobs: list[float], reason: StopReason) -> list[Chunk]:
        text = self._stream.push(self._head.text_tokens(tokens)) + self._stream.finish()
        calls: list[dict[str, Any]] = []
        if self._call.tools:
            content, calls = parse_tool_calls(
                self._text + text, self._head.tool_parser, in_reasoning=self._head.in_reasoning
            )
            text = (content or "")[self._num_shown :]
        chunks = self._content(text, tokens, logprobs)
        if calls:
            numbered = [{"index": i, **call} for i, call in enumerate(calls)]
            chunks.append(self._chunk({"tool_calls": numbered}))
        word = finish_reason(reason, has_calls=bool(calls))
        return [*chunks, self._chunk({}, reason=word)]

    def _showable(self, text: str) -> str:
        if not self._call.tools:
            return text
        self._text += text
        end = tool_calls_may_begin(
            self._text, self._head.tool_parser, in_reasoning=self._head.in_reasoning
        )
        shown, self._num_shown = self._num_shown, max(self._num_shown, end)
        return self._text[shown : self._num_shown]

    def _content(self, text: str, tokens: list[int], logprobs: list[float]) -> list[Chunk]:
        details = None
        if self._call.logprobs and tokens:
            details = chat_logprobs(self._head.tokenizer, tokens, logprobs)
        if not text and details is None:
            return []
        return [self._chunk({"content": text}, logprobs=details)]

    def _chunk(
        self, delta: dict[str, Any], *, logprobs: Any = None, reason: str | None = None
    ) -> Chunk:
        head = self._head
        return chat_chunk(
            self._call, head.completion_id, head.created, self._index, delta,
            logprobs=logprobs, finish_reason=reason,
        )  # fmt: skip
