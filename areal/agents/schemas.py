"""JSON Schemas of the proxy's request bodies; a route rejects what its schema forbids."""

from __future__ import annotations

from areal.openai.schemas import CHAT, FUNCTION, NAME, SAMPLING
from areal.utils.http_server import (
    ANY_OBJECT,
    FLAG,
    NUMBER,
    TEXT,
    Schema,
    either,
    integer_from,
    list_of,
    object_of,
    one_of,
    or_null,
)


def _sampling(*names: str) -> dict[str, Schema]:
    return {name: SAMPLING[name] for name in names}


_BLOCKS = list_of(object_of({"text": TEXT}, required=["text"]))
_BLOCK = either(
    object_of({"type": one_of("text"), "text": TEXT}, required=["type", "text"]),
    object_of({"type": one_of("tool_use"), "name": TEXT}, required=["type", "name"]),
    object_of(
        {"type": one_of("tool_result"), "content": or_null(either(TEXT, _BLOCKS))},
        required=["type"],
    ),
    object_of({"type": one_of("thinking", "redacted_thinking")}, required=["type"]),
)
_MESSAGE = object_of(
    {"role": one_of("user", "assistant"), "content": either(TEXT, list_of(_BLOCK))},
    required=["role", "content"],
)
_MESSAGES_TOOL = object_of(
    {"name": NAME, "description": or_null(TEXT), "input_schema": or_null(ANY_OBJECT)},
    required=["name"],
)
MESSAGES = object_of(
    {
        **_sampling("model", "temperature", "top_p", "top_k", "stream"),
        "max_tokens": or_null(integer_from(1)),
        "system": or_null(either(TEXT, _BLOCKS)),
        "messages": list_of(_MESSAGE),
        "tools": or_null(list_of(_MESSAGES_TOOL)),
        "tool_choice": or_null(object_of({"type": one_of("auto", "none")}, required=["type"])),
        "stop_sequences": or_null(list_of(NAME)),
    },
    required=["messages"],
)

_TEXT_PART = object_of(
    {"type": one_of("input_text", "output_text", "text"), "text": TEXT}, required=["type"]
)
_WORDS = either(TEXT, list_of(_TEXT_PART))
_ITEM = either(
    object_of(
        {
            "type": one_of("message"),
            "role": one_of("system", "developer", "user", "assistant"),
            "content": _WORDS,
        },
        required=["role", "content"],
    ),
    object_of(
        {"type": one_of("function_call"), "name": TEXT, "arguments": either(TEXT, ANY_OBJECT)},
        required=["type", "name", "arguments"],
    ),
    object_of(
        {"type": one_of("function_call_output"), "output": _WORDS}, required=["type", "output"]
    ),
    object_of({"type": one_of("reasoning")}, required=["type"]),
)
_RESPONSES_TOOL = object_of(
    {"type": one_of("function"), **FUNCTION["properties"]}, required=["type", "name"]
)
RESPONSES = object_of(
    {
        **_sampling("model", "temperature", "top_p", "stream", "frequency_penalty", "stop", "seed"),
        **_sampling("top_k", "min_new_tokens", "max_total_tokens", "stop_token_ids", "ignore_eos"),
        "max_output_tokens": or_null(integer_from(1)),
        "instructions": or_null(TEXT),
        "input": either(TEXT, list_of(_ITEM)),
        "previous_response_id": or_null(TEXT),
        "tools": or_null(list_of(_RESPONSES_TOOL)),
        "tool_choice": or_null(one_of("auto", "none")),
    },
    required=["input"],
)

BODIES = {"/v1/chat/completions": CHAT, "/v1/messages": MESSAGES, "/v1/responses": RESPONSES}

_SCORE = either(NUMBER, FLAG)
_BY_INTERACTION = {"type": "object", "additionalProperties": _SCORE, "minProperties": 1}
_REWARD = either(_SCORE, _BY_INTERACTION)
SET_REWARD = object_of({"reward": _REWARD, "interaction_id": or_null(TEXT)}, required=["reward"])
END_SESSION = object_of({"reward": or_null(_REWARD)})
