"""The proxy's model routes by path: each translates to a chat completion and back."""

from __future__ import annotations

from areal.agents import anthropic, responses
from areal.agents.streams import ChatEncoder, Completion, Route, data_event, named_event
from areal.openai.requests import ChatBody


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
        frame=data_event,
        end=b"data: [DONE]\n\n",
    ),
    "/v1/messages": Route(
        "msg_",
        anthropic.MessagesBody,
        anthropic.chat_body,
        anthropic.message_of,
        anthropic.MessageEncoder,
        _note_message,
        anthropic.error_of,
        keep_alive=named_event({"type": "ping"}),
    ),
    "/v1/responses": Route(
        "resp_",
        responses.ResponsesBody,
        responses.chat_body,
        responses.response_of,
        responses.ResponseEncoder,
        _note_response,
    ),
}
