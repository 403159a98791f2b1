"""One model call of an agent: messages to tokens, tokens to a reply, both recorded.

    parse_call -> prompt_ids -> engine.agenerate -> visible text, tool calls -> answer -> recorded

Token in, token out: sampled tokens are kept as sampled. With `chat_template_type: concat` a later
turn appends the tokens of the new messages and never re-tokenises the past.

Streams (`chat_events`) are server-sent events of a reply that is already complete: the interaction
is recorded before the first event, and a client that disconnects midway changes nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.api.interaction import InteractionCache, InteractionWithTokenLogpReward, next_created
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.json_text import dumps
from areal.openai.errors import WireError, error_body, refusal
from areal.openai.parsing.formats import TOOL_FORMATS
from areal.openai.parsing.parser import begins_in_reasoning
from areal.openai.prompts import chat_prompt_ids, chat_prompt_text
from areal.openai.replies import Output, chat_chunk, chat_reply, usage_chunk
from areal.openai.requests import ChatCall, CompletionCall, check_servable, parse_chat
from areal.openai.text_stream import TextStream
from areal.utils import logging
from areal.utils.http_body import Body

if TYPE_CHECKING:
    from areal.agents.session import Session, SessionOptions
    from areal.api.config.inference import GenerationHyperparameters


logger = logging.getLogger("AgentProxy")

# Placeholder for a reply in a rendered chat. Random, so that no message can contain it.
_REPLY_PLACE = f"@reply-{secrets.token_hex(8)}@"


@dataclass(frozen=True, slots=True)
class Completion:
    """Result of one call: the reply for the client and the interaction for the session."""

    asked: dict[str, Any]  # the request body, in its route's format
    call: ChatCall
    reply: dict[str, Any]  # a chat completion in OpenAI's format, whatever the route
    interaction: InteractionWithTokenLogpReward

    @property
    def message(self) -> dict[str, Any]:
        return self.reply["choices"][0]["message"]

    @property
    def finish_reason(self) -> str:
        return self.reply["choices"][0]["finish_reason"]


@dataclass(frozen=True, slots=True)
class Route:
    """One API. `chat_body(body, cache)` may read the session's earlier interactions."""

    id_prefix: str  # of the ids by which clients assign rewards
    body: type[Body]
    chat_body: Callable[[dict[str, Any], InteractionCache], dict[str, Any]]
    reply: Callable[[Completion], dict[str, Any]]
    events: Callable[[Completion], Iterator[bytes]]  # the reply as a stream
    note: Callable[[Completion], None]  # stores in the interaction what the client received
    error: Callable[[WireError], dict[str, Any]] = error_body


@dataclass(frozen=True, slots=True)
class Answer:
    """The HTTP response, ready to be sent."""

    content: bytes
    media_type: str


async def complete(session: Session, route: Route, body: dict[str, Any]) -> Answer:
    """Answer one request and record it.

    A WireError is the caller's fault, anything else is ours. Recording comes last, with the whole
    answer at hand: a reply that the agent never gets is not part of its episode.
    """
    created = next_created()
    call = parse_call(session.options, route.chat_body(body, session.cache))
    parent = session.cache.find_parent(call.messages, call.tools)
    if parent is not None:
        messages = _with_reasoning(call.messages, parent.whole_chat())
        call = dataclasses.replace(call, messages=messages)
        if len(messages) == len(parent.whole_chat()) and not _is_cut(parent):
            # The client asks for another turn after a reply that has ended: no prefill.
            call = dataclasses.replace(call, continues_final=False)
    # Before the first await: concurrent calls draw seeds in the order of their arrival.
    seed = session.next_seed() if call.gconfig.seed is None else call.gconfig.seed
    # In a thread: a long chat takes milliseconds, which would block other episodes on this loop.
    input_ids, parent = await asyncio.to_thread(prompt_ids, session.options, call, parent)
    response = await generate(session, call.gconfig.new(seed=seed), input_ids)
    reply = chat_reply(
        call,
        f"{route.id_prefix}{uuid.uuid4().hex}",
        int(time.time()),
        [_output(session.options, call, response)],
        prompt_tokens=len(input_ids),
        tokenizer=session.options.tokenizer,
        prompt_ids=input_ids,
        tool_format=session.options.tool_format,
        reasoning=session.options.config.reasoning_parser,
        in_reasoning=begins_in_reasoning(session.options.tokenizer, input_ids),
    )
    messages, said = _recorded(call, reply["choices"][0]["message"])
    interaction = InteractionWithTokenLogpReward(
        response,
        messages=messages,
        output_message_list=[said],
        parent=parent,
        chat_template_type=session.options.config.chat_template_type,
        tools=call.tools,
        created=created,
    )
    done = Completion(body, call, reply, interaction)
    route.note(done)
    if call.stream:
        answer = Answer(b"".join(route.events(done)), "text/event-stream")
    else:
        answer = Answer(dumps(route.reply(done)).encode(), "application/json")
    session.cache.add(reply["id"], interaction)
    return answer


