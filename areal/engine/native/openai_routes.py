"""The routes of the native server for clients made for OpenAI, Anthropic and vLLM.

| route                          | answer                                                      |
|--------------------------------|-------------------------------------------------------------|
| POST /v1/chat/completions      | messages, by the model's chat template, streamed or not     |
| POST /v1/responses             | OpenAI's responses, streamed or not                         |
| POST /v1/messages              | Anthropic's messages, streamed or not                       |
| POST /v1/messages/count_tokens | the number of tokens of Anthropic's messages                |
| POST /v1/completions           | prompts as texts or token ids, streamed or not; with `echo` |
|                                | the prompt too, and its log-probabilities                   |
| POST /inference/v1/generate    | tokens for tokens, as vLLM spells it                        |
| GET /v1/models                 | the model and its adapters; /v1/models/NAME: by any name    |
| GET or HEAD /, /api/hello      | 200: clients look whether somebody is there                 |

Requests and replies are translated by `areal.openai`; errors have the shape of the route's API.
A request whose `model` is the name of a loaded adapter gets that; any other name is the model's.
There are no sessions: nothing is remembered between two requests. The n samples of a prompt are n
requests that share its pages; with a seed, sample i draws with seed + i.

A stream begins with the first results, so that a refused request gets an error status, or after a
long wait, with a keep-alive; a later failure is an error event of its API.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import Response

from areal.api.io_struct import Grammar, StopReason
from areal.engine.native.loop import EngineLoop, Receiver, Result
from areal.engine.native.scoring import ScoredTokens
from areal.engine.native.sequence import Finished, GenRequest, Progress
from areal.engine.native.tokenizer import ModelText
from areal.engine.native.wire import Refusal, Reply
from areal.models.vision.prompt_images import PromptImages
from areal.openai.anthropic_requests import PromptBody, prompt_body
from areal.openai.apis import CHAT_APIS, PROMPT_APIS, Api, ChatApi, error_for
from areal.openai.errors import WireError, loads_body, refusal
from areal.openai.grammars import reply_grammar
from areal.openai.models import model_card, model_list
from areal.openai.parsing.formats import format_of_template
from areal.openai.parsing.parser import begins_in_reasoning
from areal.openai.prompts import chat_prompt_ids
from areal.openai.replies import (
    C,
    ChatOutput,
    ChatReader,
    Completion,
    Echo,
    Output,
    ReplyHead,
    TextReader,
)
from areal.openai.requests import (
    ChatCall,
    CompletionCall,
    check_servable,
    parse_chat,
    parse_completion,
    parse_generate,
)
from areal.openai.streams import Encoder, WireEvent
from areal.openai.text_stream import token_text
from areal.utils.chat_template import warm_up
from areal.utils.http_body import json_body
from areal.utils.http_server import STREAM_HEADERS, JsonReply, add_hello, read_body

Call = ChatCall | CompletionCall
Parse = Callable[[dict[str, Any]], Call]
Prepare = Callable[[Api, dict[str, Any], Any, ModelText], "Prepared"]


class Reader(Protocol):
    """ChatReader, TextReader, or `_Unread`."""

    def push(self, tokens: Sequence[int]) -> Any: ...

    def finish(self) -> Any: ...

    def output(
        self, tokens: list[int], logprobs: list[float], stop_reason: StopReason
    ) -> ChatOutput | Output: ...


def add_openai_routes(
    app: FastAPI, loop: EngineLoop, text: ModelText, *, model: str, silence_s: float
) -> None:
    """`model` is the folder; requests may give it any name but an adapter's. A stream without news
    gets a keep-alive every `silence_s`."""
    app.exception_handler(WireError)(_answer_wire_error)

    def add(path: str, api: Api, parse: Parse, prepare: Prepare) -> None:
        async def answer(request: Request) -> Response:
            body = loads_body(await read_body(request))
            call = parse(body)
            check_servable(call)
            call = replace(call, model=call.model or model)
            if call.model in loop.adapters:
                call = replace(call, gconfig=call.gconfig.new(lora_name=call.model))
            # In a thread: loading the tokenizer takes seconds, encoding a long prompt milliseconds.
            ready = await asyncio.to_thread(prepare, api, body, call, text)
            return (
                _StreamedReply(loop, ready, silence_s) if call.stream else _WholeReply(loop, ready)
            )

        app.add_api_route(path, answer, methods=["POST"], openapi_extra=json_body(api.body))

    for path, api in CHAT_APIS.items():
        add(path, api, partial(_parse_chat, api), _prepare_chat)
    path = "/v1/completions"
    add(path, PROMPT_APIS[path], parse_completion, _prepare_completion)
    path = "/inference/v1/generate"
    add(path, PROMPT_APIS[path], parse_generate, _prepare_generation)

    @app.post("/v1/messages/count_tokens", openapi_extra=json_body(PromptBody))
    async def count_tokens(request: Request) -> dict[str, int]:
        call = parse_chat(prompt_body(loads_body(await read_body(request))))
        prompt, _ = await asyncio.to_thread(_chat_prompt, call, text)
        return {"input_tokens": len(prompt)}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return model_list(model, *loop.adapters)

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        return model_card(name)

    add_hello(app)


def _parse_chat(api: ChatApi, body: dict[str, Any]) -> ChatCall:
    return parse_chat(api.chat_body(body, None))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is understood: what the engine is asked, and how its outputs are told."""

    api: Api
    head: ReplyHead[Any]
    requests: list[GenRequest]  # in the order of the choices
    reader: Callable[[], Reader]  # of one output


