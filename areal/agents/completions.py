"""One model call of an agent: messages to tokens, tokens to a reply, both recorded.

    parse_call -> read_prompt -> engine.agenerate -> parts of the output -> reply -> recorded
                                       | tokens as they are sampled
                                       +--> parser events -> events of the API, if it is streamed

Token in, token out: sampled tokens are kept as sampled. With `chat_template_type: concat` a later
turn appends the tokens of the new messages and never re-tokenises the past. Images are read before
the prompt is made (sight.py): it has the tokens of its images, and the record their names.

A call of n choices is n interactions of one turn, with one parent; the first has the completion's
id, the others `ID-1`, `ID-2`, ...

A call is recorded when its output is complete, before the last event of a stream is sent. One that
is cancelled before (the client has left, the session has ended) frees its generation and leaves no
record.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import secrets
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.agents.sight import refuse_images
from areal.agents.streams import ReplyStream
from areal.api.image_references import ShownImage
from areal.api.interaction import InteractionWithTokenLogpReward, next_created
from areal.api.io_struct import Grammar, ModelRequest, ModelResponse
from areal.api.json_text import dumps
from areal.openai.apis import ChatApi
from areal.openai.content_parts import image_names
from areal.openai.errors import WireError, refusal
from areal.openai.grammars import reply_grammar
from areal.openai.parsing.parser import begins_in_reasoning
from areal.openai.prompts import chat_prompt_ids, chat_prompt_text
from areal.openai.replies import ChatReader, Completion, ReplyHead, chat_message
from areal.openai.requests import ChatCall, CompletionCall, check_servable, parse_chat
from areal.utils import logging

if TYPE_CHECKING:
    from areal.agents.session import Session, SessionOptions
    from areal.api.config.inference import GenerationHyperparameters


logger = logging.getLogger("AgentProxy")

# Placeholder for a reply in a rendered chat. Random, so that no message can contain it.
_REPLY_PLACE = f"@reply-{secrets.token_hex(8)}@"


@dataclass(frozen=True, slots=True)
class Route:
    api: ChatApi
    # note(item, asked, reply) stores in the interaction what the client sent and received.
    note: Callable[[InteractionWithTokenLogpReward, dict[str, Any], dict[str, Any]], None]


async def complete(
    session: Session, route: Route, body: dict[str, Any], stream: ReplyStream
) -> bytes:
    """Answer one request and record it: the reply as JSON, or nothing if it went to `stream`.

    A WireError is the caller's fault, anything else is ours. Recording comes last, with all that is
    left to send at hand: a reply that the agent never gets is not part of its episode.
    """
    created, options, api = next_created(), session.options, route.api
    call = parse_call(options, api.chat_body(body, session.cache))
    # Before the first await: concurrent calls draw seeds in the order of their arrival.
    seeds = _seeds(session, call.gconfig)
    call, images = await look(session, call)
    call, parent = _continued(session, call)
    # In a thread: a long chat takes milliseconds, which would block other episodes on this loop.
    prompt = await asyncio.to_thread(read_prompt, options, call, images, parent)
    name = f"{api.id_prefix}{uuid.uuid4().hex}"
    head = ReplyHead(body, call, name, int(time.time()), [prompt.ids], options.tokenizer)
    in_reasoning = begins_in_reasoning(options.tokenizer, prompt.ids)
    readers = [_reader(options, call, in_reasoning) for _ in seeds]
    if call.stream:
        stream.open(*(api.encoder(head.of_choice(i)) for i in range(len(seeds))))
    grammar = _grammar(options, call, in_reasoning)
    responses = await _sample(session, head, prompt, readers, seeds, grammar, stream)
    last = [reader.finish() for reader in readers]
    outputs = [
        reader.output(response.output_tokens, response.output_logprobs, response.stop_reason)
        for reader, response in zip(readers, responses, strict=True)
    ]
    done = Completion(head, outputs, head.num_cached([one.cached_tokens for one in responses]))
    items = {
        one.head.id: _interaction(session, route, one, response, prompt, created=created)
        for one, response in zip(_choices(done), responses, strict=True)
    }
    whole = b"" if call.stream else dumps(api.reply(done)).encode()
    rest = stream.last(last, outputs, done.usage) if call.stream else b""
    for choice_id, item in items.items():
        session.cache.add(choice_id, item)
    stream.put(rest)
    return whole


async def look(session: Session, call: ChatCall) -> tuple[ChatCall, list[ShownImage]]:
    """The call with its images by name, and the images. WireError for what cannot be seen."""
    sight = session.options.sight
    if sight is None:
        refuse_images(call)
    if sight is None or not call.images:
        return call, []
    known = {image for item in session.cache.values() for image in item.images}
    return await asyncio.to_thread(sight.look, call, known, session.image_budget)


def _continued(
    session: Session, call: ChatCall
) -> tuple[ChatCall, InteractionWithTokenLogpReward | None]:
    """The call as it continues an earlier one of the session, and that one."""
    parent = session.cache.find_parent(call.messages, call.tools)
    if parent is None:
        return call, None
    messages = _with_reasoning(call.messages, parent.whole_chat())
    call = dataclasses.replace(call, messages=messages)
    if len(messages) == len(parent.whole_chat()) and not _is_cut(parent):
        # The client asks for another turn after a reply that has ended: no prefill.
        call = dataclasses.replace(call, continues_final=False)
    return call, parent


async def _sample(
    session: Session,
    head: ReplyHead[ChatCall],
    prompt: Prompt,
    readers: Sequence[ChatReader],
    seeds: Sequence[int | None],
    grammar: Grammar | None,
    stream: ReplyStream,
) -> list[ModelResponse]:
    """A response for each choice; its tokens are in its reader, and in the stream if one is asked
    for."""
    work = []
    for i, (reader, seed) in enumerate(zip(readers, seeds, strict=True)):
        request = ModelRequest(
            head.prompt_ids,
            head.call.gconfig.new(n_samples=1, seed=seed),
            tokenizer=head.tokenizer,
            grammar=grammar,
            image_data=prompt.image_data,
            vision_msg_vllm=head.call.messages if prompt.images else None,
        )
        push = functools.partial(stream.push, choice=i)
        if head.call.stream:
            work.append(generate_into(push, reader.push, session, request))
        else:
            work.append(_generate_whole(reader, session, request))
    return await _all(work)


def _choices(done: Completion[ChatCall]) -> Iterator[Completion[ChatCall]]:
    """Each choice as a completion of its own, with the id of its interaction."""
    for i, output in enumerate(done.outputs):
        name = f"{done.head.id}-{i}" if i else done.head.id
        yield Completion(dataclasses.replace(done.head, id=name), [output], done.cached_tokens)


def _seeds(session: Session, gconfig: GenerationHyperparameters) -> list[int | None]:
    """One for each choice."""
    if gconfig.seed is None:
        return [session.next_seed() for _ in range(gconfig.n_samples)]
    return [gconfig.seed + choice for choice in range(gconfig.n_samples)]


async def _all(work: Sequence[Coroutine[Any, Any, ModelResponse]]) -> list[ModelResponse]:
    """If one fails or this is cancelled, none goes on."""
    tasks = [asyncio.create_task(one, name="agent-choice") for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _generate_whole(
    reader: ChatReader, session: Session, request: ModelRequest
) -> ModelResponse:
    response = await generate(session, request)
    reader.push(response.output_tokens)
    return response


def _grammar(options: SessionOptions, call: ChatCall, in_reasoning: bool) -> Grammar | None:
    try:
        return reply_grammar(
            call,
            tool_format=options.tool_format,
            tokenizer=options.tokenizer,
            in_reasoning=in_reasoning,
        )
    except ValueError as error:
        raise WireError(400, str(error)) from None


def _reader(options: SessionOptions, call: ChatCall, in_reasoning: bool) -> ChatReader:
    return ChatReader(
        call,
        options.tokenizer,
        tool_format=options.tool_format,
        stop_ids=call.gconfig.stop_token_ids,
        reasoning=options.config.reasoning_parser,
        in_reasoning=in_reasoning,
    )


def _interaction(
    session: Session,
    route: Route,
    done: Completion[ChatCall],
    response: ModelResponse,
    prompt: Prompt,
    *,
    created: int,
) -> InteractionWithTokenLogpReward:
    call, (output,) = done.head.call, done.outputs
    messages, said = _recorded(call, chat_message(output.parts))
    item = InteractionWithTokenLogpReward(
        response,
        messages=messages,
        output_message_list=[said],
        parent=prompt.parent,
        images=prompt.images,
        chat_template_type=session.options.config.chat_template_type,
        tools=call.tools,
        created=created,
    )
    route.note(item, done.head.asked, route.api.reply(done))
    return item


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


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model reads."""

    ids: list[int]  # with those of its images
    images: list[ShownImage]  # in the order of their tokens
    image_data: list[str]  # the same in base64
    parent: InteractionWithTokenLogpReward | None  # whose chat, and with `concat` tokens, it has


