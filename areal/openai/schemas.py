"""JSON Schemas of the bodies that `parse_chat` and `parse_completion` take.

What a schema forbids, the parser rejects. The parser is stricter: some options require others, and
unlisted keys may be ignored or unsupported.
"""

from __future__ import annotations

from areal.utils.http_server import (
    ANY_OBJECT,
    FLAG,
    INTEGER,
    TEXT,
    Schema,
    either,
    integer_from,
    list_of,
    number_from,
    object_of,
    one_of,
    or_null,
)

TOKEN_IDS = list_of(integer_from(0, (1 << 31) - 1), at_least=1)
NAME: Schema = {"type": "string", "minLength": 1}
FUNCTION = object_of(
    {"name": NAME, "description": or_null(TEXT), "parameters": or_null(ANY_OBJECT)},
    required=["name"],
)

# A null field counts as absent.
SAMPLING: dict[str, Schema] = {
    name: or_null(schema)
    for name, schema in {
        "model": TEXT,
        "n": integer_from(1, 128),
        "temperature": number_from(0, 100),
        "top_p": number_from(0, 1),
        "top_k": integer_from(-1),
        "min_tokens": integer_from(0),
        "min_new_tokens": integer_from(0),
        "max_total_tokens": integer_from(1),
        "stop_token_ids": either(TOKEN_IDS, {"type": "array", "maxItems": 0}),
        "ignore_eos": FLAG,
        "skip_special_tokens": FLAG,
        "stop": either(NAME, list_of(NAME)),
        "frequency_penalty": number_from(-2, 2),
        "seed": INTEGER,
        "stream": FLAG,
        "stream_options": object_of({"include_usage": or_null(FLAG)}),
    }.items()
}
_CALL = object_of(
    {
        "type": or_null(one_of("function")),
        "function": object_of(
            {"name": TEXT, "arguments": either(TEXT, ANY_OBJECT)}, required=["name", "arguments"]
        ),
    },
    required=["function"],
)
_TEXT_PART = object_of({"type": one_of("text"), "text": TEXT}, required=["type", "text"])
_CONTENT = either(TEXT, list_of(_TEXT_PART))
_MESSAGE = either(
    object_of(
        {
            "role": one_of("system", "developer", "user", "tool"),
            "content": _CONTENT,
            "tool_calls": or_null(list_of(_CALL)),
        },
        required=["role", "content"],
    ),
    object_of(
        {
            "role": one_of("assistant"),
            "content": or_null(_CONTENT),
            "tool_calls": or_null(list_of(_CALL)),
        },
        required=["role"],
    ),
)
_TOOL = object_of({"type": one_of("function"), "function": FUNCTION}, required=["type", "function"])

CHAT = object_of(
    {
        **SAMPLING,
        "messages": list_of(_MESSAGE, at_least=1),
        "tools": or_null(list_of(_TOOL)),
        "tool_choice": or_null(one_of("auto", "none")),
        "logprobs": or_null(FLAG),
        "top_logprobs": or_null(integer_from(0, 20)),
        "max_tokens": or_null(integer_from(1)),
        "max_completion_tokens": or_null(integer_from(1)),
        "chat_template_kwargs": or_null(ANY_OBJECT),
    },
    required=["messages"],
)
COMPLETION = object_of(
    {
        **SAMPLING,
        "prompt": either(TEXT, TOKEN_IDS, list_of(either(TEXT, TOKEN_IDS), at_least=1)),
        "logprobs": or_null(integer_from(0, 5)),
        "max_tokens": or_null(integer_from(1)),
    },
    required=["prompt"],
)