def parse_call(options: SessionOptions, body: dict[str, Any]) -> ChatCall:
    """The parsed request; options it leaves out come from the run's `gconfig`."""
    call = parse_chat(with_defaults(options, body))
    return dataclasses.replace(call, gconfig=checked_gconfig(options, call))


def with_defaults(options: SessionOptions, body: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in body.items() if value is not None}
    defaults = options.gconfig.new(n_samples=1).to_openai_completions_args_dict()
    defaults |= defaults.pop("extra_body", {})
    if "max_tokens" in given:
        del defaults["max_completion_tokens"]
    return {**defaults, **given}


def checked_gconfig(
    options: SessionOptions, call: ChatCall | CompletionCall
) -> GenerationHyperparameters:
    check_servable(call)
    if call.gconfig.n_samples > 1:
        raise WireError(
            400, "n: one completion is one interaction here, so it must be 1; call again", "n"
        )
    _check_temperature(options.gconfig, call.gconfig)
    if call.gconfig.ignore_eos:
        return call.gconfig
    return call.gconfig.new_with_stop_and_pad_token_ids(options.tokenizer)


def _is_cut(item: InteractionWithTokenLogpReward) -> bool:
    return item.model_response.stop_reason == "length"


def _recorded(call: ChatCall, reply: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The chat before the assistant's turn, and the turn. A text that was continued is part of it:
    clients send both back as one message."""
    if not call.continues_final:
        return call.messages, reply
    *before, begun = call.messages
    return before, {**reply, "content": begun["content"] + (reply["content"] or "")}


def _with_reasoning(
    messages: list[dict[str, Any]], recorded: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """`messages` that begin with a recorded chat, with the reasoning that clients leave out.

    Some templates show the model its own reasoning of earlier turns.
    """
    thoughts = [{k: v for k, v in one.items() if k == "reasoning_content"} for one in recorded]
    known = [{**own, **one} for own, one in zip(thoughts, messages, strict=False)]
    return [*known, *messages[len(known) :]]


def prompt_ids(
    options: SessionOptions, call: ChatCall, parent: InteractionWithTokenLogpReward | None
) -> tuple[list[int], InteractionWithTokenLogpReward | None]:
    """The whole prompt, and the interaction it continues.

    With `concat` it starts with all tokens of the parent. If the template leaves out the parent's
    reply there is nothing to continue: the prompt begins a new chat, by the template alone.
    """
    if parent is None or options.config.chat_template_type == "hf":
        return chat_prompt_ids(options.tokenizer, call), parent
    before = [*parent.model_response.input_tokens, *parent.model_response.output_tokens]
    new = call.messages[len(parent.whole_chat()) :]
    after = _ids_after_reply(options.tokenizer, call, parent.messages, new)
    if after is None:
        return chat_prompt_ids(options.tokenizer, call), None
    # The end-of-turn token comes from the model, or else from the template: keep one.
    return before + (after[1:] if after[:1] == before[-1:] else after), parent


def _ids_after_reply(
    tokenizer: Any, call: ChatCall, before: list[dict[str, Any]], new: list[dict[str, Any]]
) -> list[int] | None:
    """Tokens from the end of the assistant's turn through `new` to the header of its next; None if
    the template leaves that turn out.

    Cut from the rendered text after the placeholder of the reply: a template may rewrite earlier
    turns (drop their reasoning), so nothing before the placeholder is used.
    """
    chat = [*before, {"role": "assistant", "content": _REPLY_PLACE}, *new]
    text = chat_prompt_text(tokenizer, dataclasses.replace(call, messages=chat))
    _, found, after = text.rpartition(_REPLY_PLACE)
    return tokenizer(after, add_special_tokens=False)["input_ids"] if found else None


async def generate(
    session: Session, gconfig: GenerationHyperparameters, input_ids: list[int]
) -> ModelResponse:
    request = ModelRequest(
        input_ids=input_ids, gconfig=gconfig, tokenizer=session.options.tokenizer
    )
    try:
        response = await session.engine.agenerate(request)
    except ValueError as error:  # the engine rejects the request: too long, an unsupported option
        raise refusal(str(error)) from error
    if response.stop_reason == "abort":
        raise RuntimeError(f"generation was aborted after {response.output_len} tokens")
    return response


def _output(options: SessionOptions, call: ChatCall, response: ModelResponse) -> Output:
    marks = TOOL_FORMATS[options.tool_format].marks(has_tools=bool(call.tools))
    return output_of(options, call.gconfig, response, keep=marks)


def output_of(
    options: SessionOptions,
    gconfig: GenerationHyperparameters,
    response: ModelResponse,
    *,
    keep: frozenset[str] = frozenset(),
) -> Output:
    shown = response.output_tokens
    if shown and shown[-1] in gconfig.stop_token_ids:
        shown = shown[:-1]
    stream = TextStream(options.tokenizer, gconfig, keep=keep)
    return Output(
        response.output_tokens,
        response.output_logprobs,
        response.stop_reason,
        stream.push(shown) + stream.finish(),
        stream.stop_string,
    )


def _check_temperature(wanted: GenerationHyperparameters, asked: GenerationHyperparameters) -> None:
    """Training recomputes log-probabilities at the run's temperature."""
    given = 0.0 if asked.greedy else asked.temperature
    if not wanted.greedy and given != wanted.temperature:
        _warn_of_temperature(given, wanted.temperature)


@functools.cache
def _warn_of_temperature(given: float, wanted: float) -> None:
    logger.warning(
        "an agent samples with temperature %g, and its tokens are trained on with "
        "gconfig.temperature=%g: leave the temperature to the run",
        given,
        wanted,
    )


def chat_events(done: Completion) -> Iterator[bytes]:
    for chunk in _chunks(done):
        yield f"data: {dumps(chunk)}\n\n".encode()
    yield b"data: [DONE]\n\n"


def named_event(event: dict[str, Any]) -> bytes:
    """An event that carries its type twice, as Anthropic and /v1/responses clients expect."""
    return f"event: {event['type']}\ndata: {dumps(event)}\n\n".encode()


def _chunks(done: Completion) -> Iterator[dict[str, Any]]:
    reply, choice = done.reply, done.reply["choices"][0]
    place = (done.call, reply["id"], reply["created"])
    first = chat_chunk(*place, 0, {"role": "assistant", "content": ""})
    if done.call.return_token_ids:
        first["prompt_token_ids"] = reply["prompt_token_ids"]
        first["choices"][0]["token_ids"] = choice["token_ids"]
    yield first
    if reasoning := done.message.get("reasoning_content"):
        yield chat_chunk(*place, 0, {"reasoning_content": reasoning})
    if done.message["content"]:
        delta = {"content": done.message["content"]}
        yield chat_chunk(*place, 0, delta, logprobs=choice["logprobs"])
    for index, call in enumerate(done.message.get("tool_calls", ())):
        yield chat_chunk(*place, 0, {"tool_calls": [{"index": index, **call}]})
    yield chat_chunk(*place, 0, {}, finish_reason=done.finish_reason)
    if done.call.include_usage:
        yield usage_chunk(*place, reply["usage"])