def read_prompt(
    options: SessionOptions,
    call: ChatCall,
    images: list[ShownImage],
    parent: InteractionWithTokenLogpReward | None,
) -> Prompt:
    """The whole prompt of a call with these images.

    With `concat` it starts with all tokens of the parent, and its images. If the template leaves
    out the parent's reply there is nothing to continue: the prompt begins a new chat, by the
    template alone.
    """
    sight = options.sight
    if parent is not None and options.config.chat_template_type == "concat":
        new = call.messages[len(parent.whole_chat()) :]
        after = _ids_after_reply(options.tokenizer, call, parent.messages, new)
        if after is not None:
            # By the new messages: a matcher may take a chat without its old images for the same.
            shown = images[len(images) - len(image_names(new)) :]
            images = [*parent.images, *shown]
            ids = _appended(parent, after if sight is None else sight.expand(after, shown))
            return Prompt(ids, images, _data_of(options, images), parent)
        parent = None
    ids = chat_prompt_ids(options.tokenizer, call)
    ids = ids if sight is None else sight.expand(ids, images)
    return Prompt(ids, images, _data_of(options, images), parent)


def _appended(parent: InteractionWithTokenLogpReward, after: list[int]) -> list[int]:
    before = [*parent.model_response.input_tokens, *parent.model_response.output_tokens]
    # The end-of-turn token comes from the model, or else from the template: keep one.
    return before + (after[1:] if after[:1] == before[-1:] else after)


