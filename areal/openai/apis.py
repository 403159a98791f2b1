"""The APIs of model calls by path, for every server that speaks them.

call = parse_chat(api.chat_body(body, cache))
...                                             # any engine: a head, outputs by their readers
reply = api.reply(Completion(head, outputs))    # or events of api.encoder, see streams.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.openai import (
    anthropic_replies,
    anthropic_requests,
    responses_replies,
    responses_requests,
)
from areal.openai.errors import WireError, error_body
from areal.openai.replies import (
    Completion,
    ReplyHead,
    chat_reply,
    completion_reply,
    generate_reply,
)
from areal.openai.requests import ChatBody, CompletionBody, GenerateBody
from areal.openai.streams import (
    DATA_EVENTS,
    ChatEncoder,
    Encoder,
    EventFormat,
    TextEncoder,
    named_event,
)

if TYPE_CHECKING:
    from areal.api.interaction import InteractionCache
    from areal.utils.http_body import Body


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """How one API names, tells and streams what was sampled."""

    id_prefix: str
    body: type[Body]
    reply: Callable[[Completion[Any]], dict[str, Any]]
    encoder: Callable[[ReplyHead[Any]], Encoder]
    events: EventFormat = EventFormat()
    error: Callable[[WireError], dict[str, Any]] = error_body


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatApi(Api):
    """`chat_body(body, cache)`: the body of the chat completion that is meant. `cache` has the
    earlier interactions of the session; None where there are no sessions."""

    chat_body: Callable[[dict[str, Any], InteractionCache | None], dict[str, Any]]


CHAT_APIS = {
    "/v1/chat/completions": ChatApi(
        id_prefix="chatcmpl-",
        body=ChatBody,
        chat_body=lambda body, cache: body,
        reply=chat_reply,
        encoder=ChatEncoder,
        events=DATA_EVENTS,
    ),
    "/v1/messages": ChatApi(
        id_prefix="msg_",
        body=anthropic_requests.MessagesBody,
        chat_body=anthropic_requests.chat_body,
        reply=anthropic_replies.message_of,
        encoder=anthropic_replies.MessageEncoder,
        events=EventFormat(keep_alive=named_event({"type": "ping"})),
        error=anthropic_replies.error_of,
    ),
    "/v1/responses": ChatApi(
        id_prefix="resp_",
        body=responses_requests.ResponsesBody,
        chat_body=responses_requests.chat_body,
        reply=responses_replies.response_of,
        encoder=responses_replies.ResponseEncoder,
    ),
}

PROMPT_APIS = {  # of prompts that are no chats
    "/v1/completions": Api(
        id_prefix="cmpl-",
        body=CompletionBody,
        reply=completion_reply,
        encoder=TextEncoder,
        events=DATA_EVENTS,
    ),
    "/inference/v1/generate": Api(  # never streamed
        id_prefix="gen-",
        body=GenerateBody,
        reply=generate_reply,
        encoder=TextEncoder,
        events=DATA_EVENTS,
    ),
}


def error_for(path: str, headers: Mapping[str, str], error: WireError) -> dict[str, Any]:
    """The error as the client of this request expects it."""
    is_anthropic = path.startswith("/v1/messages") or "anthropic-version" in headers
    return anthropic_replies.error_of(error) if is_anthropic else error_body(error)
