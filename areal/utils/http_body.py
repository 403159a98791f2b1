"""Bodies of HTTP requests as pydantic models: base class, types of fields, errors, schemas.

    class Abort(Body):
        rid: Text = ""
        all: bool = False

    @app.post("/abort", openapi_extra=json_body(Abort))
    async def abort(request: Request) -> dict[str, int]:
        body = parse_json(Abort, await read_body(request))

A model is the only definition of a body: its route validates with it, and its JSON Schema is part
of the app's OpenAPI description. Types are strict: a text is no number, a bool no integer, NaN no
float. Unknown fields are ignored, except by a `ClosedBody`. What a schema forbids is refused; a
model may refuse more (`wrong`).

All errors are written here, from pydantic's, as one `JsonError` that names the field, what was
expected and what was found: `messages[0].role: expected 'user' or 'assistant', got 'king'`.
`Expect` beside a type replaces what pydantic knows of it: `Annotated[str, Expect("a rid")]`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeAlias, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from areal.api.json_text import JsonError, field_name, loads_object
from areal.api.redact import hide_secrets

INT_END = 1 << 63
T = TypeVar("T")
M = TypeVar("M", bound="Body")
Path: TypeAlias = tuple[str | int, ...]

_MAX_SEARCHED = 4096  # characters of a value searched for secrets; fewer are shown
_NOTHING = object()  # the value of a field that is absent
_EXPECTED = {  # by pydantic's type of the error
    "bool_type": "true or false",
    "dict_type": "a JSON object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "a JSON object",
    "model_type": "a JSON object",
    "string_type": "a text",
    "string_unicode": "a text",
    "too_long": "a list of at most {max_length} items",
    "too_short": "a list that is not empty",
}


class Body(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class ClosedBody(Body):
    """Refuses unknown fields, with one error: pydantic's "forbid" writes one for each."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": False})
    reasons: ClassVar[dict[str, str]] = {}  # to refuse an unknown field, if there is a better one

    @model_validator(mode="after")
    def _knows_all(self) -> Self:
        if unknown := self.__pydantic_extra__:
            name = min(unknown)
            known = ", ".join(type(self).model_fields)
            raise refused(
                name[:50], self.reasons.get(name, f"unknown field; expected one of {known}")
            )
        return self


@dataclass(frozen=True, slots=True)
class Expect:
    """Beside a type: the text that an error says was expected, for the value as a whole."""

    text: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return _expecting(self.text, handler(source))


@dataclass(frozen=True, slots=True)
class Integer:
    """Beside `int`: its range, by default that of 64 bits."""

    low: int = -INT_END
    high: int = INT_END - 1

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        if self.high < INT_END - 1:
            bounds = f"from {self.low} to {self.high}"
        else:
            bounds = f"of at least {self.low}" if self.low > -INT_END else "of 64 bits"
        schema = core_schema.int_schema(strict=True, ge=self.low, le=self.high)
        return _expecting(f"an integer {bounds}", schema)


@dataclass(frozen=True, slots=True)
class Number:
    """Beside `float`: its range."""

    low: float
    high: float

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        schema = core_schema.float_schema(strict=True, ge=self.low, le=self.high)
        return _expecting(f"a number from {self.low:g} to {self.high:g}", schema)


def _expecting(text: str, schema: CoreSchema) -> CoreSchema:
    return core_schema.custom_error_schema(
        schema, custom_error_type="expected", custom_error_message=text
    )


@dataclass(frozen=True, slots=True)
class _FailFast:
    """Stops at the first bad item: a body of millions would have as many errors."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), "fail_fast": True}


Items = Annotated[list[T], _FailFast()]
Text = Annotated[str, Field(min_length=0)]  # with any constraint it must be encodable
Name = Annotated[str, Field(min_length=1), Expect("a text that is not empty")]


def wrong(field: str, expected: str) -> PydanticCustomError:
    """For a model's validators: `field`, which may be missing, is not as expected."""
    return PydanticCustomError("expected", "{text}", {"field": field, "text": expected})


def refused(field: str, reason: str) -> PydanticCustomError:
    """Likewise, with the whole reason."""
    return PydanticCustomError("refused", "{text}", {"field": field, "text": reason})


def parse_json(model: type[M], data: bytes, *, check_numbers: bool = True) -> M:
    """JsonError for what is no JSON object (see `loads_object`), or not this one."""
    return parse(model, loads_object(data, check_numbers=check_numbers))


