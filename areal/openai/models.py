"""The list of models for OpenAI's and Anthropic's clients: one card has the keys of both.

A server has one model, and perhaps adapters of it, and answers to any name: agents come with names
of their own.
"""

from __future__ import annotations

from typing import Any

from areal.openai.errors import WireError


def model_card(name: str) -> dict[str, Any]:
    if not name:
        raise WireError(404, "model: expected a name", "model", "model_not_found")
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "areal",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


def model_list(*names: str) -> dict[str, Any]:
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return {"object": "list", "data": [model_card(name) for name in names], **page}
