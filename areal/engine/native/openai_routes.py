"""The OpenAI-compatible routes of the native server.

| route                     | answer                                                           |
|---------------------------|------------------------------------------------------------------|
| POST /v1/completions      | prompts as texts or token ids, streamed or not                   |
| POST /v1/chat/completions | messages, by the model's chat template, streamed or not          |
| GET /v1/models            | the one model                                                    |

Requests and replies are translated by `areal.openai`; errors have OpenAI's shape. The n samples of
a prompt are n requests that share its pages; with a seed, sample i draws with seed + i.

`CompletionChoice` and `ChatChoice` turn the tokens of one streamed choice into chunks; joined, the
chunks equal the reply without streaming.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from areal.api.io_struct import StopReason
from areal.api.json_text import dumps
from areal.engine.native.loop import EngineLoop, Receiver, Result
from areal.engine.native.sequence import Finished, GenRequest, Progress
from areal.engine.native.tokenizer import ModelText
from areal.engine.native.wire import Refusal, Reply
from areal.openai.parsing.formats import TOOL_FORMATS, format_of_template
from areal.openai.parsing.parser import (
    Content,
    Event,
    OutputParser,
    Reasoning,
    begins_in_reasoning,
)
from areal.openai.prompts import chat_prompt_ids
from areal.openai.replies import (
    Output,
    chat_chunk,
    chat_logprobs,
    chat_reply,
    completion_chunk,
    completion_logprobs,
    completion_reply,
    finish_reason,
    usage_chunk,
    usage_of,
)
from areal.openai.requests import (
    ChatBody,
    ChatCall,
    CompletionBody,
    CompletionCall,
    WireError,
    error_body,
    loads_body,
    parse_chat,
    parse_completion,
)
from areal.openai.text_stream import TextStream, visible_text
from areal.utils.chat_template import warm_up
from areal.utils.http_body import json_body
from areal.utils.http_server import JsonReply, read_body

Call = ChatCall | CompletionCall

_STREAM_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


def add_openai_routes(app: FastAPI, loop: EngineLoop, text: ModelText, *, model: str) -> None:
    """`model` is the folder; requests may name the full path or its last component."""
    card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "areal"}
    app.exception_handler(WireError)(_answer_wire_error)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        _check_model(name, model)
        return card

    @app.post("/v1/chat/completions", openapi_extra=json_body(ChatBody))
    async def chat(request: Request) -> Response:
        call = parse_chat(loads_body(await read_body(request)))
        return await _answer(call, loop, text, model)

    @app.post("/v1/completions", openapi_extra=json_body(CompletionBody))
    async def completions(request: Request) -> Response:
        return await _answer(
            parse_completion(loads_body(await read_body(request))), loop, text, model
        )


async def _answer(call: Call, loop: EngineLoop, text: ModelText, model: str) -> Response:
    _check_model(call.model, model)
    if call.top_logprobs:
        chosen = "top_logprobs=0" if isinstance(call, ChatCall) else "logprobs=0"
        param = chosen.partition("=")[0]
        message = f"{param}: only the sampled token's log-probability is known; send {chosen}"
        raise WireError(400, message, param)
    call = replace(call, model=call.model or model)
    # In a thread: loading the tokenizer takes seconds, encoding a long prompt milliseconds.
    head, prompts, requests = await asyncio.to_thread(_prepare, call, text)
    num_prompt_tokens = sum(map(len, prompts))
    kind = _StreamedReply if call.stream else _WholeReply
    return kind(loop, head, requests, num_prompt_tokens)


def _prepare(call: Call, text: ModelText) -> tuple[ReplyHead, list[list[int]], list[GenRequest]]:
    is_chat = isinstance(call, ChatCall)
    if is_chat:
        warm_up()
    try:
        tokenizer = text.tokenizer()
    except ValueError as err:
        raise WireError(400, str(err)) from err
    if is_chat:
        completion_id = f"chatcmpl-{uuid.uuid4().hex}"
        prompts = [chat_prompt_ids(tokenizer, call)]
    else:
        completion_id = f"cmpl-{uuid.uuid4().hex}"
        prompts = [tokenizer(p)["input_ids"] if isinstance(p, str) else p for p in call.prompt]
    eos_ids = [] if call.gconfig.ignore_eos else text.eos_ids
    head = ReplyHead(
        call=call,
        completion_id=completion_id,
        created=int(time.time()),
        tokenizer=tokenizer,
        tool_format=format_of_template(tokenizer.chat_template),
        stop_ids=frozenset([*call.gconfig.stop_token_ids, *eos_ids]),
        in_reasoning=is_chat and begins_in_reasoning(tokenizer, prompts[0]),
    )
    return head, prompts, _requests(call, completion_id, prompts, text)


def _requests(
    call: Call, completion_id: str, prompts: list[list[int]], text: ModelText
) -> list[GenRequest]:
    """n per prompt, in the order of the choices."""
    gconfig, requests = call.gconfig, []
    for prompt in prompts:
        for sample in range(gconfig.n_samples):
            seed = None if gconfig.seed is None else gconfig.seed + sample
            request = GenRequest(
                rid=f"{completion_id}.{len(requests)}",
                input_ids=prompt,
                gconfig=gconfig.new(n_samples=1, seed=seed),
                progress_tokens=1 if call.stream else 0,
            )
            requests.append(text.prepare(request))
    return requests


class _WholeReply(Response):
    """One JSON object, sent when all choices are complete."""

    def __init__(
        self, loop: EngineLoop, head: ReplyHead, requests: list[GenRequest], prompt_tokens: int
    ) -> None:
        super().__init__()
        self._loop = loop
        self._head = head
        self._requests = requests
        self._prompt_tokens = prompt_tokens

    async def __call__(self, scope, receive, send) -> None:
        finished: dict[str, Finished] = {}
        async with Receiver(self._loop, receive) as receiver:
            receiver.submit(self._requests)
            while receiver.unfinished:
                results = await receiver.next()
                if results is None:
                    return
                if fault := _fault(results):
                    await _error_response(fault)(scope, receive, send)
                    return
                replies = (one for one in results if isinstance(one, Reply))
                finished.update({reply.rid: reply.finished for reply in replies})
        ordered = [finished[request.rid] for request in self._requests]
        # In a thread: decoding many long outputs would block the event loop.
        response = await asyncio.to_thread(lambda: JsonReply(self._reply(ordered)))
        await response(scope, receive, send)

    def _reply(self, finished: Sequence[Finished]) -> dict[str, Any]:
        head = self._head
        outputs = [
            Output(one.output_tokens, one.output_logprobs, one.stop_reason, self._text(one))
            for one in finished
        ]
        call, shared = head.call, (head.completion_id, head.created, outputs, self._prompt_tokens)
        if not isinstance(call, ChatCall):
            return completion_reply(call, *shared, head.tokenizer)
        return chat_reply(
            call, *shared, head.tokenizer,
            tool_format=head.tool_format, in_reasoning=head.in_reasoning,
        )  # fmt: skip

    def _text(self, finished: Finished) -> str:
        head = self._head
        tokens = head.text_tokens(finished.output_tokens)
        return visible_text(head.tokenizer, tokens, head.call.gconfig, keep=head.marks)


class _StreamedReply(Response):
    """Server-sent events, one chunk per step and choice.

    The status is sent with the first results, so that a refused request gets an error status.
    """

    def __init__(
        self, loop: EngineLoop, head: ReplyHead, requests: list[GenRequest], prompt_tokens: int
    ) -> None:
        super().__init__()
        self._loop = loop
        self._head = head
        self._requests = requests
        self._prompt_tokens = prompt_tokens
        kind = ChatChoice if isinstance(head.call, ChatCall) else CompletionChoice
        self._choices = {request.rid: kind(head, i) for i, request in enumerate(requests)}
        self._num_tokens = {request.rid: 0 for request in requests}

    async def __call__(self, scope, receive, send) -> None:
        async with Receiver(self._loop, receive) as receiver:
            receiver.submit(self._requests)
            results = await receiver.next()
            if results is None:
                return
            if fault := _fault(results):
                await _error_response(fault)(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            chunks = [chunk for choice in self._choices.values() for chunk in choice.begin()]
            while results is not None:
                fault = _fault(results)
                chunks += [error_body(fault)] if fault else self._chunks(results)
                done = fault is not None or not receiver.unfinished
                body = _events(chunks) + (b"" if fault or not done else self._last_events())
                if body or done:
                    message = {"type": "http.response.body", "body": body, "more_body": not done}
                    await send(message)
                if done:
                    return
                results, chunks = await receiver.next(), []

    def _chunks(self, results: list[Result]) -> list[Chunk]:
        chunks = []
        for one in results:
            choice, start = self._choices[one.rid], self._num_tokens[one.rid]
            if isinstance(one, Progress):
                self._num_tokens[one.rid] += len(one.tokens)
                chunks += choice.advance(one.tokens, one.logprobs)
            elif isinstance(one, Reply):  # refusals are handled by `_fault`
                finished = one.finished
                self._num_tokens[one.rid] = len(finished.output_tokens)
                tokens, logprobs = finished.output_tokens[start:], finished.output_logprobs[start:]
                chunks += choice.end(tokens, logprobs, finished.stop_reason)
        return chunks

    def _last_events(self) -> bytes:
        head, last = self._head, b"data: [DONE]\n\n"
        if not head.call.include_usage:
            return last
        usage = usage_of(self._prompt_tokens, sum(self._num_tokens.values()))
        return _events([usage_chunk(head.call, head.completion_id, head.created, usage)]) + last


def _events(chunks: list[Chunk]) -> bytes:
    return "".join(f"data: {dumps(chunk)}\n\n" for chunk in chunks).encode()


def _fault(results: list[Result]) -> WireError | None:
    """The error to send instead of the rest of the reply, if any."""
    for one in results:
        if isinstance(one, Refusal):
            return WireError(400 if one.kind == "request" else 503, one.message)
        if isinstance(one, Progress) and not all(map(math.isfinite, one.logprobs)):
            fault = "a log-probability is not finite; look at the weights the engine was given"
            return WireError(503, fault)
    return None


def _check_model(name: str, model: str) -> None:
    if name not in ("", model, Path(model).name):
        message = f"model: expected {model!r}, which is served here, got {name[:100]!r}"
        raise WireError(404, message, "model", "model_not_found")


async def _answer_wire_error(request: Request, err: WireError) -> Response:
    return _error_response(err)


def _error_response(err: WireError) -> Response:
    return JsonReply(error_body(err), err.status)


Chunk = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """Fields shared by all choices of one reply."""

    call: ChatCall | CompletionCall
    completion_id: str
    created: int  # Unix seconds
    tokenizer: Any
    tool_format: str
    stop_ids: frozenset[int]  # tokens that end an output and are not part of its text
    in_reasoning: bool = False  # outputs of a chat begin inside reasoning

    @property
    def marks(self) -> frozenset[str]:
        """Special tokens that the outputs' parser must see."""
        if not isinstance(self.call, ChatCall):
            return frozenset()
        return TOOL_FORMATS[self.tool_format].marks(has_tools=bool(self.call.tools))

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

    def advance(self, tokens: list[int], logprobs: list[float]) -> list[Chunk]:
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
    def __init__(self, head: ReplyHead, index: int) -> None:
        assert isinstance(head.call, ChatCall)
        self._head = head
        self._call = head.call
        self._index = index
        self._stream = TextStream(head.tokenizer, head.call.gconfig, keep=head.marks)
        self._parser = OutputParser(
            head.tool_format, tools=head.call.tools, in_reasoning=head.in_reasoning
        )
        self._has_calls = False

    def begin(self) -> list[Chunk]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def advance(self, tokens: list[int], logprobs: list[float]) -> list[Chunk]:
        return self._chunks(self._parser.push(self._stream.push(tokens)), tokens, logprobs)

    def end(self, tokens: list[int], logprobs: list[float], reason: StopReason) -> list[Chunk]:
        text = self._stream.push(self._head.text_tokens(tokens)) + self._stream.finish()
        events = [*self._parser.push(text), *self._parser.finish()]
        chunks = self._chunks(events, tokens, logprobs)
        word = finish_reason(reason, has_calls=self._has_calls)
        return [*chunks, self._chunk({}, reason=word)]

    def _chunks(self, events: list[Event], tokens: list[int], logprobs: list[float]) -> list[Chunk]:
        """One chunk per event; the first carries the log-probabilities of all tokens."""
        details = None
        if self._call.logprobs and tokens:
            details = chat_logprobs(self._head.tokenizer, tokens, logprobs)
        deltas = [self._delta(event) for event in events]
        if details is not None and not deltas:
            deltas = [{"content": ""}]
        return [
            self._chunk(delta, logprobs=None if number else details)
            for number, delta in enumerate(deltas)
        ]

    def _delta(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text}
        if isinstance(event, Content):
            return {"content": event.text}
        self._has_calls = True
        return {"tool_calls": [{"index": event.index, **event.as_dict()}]}

    def _chunk(
        self, delta: dict[str, Any], *, logprobs: Any = None, reason: str | None = None
    ) -> Chunk:
        head = self._head
        return chat_chunk(
            self._call, head.completion_id, head.created, self._index, delta,
            logprobs=logprobs, finish_reason=reason,
        )  # fmt: skip
