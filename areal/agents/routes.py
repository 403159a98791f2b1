"""The proxy's model routes by path: chats, in three APIs, and prompts that are no chats."""

from __future__ import annotations

from areal.agents import anthropic, responses
from areal.agents.streams import (
    DATA_EVENTS,
    ChatEncoder,
    Completion,
    EventFormat,
    Route,
    named_event,
)
from areal.agents.token_routes import (
    TokenRoute,
    parse_text,
    parse_tokens,
    text_reply,
    tokens_reply,
)
from areal.openai import anthropic as anthropic_requests
from areal.openai import responses as responses_requests
from areal.openai.requests import ChatBody, CompletionBody, GenerateBody


def _note_completion(done: Completion) -> None:
    done.interaction.completion = done.reply


def _note_message(done: Completion) -> None:
    done.interaction.completion = anthropic.message_of(done)
    done.interaction.input_data = done.head.asked["messages"]


def _note_response(done: Completion) -> None:
    done.interaction.response = responses.response_of(done)
    done.interaction.input_data = done.head.asked["input"]


ROUTES = {
    "/v1/chat/completions": Route(
        "chatcmpl-",
        ChatBody,
        lambda body, cache: body,
        lambda done: done.reply,
        ChatEncoder,
        _note_completion,
        events=DATA_EVENTS,
    ),
    "/v1/messages": Route(
        "msg_",
        anthropic_requests.MessagesBody,
        anthropic_requests.chat_body,
        anthropic.message_of,
        anthropic.MessageEncoder,
        _note_message,
        anthropic_requests.error_of,
        EventFormat(keep_alive=named_event({"type": "ping"})),
    ),
    "/v1/responses": Route(
        "resp_",
        responses_requests.ResponsesBody,
        responses_requests.chat_body,
        responses.response_of,
        responses.ResponseEncoder,
        _note_response,
    ),
}

TOKEN_ROUTES = {
    "/v1/completions": TokenRoute("cmpl-", CompletionBody, parse_text, text_reply),
    "/inference/v1/generate": TokenRoute("gen-", GenerateBody, parse_tokens, tokens_reply),
}
