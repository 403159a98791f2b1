"""The ways to ask the model, by their paths: each translates to a chat completion and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from areal.api.interaction import InteractionCache
from areal.openai import anthropic, responses
from areal.openai.completions import Completion
from areal.openai.streaming import chat_events
from areal.utils.openai_wire import WireError, error_body


@dataclass(frozen=True, slots=True)
class Route:
    """One API. `chat_body(body, cache)` may look at what the session said before."""

    id_prefix: str  # of the ids that clients give rewards by
    chat_body: Callable[[dict[str, Any], InteractionCache], dict[str, Any]]
    reply: Callable[[Completion], dict[str, Any]]
    events: Callable[[Completion], Iterator[bytes]]  # the reply as a stream
    note: Callable[[Completion], None]  # what the client got, in the interaction
    error: Callable[[WireError], dict[str, Any]] = error_body


def _note_completion(done: Completion) -> None:
    done.interaction.completion = done.reply


def _note_message(done: Completion) -> None:
    done.interaction.completion = anthropic.message_of(done)
    done.interaction.input_data = done.asked["messages"]


def _note_response(done: Completion) -> None:
    done.interaction.response = responses.response_of(done)
    done.interaction.input_data = done.asked["input"]


ROUTES = {
    "/v1/chat/completions": Route(
        "chatcmpl-",
        lambda body, cache: body,
        lambda done: done.reply,
        chat_events,
        _note_completion,
    ),
    "/v1/messages": Route(
        "msg_",
        anthropic.chat_body,
        anthropic.message_of,
        anthropic.message_events,
        _note_message,
        anthropic.error_of,
    ),
    "/v1/responses": Route(
        "resp_",
        responses.chat_body,
        responses.response_of,
        responses.response_events,
        _note_response,
    ),
}
