"""The proxy's model routes by path: chats, in three APIs, and prompts that are no chats."""

from __future__ import annotations

from areal.agents import anthropic, responses
from areal.agents.completions import Completion, Route, chat_events
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
        anthropic_requests.MessagesBody,
        anthropic_requests.chat_body,
        anthropic.message_of,
        anthropic.message_events,
        _note_message,
        anthropic_requests.error_of,
    ),
    "/v1/responses": Route(
        "resp_",
        responses_requests.ResponsesBody,
        responses_requests.chat_body,
        responses.response_of,
        responses.response_events,
        _note_response,
    ),
}

TOKEN_ROUTES = {
    "/v1/completions": TokenRoute("cmpl-", CompletionBody, parse_text, text_reply),
    "/inference/v1/generate": TokenRoute("gen-", GenerateBody, parse_tokens, tokens_reply),
}
