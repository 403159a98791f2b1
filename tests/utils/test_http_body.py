"""Bodies as models: one error that names the field, strict types, schemas without references."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import json_fuzz
import pytest
from hypothesis import given
from pydantic import Field

from areal.api.json_text import JsonError
from areal.utils.http_body import (
    Body,
    ClosedBody,
    Expect,
    Integer,
    Items,
    Name,
    Number,
    Text,
    json_body,
    parse,
    parse_json,
    show,
)


class Circle(Body):
    type: Literal["circle"]
    radius: Annotated[float, Number(0, 10)]


class Label(Body):
    type: Literal["label"]
    text: Name


class Paint(ClosedBody):
    color: Literal["red", "blue"] = "red"
    layers: Annotated[int, Integer(1, 3)] = 1


class Drawing(Body):
    title: Text | Items[Text]
    shapes: Items[Annotated[Circle | Label, Field(discriminator="type")]] = []
    paint: Paint = Paint()
    ids: Annotated[Items[int], Expect("a list of ids")] = []
    pair: Annotated[Items[int], Field(min_length=1, max_length=2)] = [1]
    note: Any = None


HONEST = {
    "title": ["a", "b"],
    "shapes": [{"type": "circle", "radius": 1.5}, {"type": "label", "text": "x"}],
    "paint": {"color": "blue", "layers": 2},
    "ids": [1, 2],
}


def test_an_honest_body():
    body = parse_json(Drawing, json.dumps({**HONEST, "unknown": 1}).encode())
    assert body.shapes == [Circle(type="circle", radius=1.5), Label(type="label", text="x")]
    assert (body.paint.color, body.paint.layers) == ("blue", 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"title": 3}, "title: expected a text or a list, got 3"),
        ({"title": ["a", 3]}, "title[1]: expected a text, got 3"),
        ({"title": "\ud800"}, "title: expected a text or a list, got '\\ud800'"),
        ({"ids": [1, "2"]}, "ids: expected a list of ids, got [1, '2']"),
        ({"pair": [1, 2, 3]}, "pair: expected a list of at most 2 items, got [1, 2, 3]"),
        ({"pair": []}, "pair: expected a list that is not empty, got []"),
        ({"ids": [True]}, "ids: expected a list of ids, got [True]"),
        ({"shapes": [3]}, "shapes[0]: expected a JSON object, got 3"),
        ({"shapes": [{}]}, "shapes[0].type: expected a text, got nothing"),
        ({"shapes": [{"type": "circle"}]},
         "shapes[0].radius: expected a number from 0 to 10, got nothing"),
        ({"shapes": [{"type": "circle", "radius": float("nan")}]},
         "shapes[0].radius: expected a number from 0 to 10, got nan"),
        ({"shapes": [{"type": "circle", "radius": 10**400}]},
         "shapes[0].radius: expected a number from 0 to 10, got an integer beyond 64 bits"),
        ({"shapes": [{"type": "box"}]},
         "shapes[0].type: 'box' is not understood here; expected one of 'circle', 'label'"),
        ({"shapes": [{"type": "label", "label": []}]}, "shapes[0].label.text: expected"),
        ({"paint": {"color": "green"}}, "paint.color: expected 'red' or 'blue', got 'green'"),
        ({"paint": {"layers": 4}}, "paint.layers: expected an integer from 1 to 3, got 4"),
        ({"paint": {"layers": "1"}}, "paint.layers: expected an integer from 1 to 3, got '1'"),
        ({"paint": {"brush": 1}}, "paint.brush: unknown field; expected one of color, layers"),
    ],
)  # fmt: skip
def test_the_field_is_named(change, message):
    content = {**HONEST, **change}
    sent = json.dumps(content)
    with pytest.raises(JsonError) as caught:
        parse(Drawing, content)
    assert str(caught.value).startswith(message)
    assert caught.value.field == message.partition(":")[0]
    assert json.dumps(content) == sent, "what was sent is as it was"


@given(json_fuzz.bodies(HONEST))
def test_any_bytes_are_a_body_or_a_named_error(data):
    try:
        assert isinstance(parse_json(Drawing, data), Drawing)
    except JsonError as error:
        assert len(str(error).encode()) < 2000


def test_a_million_faults_are_one_error():
    unknown = {f"field{number}": 1 for number in range(100_000)}
    with pytest.raises(JsonError, match=r"^paint.field0: unknown field"):
        parse(Drawing, {"title": "a", "paint": unknown})
    with pytest.raises(JsonError, match=r"^title\[0\]: expected a text, got 0$"):
        parse(Drawing, {"title": [0] * 1_000_000})


def test_what_is_found_is_short_and_without_secrets():
    assert show("x" * 1000) == f"'{'x' * 59}..."
    assert show("Bearer abcdefghijklmnop") == "'Bearer <hidden>'"
    assert show(10**5000) == "an integer beyond 64 bits"
    assert show([10**5000]) == "a list"


def test_the_schema_is_complete_and_stands_alone():
    extra = json_body(Drawing)["requestBody"]
    schema = extra["content"]["application/json"]["schema"]
    assert extra["required"] and schema["required"] == ["title"]
    assert "$ref" not in json.dumps(schema) and "$defs" not in json.dumps(schema)
    circle, label = schema["properties"]["shapes"]["items"]["oneOf"]
    assert circle["properties"]["radius"]["maximum"] == 10
    assert label["properties"]["text"]["minLength"] == 1
    assert schema["properties"]["paint"]["additionalProperties"] is False
