"""Request bodies of the native server's own routes as JSON Schemas; those of /v1 are OpenAI's.

A route refuses what its schema forbids: the whole body, or on /generate only the request at fault.
"""

from __future__ import annotations

from areal.engine.native.weight_loader import KINDS
from areal.engine.native.wire import GCONFIG_KINDS, MAX_RID
from areal.utils.http_server import (
    FLAG,
    INTEGER,
    NUMBER,
    TEXT,
    Schema,
    integer_from,
    list_of,
    object_of,
    one_of,
    or_null,
)

_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 4096}
_TOKEN_IDS = list_of(integer_from(0))
_SCHEMAS: dict[str, Schema] = {  # by the kind in GCONFIG_KINDS
    "int": INTEGER,
    "int or null": or_null(INTEGER),
    "texts or null": or_null(list_of(TEXT)),
    "bool": FLAG,
    "float": NUMBER,
    "ids": _TOKEN_IDS,
}
_OUTPUT = object_of(
    {
        "output_tokens": _TOKEN_IDS,
        "output_logprobs": list_of(NUMBER),
        "output_versions": list_of(INTEGER),
    },
    required=["output_tokens", "output_logprobs", "output_versions"],
)
_REQUEST = object_of(
    {
        "rid": {"type": "string", "minLength": 1, "maxLength": MAX_RID},
        "input_ids": list_of(integer_from(0), at_least=1),
        "gconfig": object_of(
            {name: _SCHEMAS[kind] for name, kind in GCONFIG_KINDS.items()}, closed=True
        ),
        "progress_tokens": integer_from(0),
        "so_far": or_null(_OUTPUT),
    },
    required=["rid", "input_ids"],
    closed=True,
)

GENERATE = object_of({"requests": list_of(_REQUEST, at_least=1)}, required=["requests"])
SCORE = object_of({"sequences": list_of(_TOKEN_IDS, at_least=1)}, required=["sequences"])
TAGS = object_of({"tags": or_null(list_of(one_of("weights", "kv_cache")))})
ABORT = object_of({"rid": TEXT, "all": FLAG})
GROUP = object_of(
    {
        "name": _NAME,
        "host": _NAME,
        "port": integer_from(1, 65535),
        "rank": integer_from(1),
        "world_size": integer_from(2, 1 << 16),
        "backend": one_of("nccl", "gloo"),
        "timeout_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 86_400},
    },
    required=["name", "host", "port", "rank", "world_size", "backend", "timeout_s"],
)
UPDATE = object_of(
    {
        "kind": one_of(*KINDS),
        "path": _NAME,
        "key": {"type": "string", "maxLength": 4096},
        "group": _NAME,
        "version": integer_from(0, (1 << 31) - 1),
        "recompute_kv": FLAG,
    },
    required=["version"],
)
