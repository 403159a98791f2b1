"""The proxy's model routes by path: chats, in three APIs, and prompts that are no chats."""

from __future__ import annotations

from typing import Any

from areal.agents.completions import Route
from areal.agents.token_routes import TokenRoute, parse_text, parse_tokens
from areal.api.interaction import InteractionWithTokenLogpReward
from areal.openai.apis import CHAT_APIS, PROMPT_APIS

Reply = dict[str, Any]


def _note_chat(item: InteractionWithTokenLogpReward, asked: Reply, reply: Reply) -> None:
    item.completion = reply


def _note_message(item: InteractionWithTokenLogpReward, asked: Reply, reply: Reply) -> None:
    item.completion = reply
    item.input_data = asked["messages"]


def _note_response(item: InteractionWithTokenLogpReward, asked: Reply, reply: Reply) -> None:
    item.response = reply
    item.input_data = asked["input"]


_NOTES = {
    "/v1/chat/completions": _note_chat,
    "/v1/messages": _note_message,
    "/v1/responses": _note_response,
}
_PARSERS = {"/v1/completions": parse_text, "/inference/v1/generate": parse_tokens}

ROUTES = {path: Route(api, _NOTES[path]) for path, api in CHAT_APIS.items()}
TOKEN_ROUTES = {path: TokenRoute(api, _PARSERS[path]) for path, api in PROMPT_APIS.items()}
