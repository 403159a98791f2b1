"""JSON Schemas of request bodies, said beside the route that reads them.

    @app.post("/abort", openapi_extra=json_body(object_of({"rid": TEXT, "all": FLAG})))

They are part of the app's OpenAPI description, from which clients and tests know what to send. The
routes read their bodies by themselves: their errors name the field in the words of its API.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Schema = dict[str, Any]

_INT_END = 1 << 63

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer", "minimum": -_INT_END, "maximum": _INT_END - 1}
ANY_OBJECT: Schema = {"type": "object"}


def integer_from(low: int, high: int = _INT_END - 1) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def number_from(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def list_of(items: Schema, *, at_least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": at_least}


def object_of(
    properties: Mapping[str, Schema], *, required: Iterable[str] = (), closed: bool = False
) -> Schema:
    """`closed`: other keys are refused."""
    schema = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {**schema, "additionalProperties": False} if closed else schema


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def or_null(schema: Schema) -> Schema:
    return either(schema, {"type": "null"})


def json_body(schema: Schema, *, required: bool = True) -> Schema:
    """What a route's `openapi_extra` says of its body."""
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": required, "content": content}}
