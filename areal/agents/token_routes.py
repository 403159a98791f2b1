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
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.agents.completions import Answer, checked_gconfig, generate, output_of, with_defaults
from areal.api.interaction import InteractionWithTokenLogpReward, next_created
from areal.api.json_text import dumps
from areal.openai.errors import WireError
from areal.openai.replies import (
    Output,
    completion_chunk,
    completion_reply,
    generate_reply,
    usage_chunk,
)
from areal.openai.requests import CompletionCall, parse_completion, parse_generate
from areal.utils.http_body import Body

if TYPE_CHECKING:
    from areal.agents.session import Session, SessionOptions


@dataclass(frozen=True, slots=True)
class Done:
    """Result of one call."""

    call: CompletionCall
    asked: dict[str, Any]
    id: str
    created: int  # Unix seconds
    prompt: list[int]
    output: Output


@dataclass(frozen=True, slots=True)
class TokenRoute:
    id_prefix: str  # of the ids by which clients assign rewards
    body: type[Body]
    parse: Callable[[SessionOptions, dict[str, Any]], CompletionCall]
    reply: Callable[[Done, Any], dict[str, Any]]  # by the tokenizer


async def complete_tokens(session: Session, route: TokenRoute, body: dict[str, Any]) -> Answer:
    """Answer one request and record it, like `complete`."""
    created, options = next_created(), session.options
    call = route.parse(options, body)
    if len(call.prompt) > 1:
        message = "prompt: one completion is one interaction here, so send one prompt; call again"
        raise WireError(400, message, "prompt")
    call = dataclasses.replace(call, gconfig=checked_gconfig(options, call))
    seed = session.next_seed() if call.gconfig.seed is None else call.gconfig.seed
    prompt, text = await asyncio.to_thread(_prompt, options.tokenizer, call)
    parent = None
    if options.config.chat_template_type == "concat":
        parent = session.cache.find_parent_of_tokens(prompt)
    response = await generate(session, call.gconfig.new(seed=seed), prompt)
    output = output_of(options, call.gconfig, response)
    name = f"{route.id_prefix}{uuid.uuid4().hex}"
    done = Done(call, body, name, int(time.time()), prompt, output)
    reply = route.reply(done, options.tokenizer)
    interaction = InteractionWithTokenLogpReward(
        response,
        messages=[{"role": "prompt", "content": text}],  # a role that no chat has
        output_message_list=[{"role": "assistant", "content": output.text}],
        parent=parent,
        chat_template_type=options.config.chat_template_type,
        completion=reply,
        input_data=body.get("prompt", body.get("token_ids")),
        created=created,
    )
    answer = Answer(dumps(reply).encode(), "application/json")
    if call.stream:
        answer = Answer(_events(done, reply), "text/event-stream")
    session.cache.add(name, interaction)
    return answer


def parse_text(options: SessionOptions, body: dict[str, Any]) -> CompletionCall:
    return parse_completion(_with_defaults(options, body))


def parse_tokens(options: SessionOptions, body: dict[str, Any]) -> CompletionCall:
    given = body.get("sampling_params")
    if given is None or isinstance(given, dict):
        body = {**body, "sampling_params": _with_defaults(options, given or {})}
    return parse_generate(body)


def text_reply(done: Done, tokenizer: Any) -> dict[str, Any]:
    return completion_reply(
        done.call, done.id, done.created, [done.output], len(done.prompt), tokenizer,
        prompts=[done.prompt],
    )  # fmt: skip


def tokens_reply(done: Done, tokenizer: Any) -> dict[str, Any]:
    return generate_reply(done.call, done.asked.get("request_id") or done.id, [done.output])


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


def _events(done: Done, reply: dict[str, Any]) -> bytes:
    (choice,), place = reply["choices"], (done.call, done.id, done.created)
    reason = choice["finish_reason"]
    first = completion_chunk(*place, 0, choice["text"], logprobs=choice["logprobs"])
    if done.call.return_token_ids:
        names = ("prompt_token_ids", "token_ids")
        first["choices"][0] |= {name: choice[name] for name in names}
    chunks = [first, completion_chunk(*place, 0, "", finish_reason=reason)]
    if done.call.include_usage:
        chunks.append(usage_chunk(*place, reply["usage"]))
    return "".join(f"data: {dumps(chunk)}\n\n" for chunk in chunks).encode() + b"data: [DONE]\n\n"
