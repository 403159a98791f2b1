"""The OpenAI-compatible routes of the native server.

| route                          | answer                                                      |
|--------------------------------|-------------------------------------------------------------|
| POST /v1/completions           | prompts as texts or token ids, streamed or not              |
| POST /v1/chat/completions      | messages, by the model's chat template, streamed or not     |
| POST /v1/messages/count_tokens | the number of tokens of Anthropic's messages                |
| POST /inference/v1/generate    | tokens for tokens, as vLLM spells it                        |
| GET /v1/models                 | the one model; /v1/models/NAME: by any name                 |

Requests and replies are translated by `areal.openai`; errors have OpenAI's shape. The n samples of
a prompt are n requests that share its pages; with a seed, sample i draws with seed + i.

`CompletionChoice` and `ChatChoice` turn the tokens of one streamed choice into chunks; joined, the
chunks equal the reply without streaming.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from areal.api.io_struct import Grammar, StopReason
from areal.api.json_text import dumps
from areal.engine.native.loop import EngineLoop, Receiver, Result
from areal.engine.native.sequence import Finished, GenRequest, Progress
from areal.engine.native.tokenizer import ModelText
from areal.engine.native.wire import Refusal, Reply
from areal.openai.anthropic import PromptBody, error_of, prompt_body
from areal.openai.errors import WireError, error_body, loads_body, refusal
from areal.openai.grammars import reply_grammar
from areal.openai.models import model_card, model_list
from areal.openai.parsing.formats import format_of_template
from areal.openai.parsing.parser import begins_in_reasoning
from areal.openai.prompts import chat_prompt_ids
from areal.openai.replies import (
    ChatOutput,
    ChatReader,
    ChatStream,
    Chunk,
    CompletionStream,
    Output,
    TextReader,
    chat_reply,
    completion_reply,
    generate_reply,
    usage_chunk,
    usage_of,
)
from areal.openai.requests import (
    ChatBody,
    ChatCall,
    CompletionBody,
    CompletionCall,
    GenerateBody,
    check_servable,
    parse_chat,
    parse_completion,
    parse_generate,
)
from areal.utils.chat_template import warm_up
from areal.utils.http_body import json_body
from areal.utils.http_server import JsonReply, read_body

Call = ChatCall | CompletionCall

_STREAM_HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


def add_openai_routes(app: FastAPI, loop: EngineLoop, text: ModelText, *, model: str) -> None:
    """`model` is the folder; requests may give it any name."""
    app.exception_handler(WireError)(_answer_wire_error)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return model_list(model)

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        return model_card(name)

    @app.post("/v1/chat/completions", openapi_extra=json_body(ChatBody))
    async def chat(request: Request) -> Response:
        call = parse_chat(loads_body(await read_body(request)))
        return await _answer(call, loop, text, model)

    @app.post("/v1/completions", openapi_extra=json_body(CompletionBody))
    async def completions(request: Request) -> Response:
        return await _answer(
            parse_completion(loads_body(await read_body(request))), loop, text, model
        )

    @app.post("/inference/v1/generate", openapi_extra=json_body(GenerateBody))
    async def generate(request: Request) -> Response:
        body = loads_body(await read_body(request))
        call, name = parse_generate(body), f"gen-{uuid.uuid4().hex}"
        check_servable(call)
        prompts = [prompt for prompt in call.prompt if not isinstance(prompt, str)]
        with _callers_fault():
            requests = await asyncio.to_thread(_requests, call, name, prompts, text)

        def reply(finished: Sequence[Finished]) -> dict[str, Any]:
            outputs = [
                Output(one.output_tokens, one.output_logprobs, one.stop_reason, "")
                for one in finished
            ]
            return generate_reply(call, body.get("request_id") or name, outputs)

        return _WholeReply(loop, requests, reply)

    @app.post("/v1/messages/count_tokens", openapi_extra=json_body(PromptBody))
    async def count_tokens(request: Request) -> dict[str, int]:
        call = parse_chat(prompt_body(loads_body(await read_body(request))))
        prompt = await asyncio.to_thread(lambda: chat_prompt_ids(_tokenizer(text), call))
        return {"input_tokens": len(prompt)}


async def _answer(call: Call, loop: EngineLoop, text: ModelText, model: str) -> Response:
    check_servable(call)
    call = replace(call, model=call.model or model)
    # In a thread: loading the tokenizer takes seconds, encoding a long prompt milliseconds.
    head, requests = await asyncio.to_thread(_prepare, call, text)
    return (
        _StreamedReply(loop, head, requests)
        if call.stream
        else _WholeReply(loop, requests, head.reply)
    )


def _prepare(call: Call, text: ModelText) -> tuple[ReplyHead, list[GenRequest]]:
    is_chat = isinstance(call, ChatCall)
    if is_chat:
        warm_up()
    tokenizer = _tokenizer(text)
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
        prompts=prompts,
    )
    with _callers_fault():
        return head, _requests(call, completion_id, prompts, text, head.grammar())


def _tokenizer(text: ModelText) -> Any:
    with _callers_fault():
        return text.tokenizer()


@contextlib.contextmanager
def _callers_fault() -> Iterator[None]:
    try:
        yield
    except ValueError as err:
        raise WireError(400, str(err)) from err


def _requests(
    call: Call,
    completion_id: str,
    prompts: list[list[int]],
    text: ModelText,
    grammar: Grammar | None = None,
) -> list[GenRequest]:
    """n per prompt, in the order of the choices. ValueError names what cannot be done."""
    gconfig, requests = call.gconfig, []
    for prompt in prompts:
        for sample in range(gconfig.n_samples):
            seed = None if gconfig.seed is None else gconfig.seed + sample
            request = GenRequest(
                rid=f"{completion_id}.{len(requests)}",
                input_ids=prompt,
                gconfig=gconfig.new(n_samples=1, seed=seed),
                progress_tokens=1 if call.stream else 0,
                grammar=grammar,
            )
            requests.append(text.prepare(request))
    return requests


class _WholeReply(Response):
    """One JSON object, made by `reply` when all choices are complete."""

    def __init__(
        self,
        loop: EngineLoop,
        requests: list[GenRequest],
        reply: Callable[[Sequence[Finished]], dict[str, Any]],
    ) -> None:
        super().__init__()
        self._loop = loop
        self._requests = requests
        self._reply = reply

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


class _StreamedReply(Response):
    """Server-sent events, one chunk per step and choice.

    The status is sent with the first results, so that a refused request gets an error status.
    """

    def __init__(self, loop: EngineLoop, head: ReplyHead, requests: list[GenRequest]) -> None:
        super().__init__()
        self._loop = loop
        self._head = head
        self._requests = requests
        kind = ChatChoice if isinstance(head.call, ChatCall) else CompletionChoice
        self._choices = {request.rid: kind(head, i) for i, request in enumerate(requests)}
        self._num_tokens = {request.rid: 0 for request in requests}
        self._cached: dict[str, int] = {}  # tokens of the prompt of each choice that has ended

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
                self._cached[one.rid] = finished.cached_tokens
                tokens, logprobs = finished.output_tokens[start:], finished.output_logprobs[start:]
                chunks += choice.end(tokens, logprobs, finished.stop_reason)
        return chunks

    def _last_events(self) -> bytes:
        head, last = self._head, b"data: [DONE]\n\n"
        if not head.call.include_usage:
            return last
        cached = head.cached_tokens([self._cached[request.rid] for request in self._requests])
        usage = usage_of(head.num_prompt_tokens, sum(self._num_tokens.values()), cached)
        return _events([usage_chunk(head.call, head.completion_id, head.created, usage)]) + last


def _events(chunks: list[Chunk]) -> bytes:
    return "".join(f"data: {dumps(chunk)}\n\n" for chunk in chunks).encode()


def _fault(results: list[Result]) -> WireError | None:
    """The error to send instead of the rest of the reply, if any."""
    for one in results:
        if isinstance(one, Refusal):
            return refusal(one.message) if one.kind == "request" else WireError(503, one.message)
        if isinstance(one, Progress) and one.is_broken:
            fault = "a log-probability is not finite; look at the weights the engine was given"
            return WireError(503, fault)
    return None


async def _answer_wire_error(request: Request, err: WireError) -> Response:
    if request.scope["path"].startswith("/v1/messages"):
        return JsonReply(error_of(err), err.status)
    return _error_response(err)


def _error_response(err: WireError) -> Response:
    return JsonReply(error_body(err), err.status)


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
    prompts: Sequence[list[int]] = ()

    def reader(self) -> ChatReader:
        """Of one output of a chat."""
        assert isinstance(self.call, ChatCall)
        return ChatReader(
            self.call,
            self.tokenizer,
            tool_format=self.tool_format,
            stop_ids=self.stop_ids,
            in_reasoning=self.in_reasoning,
        )

    def grammar(self) -> Grammar | None:
        if not isinstance(self.call, ChatCall):
            return None
        return reply_grammar(
            self.call,
            tool_format=self.tool_format,
            tokenizer=self.tokenizer,
            in_reasoning=self.in_reasoning,
        )

    def text_reader(self) -> TextReader:
        return TextReader(self.call.gconfig, self.tokenizer, stop_ids=self.stop_ids)

    def prompt_of(self, choice: int) -> list[int]:
        return self.prompts[choice // self.call.gconfig.n_samples]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    def cached_tokens(self, found: Sequence[int]) -> int:
        """Of all prompts, by what each choice found. The samples of a prompt compute it once: the
        first of them found the least."""
        n = self.call.gconfig.n_samples
        return sum(min(found[start : start + n]) for start in range(0, len(found), n))

    def reply(self, finished: Sequence[Finished]) -> dict[str, Any]:
        place, call = (self.completion_id, self.created), self.call
        rest = (self.num_prompt_tokens, self.tokenizer)
        cached = self.cached_tokens([one.cached_tokens for one in finished])
        if isinstance(call, ChatCall):
            chats = [self._chat_output(one) for one in finished]
            prompt = self.prompts[0]
            return chat_reply(call, *place, chats, *rest, prompt_ids=prompt, cached_tokens=cached)
        texts = [self._text_output(one) for one in finished]
        return completion_reply(
            call, *place, texts, *rest, prompts=self.prompts, cached_tokens=cached
        )

    def _chat_output(self, one: Finished) -> ChatOutput:
        reader = self.reader()
        reader.push(one.output_tokens)
        reader.finish()
        return reader.output(one.output_tokens, one.output_logprobs, one.stop_reason)

    def _text_output(self, one: Finished) -> Output:
        reader = self.text_reader()
        text = reader.push(one.output_tokens) + reader.finish()
        output = one.output_tokens, one.output_logprobs, one.stop_reason
        return Output(*output, text, reader.stop_string)


class CompletionChoice:
    def __init__(self, head: ReplyHead, index: int) -> None:
        assert isinstance(head.call, CompletionCall)
        self._reader = head.text_reader()
        self._stream = CompletionStream(
            head.call, head.completion_id, head.created, head.tokenizer, index,
            prompt_ids=head.prompt_of(index),
        )  # fmt: skip

    def begin(self) -> list[Chunk]:
        return []

    def advance(self, tokens: list[int], logprobs: list[float]) -> list[Chunk]:
        return self._stream.push(self._reader.push(tokens), tokens, logprobs)

    def end(self, tokens: list[int], logprobs: list[float], reason: StopReason) -> list[Chunk]:
        text = self._reader.push(tokens) + self._reader.finish()
        chunks = self._stream.push(text, tokens, logprobs)
        return [*chunks, *self._stream.finish(reason, self._reader.stop_string)]


class ChatChoice:
    def __init__(self, head: ReplyHead, index: int) -> None:
        assert isinstance(head.call, ChatCall)
        self._reader = head.reader()
        self._stream = ChatStream(
            head.call, head.completion_id, head.created, head.tokenizer, index,
            prompt_ids=head.prompt_of(index),
        )  # fmt: skip

    def begin(self) -> list[Chunk]:
        return self._stream.begin()

    def advance(self, tokens: list[int], logprobs: list[float]) -> list[Chunk]:
        return self._stream.push(self._reader.push(tokens), tokens, logprobs)

    def end(self, tokens: list[int], logprobs: list[float], reason: StopReason) -> list[Chunk]:
        events = [*self._reader.push(tokens), *self._reader.finish()]
        chunks = self._stream.push(events, tokens, logprobs)
        return [*chunks, *self._stream.finish(reason, self._reader.stop_string)]