def parse(model: type[M], content: Any) -> M:
    """JsonError, with the position of the field, unless `content` is what the model describes."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise _fault_of(error, model, content) from None


def show(value: Any) -> str:
    """A short rendering of a value, recognisable to the caller."""
    if value is _NOTHING:
        return "nothing"
    if isinstance(value, int) and abs(value) >= INT_END:
        return "an integer beyond 64 bits"
    try:
        text = ascii(value[:60] if isinstance(value, list | str) else value)
    except (ValueError, RecursionError):  # integers with thousands of digits, deep nesting
        return f"a {type(value).__name__}"
    text = hide_secrets(text[:_MAX_SEARCHED])
    return f"{text[:60]}..." if len(text) > 60 else text


def json_body(model: type[Body], *, required: bool = True) -> dict[str, Any]:
    """A route's `openapi_extra` for its body."""
    schema = model.model_json_schema()
    content = {"application/json": {"schema": _inlined(schema, schema.pop("$defs", {}))}}
    return {"requestBody": {"required": required, "content": content}}


def _inlined(node: Any, models: dict[str, Any]) -> Any:
    """`node` with models in the place of references, which lead to another part of OpenAPI."""
    if isinstance(node, list):
        return [_inlined(item, models) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(models[node["$ref"].rpartition("/")[2]], models)
    return {
        name: _inlined(item, models)
        for name, item in node.items()
        if name != "discriminator"  # its mapping holds references as well
    }


@dataclass(frozen=True, slots=True)
class _Fault:
    path: Path
    found: Any  # of a missing field: the object that lacks it
    expected: str = ""  # empty: the field is missing
    reason: str = ""  # instead of what is expected and found


def _fault_of(error: ValidationError, model: type[Body], content: Any) -> JsonError:
    """The first of the innermost errors; alternatives of a union are joined by "or"."""
    faults = _faults(error, content)
    path = max((fault.path for fault in faults), key=len)
    faults = [fault for fault in faults if fault.path == path]
    if not (faults[0].expected or faults[0].reason):
        faults = _faults_of_nothing(model, content, faults[0])
    expected = " or ".join(dict.fromkeys(fault.expected for fault in faults))
    reason = faults[0].reason or f"expected {expected}, got {show(faults[0].found)}"
    return JsonError(field_name(path) or "body", reason)


def _faults_of_nothing(model: type[Body], content: Any, missing: _Fault) -> list[_Fault]:
    """What is expected of a missing field: the errors it would have with a value of no type."""
    name, faults = missing.path[-1], []
    missing.found[name] = _NOTHING
    try:
        model.model_validate(content)
    except ValidationError as error:
        faults = [fault for fault in _faults(error, content) if fault.path == missing.path]
    finally:
        del missing.found[name]
    return faults or [_Fault(missing.path, _NOTHING, "a value")]


def _faults(error: ValidationError, content: Any) -> list[_Fault]:
    return [_fault(one, content) for one in error.errors(include_url=False)]


def _fault(error: ErrorDetails, content: Any) -> _Fault:
    kind, found, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "missing":
        *place, name = error["loc"]
        return _Fault((*_path(place, content), name), found)
    path = _path(error["loc"], content)
    if kind.startswith("union_tag"):
        return _fault_of_tag(path, found, context)
    if "field" in context:
        path, found = (*path, context["field"]), found.get(context["field"], _NOTHING)
    if kind == "refused":
        return _Fault(path, found, reason=error["msg"])
    expected = _EXPECTED[kind].format(**context) if kind in _EXPECTED else error["msg"]
    return _Fault(path, found, expected)


def _fault_of_tag(path: Path, found: Any, context: dict[str, Any]) -> _Fault:
    """`found` should have a `type` that says which alternative of a union it is."""
    if not isinstance(found, dict):
        return _Fault(path, found, "a JSON object")
    path, kind = (*path, "type"), found.get("type", _NOTHING)
    if "expected_tags" not in context:
        return _Fault(path, kind, "a text")
    reason = f"{show(kind)} is not understood here; expected one of {context['expected_tags']}"
    return _Fault(path, kind, reason=reason)


def _path(place: Iterable[str | int], content: Any) -> Path:
    """Without what pydantic adds to a place: the alternatives of unions it tried."""
    path: list[str | int] = []
    for key in place:
        is_item = isinstance(content, list) and isinstance(key, int)
        is_field = isinstance(content, dict) and key in content
        if is_item or is_field:
            content = cast(Any, content)[key]
            path.append(key)
    return tuple(path)
