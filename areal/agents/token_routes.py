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

from areal.agents.completions import checked_gconfig, generate, generate_into, with_defaults
from areal.agents.streams import ReplyStream
from areal.api.image_references import ShownImage
from areal.api.interaction import InteractionWithTokenLogpReward, next_created
from areal.api.io_struct import ModelRequest
from areal.api.json_text import dumps
from areal.openai.apis import Api
from areal.openai.errors import WireError
from areal.openai.replies import Completion, ReplyHead, TextReader
from areal.openai.requests import CompletionCall, parse_completion, parse_generate

if TYPE_CHECKING:
    from areal.agents.session import Session, SessionOptions


@dataclass(frozen=True, slots=True)
class TokenRoute:
    api: Api
    parse: Callable[[SessionOptions, dict[str, Any]], CompletionCall]


async def complete_tokens(
    session: Session, route: TokenRoute, body: dict[str, Any], stream: ReplyStream
) -> bytes:
    """Answer one request and record it, like `complete`."""
    created, options, api = next_created(), session.options, route.api
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
    name = f"{api.id_prefix}{uuid.uuid4().hex}"
    head = ReplyHead(body, call, name, int(time.time()), [prompt], options.tokenizer)
    parent = None
    if options.config.chat_template_type == "concat":
        parent = session.cache.find_parent_of_tokens(prompt)
    images = [] if parent is None else parent.images
    request = ModelRequest(
        prompt,
        call.gconfig.new(seed=seed),
        tokenizer=options.tokenizer,
        image_data=await asyncio.to_thread(_image_data, options, prompt, images),
    )
    reader = TextReader(call.gconfig, options.tokenizer, stop_ids=call.gconfig.stop_token_ids)
    if call.stream:
        stream.open(api.encoder(head))
        response = await generate_into(stream.push, reader.push, session, request)
    else:
        response = await generate(session, request)
        reader.push(response.output_tokens)
    last = reader.finish()
    output = reader.output(response.output_tokens, response.output_logprobs, response.stop_reason)
    done = Completion(head, [output], response.cached_tokens)
    reply = api.reply(done)
    interaction = InteractionWithTokenLogpReward(
        response,
        messages=[{"role": "prompt", "content": text}],  # a role that no chat has
        output_message_list=[{"role": "assistant", "content": output.text}],
        parent=parent,
        chat_template_type=options.config.chat_template_type,
        completion=reply,
        input_data=body.get("prompt", body.get("token_ids")),
        images=images,
        created=created,
    )
    rest = stream.last([last], [output], done.usage) if call.stream else dumps(reply).encode()
    session.cache.add(name, interaction)
    if not call.stream:
        return rest
    stream.put(rest)
    return b""


def parse_text(options: SessionOptions, body: dict[str, Any]) -> CompletionCall:
    return parse_completion(_with_defaults(options, body))


def parse_tokens(options: SessionOptions, body: dict[str, Any]) -> CompletionCall:
    given = body.get("sampling_params")
    if given is None or isinstance(given, dict):
        body = {**body, "sampling_params": _with_defaults(options, given or {})}
    return parse_generate(body)


def _with_defaults(options: SessionOptions, given: dict[str, Any]) -> dict[str, Any]:
    body = with_defaults(options, given)
    if (bound := body.pop("max_completion_tokens", None)) is not None:
        body["max_tokens"] = bound  # the name it has without a chat
    return body


def _image_data(options: SessionOptions, prompt: list[int], images: list[ShownImage]) -> list[str]:
    """Of the images that an earlier completion has shown. WireError for other image tokens."""
    sight = options.sight
    if sight is None:
        return []
    if sight.num_tokens(images) != sight.count_tokens(prompt):
        message = "prompt: image tokens are those of a completion that it continues, with `concat`"
        raise WireError(400, f"{message}; show images in a chat", "prompt")
    return sight.data_of(images)


def _prompt(tokenizer: Any, call: CompletionCall) -> tuple[list[int], str]:
    (prompt,) = call.prompt
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"], prompt
    return prompt, tokenizer.decode(prompt, skip_special_tokens=False)