def _prepare_chat(api: Api, body: dict[str, Any], call: ChatCall, text: ModelText) -> Prepared:
    warm_up()
    tokenizer = _tokenizer(text)
    prompt, images = _chat_prompt(call, text)
    head = _head(api, body, call, [prompt], tokenizer)
    form = format_of_template(tokenizer.chat_template)
    options = {"tool_format": form, "in_reasoning": begins_in_reasoning(tokenizer, prompt)}
    reader = partial(ChatReader, call, tokenizer, stop_ids=_stop_ids(call, text), **options)
    with _callers_fault():
        grammar = reply_grammar(call, tokenizer=tokenizer, **options)
        return Prepared(api, head, _requests(head, text, grammar, call.images, images), reader)


def _chat_prompt(call: ChatCall, text: ModelText) -> tuple[list[int], PromptImages | None]:
    """Its tokens, those of images too, and the images."""
    prompt = chat_prompt_ids(_tokenizer(text), call)
    if not call.images:
        return prompt, None
    with _callers_fault():
        return text.read_images(prompt, call.images)


def _prepare_completion(
    api: Api, body: dict[str, Any], call: CompletionCall, text: ModelText
) -> Prepared:
    if call.echo and call.gconfig.lora_name:
        raise WireError(400, f"echo: not supported for the adapter {call.model!r}", "echo")
    tokenizer = _tokenizer(text)
    prompts = [tokenizer(p)["input_ids"] if isinstance(p, str) else p for p in call.prompt]
    head = _head(api, body, call, prompts, tokenizer)
    reader = partial(TextReader, call.gconfig, tokenizer, stop_ids=_stop_ids(call, text))
    with _callers_fault():
        return Prepared(api, head, _requests(head, text), reader)


def _prepare_generation(
    api: Api, body: dict[str, Any], call: CompletionCall, text: ModelText
) -> Prepared:
    """Needs no tokenizer."""
    prompts = [prompt for prompt in call.prompt if not isinstance(prompt, str)]
    head = _head(api, body, call, prompts, None)
    with _callers_fault():
        return Prepared(api, head, _requests(head, text), _Unread)


def _head(
    api: Api, body: dict[str, Any], call: C, prompts: list[list[int]], tokenizer: Any
) -> ReplyHead[C]:
    name = f"{api.id_prefix}{uuid.uuid4().hex}"
    return ReplyHead(body, call, name, int(time.time()), prompts, tokenizer)


def _stop_ids(call: Call, text: ModelText) -> frozenset[int]:
    """Tokens that end an output and are not part of its text."""
    eos_ids = [] if call.gconfig.ignore_eos else text.eos_ids
    return frozenset([*call.gconfig.stop_token_ids, *eos_ids])


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
    head: ReplyHead[Any],
    text: ModelText,
    grammar: Grammar | None = None,
    image_data: Sequence[str] = (),
    images: PromptImages | None = None,
) -> list[GenRequest]:
    """n per prompt, in the order of the choices. ValueError names what cannot be done."""
    call: Call = head.call
    gconfig, requests = call.gconfig, []
    for prompt in head.prompts:
        for sample in range(gconfig.n_samples):
            seed = None if gconfig.seed is None else gconfig.seed + sample
            request = GenRequest(
                rid=f"{head.id}.{len(requests)}",
                input_ids=prompt,
                gconfig=gconfig.new(n_samples=1, seed=seed),
                progress_tokens=1 if call.stream else 0,
                grammar=grammar,
                image_data=list(image_data),
                images=images,
            )
            requests.append(text.prepare(request))
    return requests


