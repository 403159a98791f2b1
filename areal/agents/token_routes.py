"""Completions of prompts that are no chats: /v1/completions and /inference/v1/generate.

    parse -> prompt tokens as given -> engine.agenerate -> reply -> recorded

A prompt that begins with all tokens of an earlier completion of the session continues it, so a
client that keeps the tokens itself gets dialogues like one that sends messages.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.agents.completions import checked_gconfig, generate, generate_into, with_defaults
from areal.agents.streams import DATA_EVENTS, EventFormat, ReplyStream, WireEvent
from areal.api.interaction import InteractionWithTokenLogpReward, next_created
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.json_text import dumps
from areal.openai.errors import WireError, error_body
from areal.openai.parsing.parser import Content, Event
from areal.openai.replies import (
    CompletionStream,
    Output,
    TextReader,
    completion_reply,
    generate_reply,
    usage_chunk,
)
from areal.openai.requests import CompletionCall, parse_completion, parse_generate
from areal.utils.http_body import Body

if TYPE_CHECKING:
    from areal.agents.session import Session, SessionOptions


@dataclass(frozen=True, slots=True)
class TokenHead:
    """What is known of a reply before its first token."""

    call: CompletionCall
    asked: dict[str, Any]
    id: str
    created: int  # Unix seconds
    prompt: list[int]
    text: str  # of the prompt
    tokenizer: Any


@dataclass(frozen=True, slots=True)
class TokenRoute:
    id_prefix: str  # of the ids by which clients assign rewards
    body: type[Body]
    parse: Callable[[SessionOptions, dict[str, Any]], CompletionCall]
    reply: Callable[[TokenHead, Output, int], dict[str, Any]]  # the number of cached tokens
    error: Callable[[WireError], dict[str, Any]] = error_body
    events: EventFormat = DATA_EVENTS


class TextEncoder:
    """OpenAI's completions: chunks. Events are texts."""

    def __init__(self, head: TokenHead) -> None:
        self._head = head
        self._stream = CompletionStream(
            head.call, head.id, head.created, head.tokenizer, prompt_ids=head.prompt
        )

    def begin(self) -> list[WireEvent]:
        return []

    def push(
        self,
        events: Sequence[Event],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        choice: int = 0,
    ) -> list[WireEvent]:
        text = "".join(event.text for event in events if isinstance(event, Content))
        return self._stream.push(text, tokens, logprobs)

    def finish(self, done: dict[str, Any]) -> list[WireEvent]:
        """`done`: the whole reply."""
        head, (choice,) = self._head, done["choices"]
        chunks = self._stream.finish(choice["finish_reason"], choice["stop_reason"])
        if head.call.include_usage:
            chunks.append(usage_chunk(head.call, head.id, head.created, done["usage"]))
        return chunks

    def fail(self, error: WireError) -> list[WireEvent]:
        return [error_body(error)]


async def complete_tokens(
    session: Session, route: TokenRoute, body: dict[str, Any], stream: ReplyStream
) -> bytes:
    """Answer one request and record it, like `complete`."""
    created, options = next_created(), session.options
    call = route.parse(options, body)
    if len(call.prompt) > 1:
        message = "prompt: one completion is one interaction here, so send one prompt; call again"
        raise WireError(400, message, "prompt")
    if call.gconfig.n_samples > 1:
        message = "n: one completion is one interaction here, so it must be 1; call again"
        raise WireError(400, message, "n")
    call = dataclasses.replace(call, gconfig=checked_gconfig(options, call))
    seed = session.next_seed() if call.gconfig.seed is None else call.gconfig.seed
    prompt, text = await asyncio.to_thread(_prompt, options.tokenizer, call)
    name = f"{route.id_prefix}{uuid.uuid4().hex}"
    head = TokenHead(call, body, name, int(time.time()), prompt, text, options.tokenizer)
    parent = None
    if options.config.chat_template_type == "concat":
        parent = session.cache.find_parent_of_tokens(prompt)
    request = ModelRequest(prompt, call.gconfig.new(seed=seed), tokenizer=options.tokenizer)
    reader = TextReader(call.gconfig, options.tokenizer, stop_ids=call.gconfig.stop_token_ids)
    texts: list[str] = []

    def read(tokens: Sequence[int]) -> list[Event]:
        texts.append(reader.push(tokens))
        return [Content(texts[-1])]

    if call.stream:
        stream.open(TextEncoder(head))
        response = await generate_into(stream.push, read, session, request)
    else:
        response = await generate(session, request)
        read(response.output_tokens)
    last = reader.finish()
    output = _output(response, "".join(texts) + last, reader.stop_string)
    reply = route.reply(head, output, response.cached_tokens)
    interaction = InteractionWithTokenLogpReward(
        response,
        messages=[{"role": "prompt", "content": text}],  # a role that no chat has
        output_message_list=[{"role": "assistant", "content": "".join(texts) + last}],
        parent=parent,
        chat_template_type=options.config.chat_template_type,
        completion=reply,
        input_data=body.get("prompt", body.get("token_ids")),
        created=created,
    )
    rest = stream.last([[Content(last)]], reply) if call.stream else dumps(reply).encode()
    session.cache.add(name, interaction)
    if not call.stream:
        return rest
    stream.put(rest)
    return b""


def _output(response: ModelResponse, text: str, stop_string: str | None) -> Output:
    tokens, logprobs = response.output_tokens, response.output_logprobs
    return Output(tokens, logprobs, response.stop_reason, text, stop_string)


def parse_text(options: SessionOptions, body: dict[str, Any]) -> CompletionCall:
    return parse_completion(_with_defaults(options, body))


def parse_tokens(options: SessionOptions, body: dict[str, Any]) -> CompletionCall:
    given = body.get("sampling_params")
    if given is None or isinstance(given, dict):
        body = {**body, "sampling_params": _with_defaults(options, given or {})}
    return parse_generate(body)


def text_reply(head: TokenHead, output: Output, cached_tokens: int) -> dict[str, Any]:
    return completion_reply(
        head.call, head.id, head.created, [output], len(head.prompt), head.tokenizer,
        prompts=[head.prompt], cached_tokens=cached_tokens,
    )  # fmt: skip


def tokens_reply(head: TokenHead, output: Output, cached_tokens: int) -> dict[str, Any]:
    return generate_reply(head.call, head.asked.get("request_id") or head.id, [output])


def _with_defaults(options: SessionOptions, given: dict[str, Any]) -> dict[str, Any]:
    body = with_defaults(options, given)
    if (bound := body.pop("max_completion_tokens", None)) is not None:
        body["max_tokens"] = bound  # the name it has without a chat
    return body


def _prompt(tokenizer: Any, call: CompletionCall) -> tuple[list[int], str]:
    (prompt,) = call.prompt
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"], prompt
    return prompt, tokenizer.decode(prompt, skip_special_tokens=False)
