"""The proxy's model routes by path: each translates to a chat completion and back."""

from __future__ import annotations

from areal.agents import anthropic, responses
from areal.agents.completions import Completion, Route, chat_events
from areal.openai.requests import ChatBody


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
        ChatBody,
        lambda body, cache: body,
        lambda done: done.reply,
        chat_events,
        _note_completion,
    ),
    "/v1/messages": Route(
        "msg_",
        anthropic.MessagesBody,
        anthropic.chat_body,
        anthropic.message_of,
        anthropic.message_events,
        _note_message,
        anthropic.error_of,
    ),
    "/v1/responses": Route(
        "resp_",
        responses.ResponsesBody,
        responses.chat_body,
        responses.response_of,
        responses.response_events,
        _note_response,
    ),
}