class _Unread:
    """The reader of an output whose reply has no text."""

    def push(self, tokens: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""

    def output(self, tokens: list[int], logprobs: list[float], stop_reason: StopReason) -> Output:
        return Output(tokens, logprobs, stop_reason, "")


class _WholeReply(Response):
    """One JSON object, when all choices are complete."""

    def __init__(self, loop: EngineLoop, ready: Prepared) -> None:
        super().__init__()
        self._loop = loop
        self._ready = ready

    async def __call__(self, scope, receive, send) -> None:
        finished: dict[str, Finished] = {}
        async with Receiver(self._loop, receive) as receiver:
            receiver.submit(self._ready.requests)
            while receiver.unfinished:
                results = await receiver.next()
                if results is None:
                    return
                if fault := _fault(results):
                    await _error_response(self._ready.api, fault)(scope, receive, send)
                    return
                replies = (one for one in results if isinstance(one, Reply))
                finished.update({reply.rid: reply.finished for reply in replies})
        ordered = [finished[request.rid] for request in self._ready.requests]
        # In a thread: decoding many long outputs would block the event loop.
        outputs = await asyncio.to_thread(lambda: list(map(self._output, ordered)))
        if isinstance(self._ready.head.call, CompletionCall) and self._ready.head.call.echo:
            outputs = await _with_prompts(self._loop, self._ready, outputs)
        response = await asyncio.to_thread(lambda: JsonReply(self._reply(ordered, outputs)))
        await response(scope, receive, send)

    def _output(self, one: Finished) -> ChatOutput | Output:
        reader = self._ready.reader()
        reader.push(one.output_tokens)
        reader.finish()
        return reader.output(one.output_tokens, one.output_logprobs, one.stop_reason)

    def _reply(self, finished: Sequence[Finished], outputs: Sequence[Any]) -> dict[str, Any]:
        ready = self._ready
        cached = ready.head.num_cached([one.cached_tokens for one in finished])
        return ready.api.reply(Completion(ready.head, outputs, cached))


async def _with_prompts(
    loop: EngineLoop, ready: Prepared, outputs: Sequence[Any]
) -> list[ChatOutput | Output]:
    """Each output with its prompt before it. The prompts are scored by the weights there are now;
    likely tokens are those of the model itself, whatever the sampling options."""
    head, call = ready.head, ready.head.call
    if not call.generates:
        ended = {"token_ids": [], "logprobs": [], "text": "", "stop_reason": "length"}
        outputs = [replace(output, **ended, stop_string=None) for output in outputs]
    prompts = [head.of_choice(index).prompt_ids for index in range(len(outputs))]
    scored: Sequence[ScoredTokens] = []
    if call.logprobs:
        pairs = zip(prompts, outputs, strict=True)
        sequences = [[*prompt, *output.token_ids] for prompt, output in pairs]
        scored = await asyncio.wrap_future(
            loop.call(lambda engine: engine.score(sequences, call.top_logprobs))
        )

    def echo(index: int, prompt: list[int]) -> Echo:
        given = call.prompt[index // call.gconfig.n_samples]
        text = given if isinstance(given, str) else head.tokenizer.decode(prompt)
        if not scored:
            return Echo(text, prompt, [None] * len(prompt), None)
        return _scored_echo(text, prompt, scored[index], head.tokenizer, call.top_logprobs > 0)

    echoes = [echo(*place) for place in enumerate(prompts)]
    return [replace(output, echo=one) for output, one in zip(outputs, echoes, strict=True)]


def _scored_echo(
    text: str, prompt: list[int], scored: ScoredTokens, tokenizer: Any, has_top: bool
) -> Echo:
    top: list[dict[str, float] | None] | None = None
    if has_top:
        found = [{token_text(tokenizer, t): lp for t, lp in likely} for likely in scored.top[:-1]]
        top = [None, *found]
    return Echo(text, prompt, [None, *scored.logprobs[: len(prompt) - 1]], top)


class _StreamedReply(Response):
    """Server-sent events, those of one step together.

    The status is sent with the first results, so that a refused request gets an error status, or
    with the first keep-alive.
    """

    def __init__(self, loop: EngineLoop, ready: Prepared, silence_s: float) -> None:
        super().__init__()
        self._loop = loop
        self._ready = ready
        self._silence_s = silence_s
        heads = map(ready.head.of_choice, range(len(ready.requests)))
        self._choices = {
            request.rid: _Choice(ready.reader(), ready.api.encoder(head))
            for request, head in zip(ready.requests, heads, strict=True)
        }
        self._has_begun = False

    async def __call__(self, scope, receive, send) -> None:
        async with Receiver(self._loop, receive) as receiver:
            receiver.submit(self._ready.requests)
            is_done = False
            while not is_done:
                results = await self._next(receiver)
                if results is None:
                    return
                fault = _fault(results)
                if not self._has_begun:
                    if fault is not None:
                        await _error_response(self._ready.api, fault)(scope, receive, send)
                        return
                    head = {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
                    await send(head)
                is_done = fault is not None or not receiver.unfinished
                body = self._data(results, fault, is_done=is_done)
                if body or is_done:
                    message = {"type": "http.response.body", "body": body}
                    await send({**message, "more_body": not is_done})

    async def _next(self, receiver: Receiver) -> list[Result] | None:
        """As `Receiver.next`, but nothing after a long wait."""
        try:
            async with asyncio.timeout(self._silence_s):
                return await receiver.next()
        except TimeoutError:
            return []

    def _data(self, results: list[Result], fault: WireError | None, *, is_done: bool) -> bytes:
        wire, choices = self._ready.api.events, self._choices.values()
        events: list[WireEvent] = []
        if not self._has_begun:
            events += [event for choice in choices for event in choice.encoder.begin()]
            self._has_begun = True
        if fault is not None:
            first = next(iter(choices))
            return wire.framed([*events, *first.encoder.fail(fault)])
        for one in results:
            events += self._events(one)
        alive = b"" if results else wire.keep_alive
        return wire.framed(events) + alive + (wire.end if is_done else b"")

    def _events(self, one: Result) -> Sequence[WireEvent]:
        choice = self._choices[one.rid]
        if isinstance(one, Progress):
            return choice.advance(one.tokens, one.logprobs)
        assert isinstance(one, Reply), "`_fault` has found the refusals"
        events = choice.end(one.finished)
        choices = self._choices.values()
        usage = None
        if all(other.output is not None for other in choices):
            cached = self._ready.head.num_cached([other.cached_tokens for other in choices])
            outputs = [other.output for other in choices]
            usage = Completion(self._ready.head, outputs, cached).usage
        return [*events, *choice.encoder.finish(choice.output, usage)]


class _Choice:
    """One choice of a stream: its tokens, as they come, to events."""

    def __init__(self, reader: Reader, encoder: Encoder) -> None:
        self.encoder = encoder
        self.output: ChatOutput | Output | None = None  # when it is complete
        self.cached_tokens = 0  # of the prompt, then
        self._reader = reader
        self._num_tokens = 0

    def advance(self, tokens: list[int], logprobs: list[float]) -> Sequence[WireEvent]:
        self._num_tokens += len(tokens)
        return self.encoder.push(self._reader.push(tokens), tokens, logprobs)

    def end(self, finished: Finished) -> list[WireEvent]:
        """The rest of it but for the encoder's `finish`."""
        tokens, logprobs = finished.output_tokens, finished.output_logprobs
        rest = tokens[self._num_tokens :], logprobs[self._num_tokens :]
        events = [*self.advance(*rest), *self.encoder.push(self._reader.finish(), [], [])]
        self.output = self._reader.output(tokens, logprobs, finished.stop_reason)
        self.cached_tokens = finished.cached_tokens
        return events


def _fault(results: list[Result]) -> WireError | None:
    """The error to send instead of the rest of the reply, if any."""
    for one in results:
        if isinstance(one, Refusal):
            return refusal(one.message) if one.kind == "request" else WireError(503, one.message)
        if isinstance(one, Progress) and one.is_broken:
            fault = "a log-probability is not finite; look at the weights the engine was given"
            return WireError(503, fault)
    return None


def _error_response(api: Api, err: WireError) -> Response:
    return JsonReply(api.error(err), err.status)


async def _answer_wire_error(request: Request, err: WireError) -> Response:
    return JsonReply(error_for(request.scope["path"], request.headers, err), err.status)