def _data_of(options: SessionOptions, images: list[ShownImage]) -> list[str]:
    return [] if options.sight is None else options.sight.data_of(images)


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


async def generate(session: Session, request: ModelRequest) -> ModelResponse:
    try:
        response = await session.engine.agenerate(request)
    except ValueError as error:  # the engine rejects the request: too long, an unsupported option
        raise refusal(str(error)) from error
    if response.stop_reason == "abort":
        raise RuntimeError(f"generation was aborted after {response.output_len} tokens")
    return response


async def generate_into(
    push: Callable[[Any, list[int], list[float]], None],
    read: Callable[[list[int]], Any],
    session: Session,
    request: ModelRequest,
) -> ModelResponse:
    """`generate`; its tokens go to `push`, by `read`, as they are sampled."""
    arrived: asyncio.Queue[tuple[list[int], list[float]] | None] = asyncio.Queue()
    request.on_tokens = lambda tokens, logprobs: arrived.put_nowait((tokens, logprobs))
    generation = asyncio.create_task(generate(session, request), name="agent-generation")
    generation.add_done_callback(lambda _: arrived.put_nowait(None))
    num_told = 0
    try:
        while (told := await arrived.get()) is not None:
            push(read(told[0]), *told)
            num_told += len(told[0])
    finally:
        generation.cancel()
    response = generation.result()
    rest = response.output_tokens[num_told:], response.output_logprobs[num_told:]
    push(read(rest[0]), *rest)
    return response


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
