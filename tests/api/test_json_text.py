"""JSON and text at a boundary: what is read is finite and whole, what is written can be encoded."""

from __future__ import annotations

import json
import math

import json_fuzz
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.json_text import (
    JsonError,
    dumps,
    loads,
    loads_object,
    loads_written,
    well_formed,
)

any_text = st.text(st.characters(exclude_categories=[]) | st.sampled_from("\ud800\udc00\ud83d"))


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b'{"messages": [{"content": "\\ud83d"}]}', "messages[0].content: expected text"),
        (b'{"a": {"b": ["x", "\\udc00 "]}}', "a.b[1]: expected text, got a lone surrogate"),
        (b'{"a": "\xed\xa0\xbd"}', "a: expected text, got a lone surrogate"),
        (b'{"\\ud83d": 1}', "body: expected text, got a lone surrogate"),
        (b'{"a": [1, {"b": 1e999}]}', "a[1].b: expected a finite number"),
        (b'{"a": [1.5, -1E999]}', "a[1]: expected a finite number"),
        (b'{"a": ' + b"9" * 310 + b"}", "a: expected a finite number"),
        (b'{"a": ' + b"9" * 9999 + b"}", "body: not JSON (number out of range"),
        (b'{"a": NaN}', "body: not JSON"),
        (b'{"a": -Infinity}', "body: not JSON"),
        (b'{"a": "\x00"}', "body: not JSON (control character"),
        (b'{"a":' * 500 + b"1" + b"}" * 500, "body: not JSON (recursion limit"),
        (b"[" * 1_000_000, "body: not JSON (recursion limit"),
        (b"", "body: not JSON"),
        (b"[]", "body: expected a JSON object, got list"),
        (b"\xef\xbb\xbf{}", "body: not JSON"),
        (b"{} {}", "body: not JSON"),
    ],
)
def test_what_is_refused_is_named(data, fault):
    with pytest.raises(JsonError) as caught:
        loads_object(data)
    assert str(caught.value).startswith(fault)
    assert fault.startswith(f"{caught.value.field}: ")


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b'{"a": "\\ud83d\\ude00", "b": "\\u0000"}', {"a": "\U0001f600", "b": "\0"}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (b'{"a": 1e308, "b": 1e-999, "c": -0.0}', {"a": 1e308, "b": 0.0, "c": -0.0}),
        (b'{"a": ' + b"9" * 308 + b"}", {"a": 10**308 - 1}),
    ],
)
def test_what_is_read(data, value):
    assert loads_object(data) == value


@given(json_fuzz.bodies({"a": [1, 2.5, "x", {"b": None}], "c": [1, 2, 3], "d": [0.5, 1.5]}))
def test_what_is_read_can_be_written(data):
    try:
        value = loads(data)
    except ValueError:
        return
    assert loads(dumps(value)) == value
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


@given(st.recursive(st.floats() | st.integers(), lambda inner: st.lists(inner, max_size=4)))
def test_no_number_that_is_read_is_infinite(tree):
    def numbers(value):
        return sum(map(numbers, value), []) if isinstance(value, list) else [value]

    data = json.dumps(tree).replace("Infinity", "1e999").replace("NaN", "1e999")
    is_finite = all(map(math.isfinite, numbers(tree)))
    try:
        assert loads(data) == tree and is_finite
    except JsonError:
        assert not is_finite


@given(any_text)
def test_any_text_becomes_well_formed(text):
    found = well_formed(text)
    found.encode()
    assert well_formed(found) == found
    if not any("\ud800" <= letter <= "\udfff" for letter in text):
        assert found is text
    paired = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert found == paired


@given(st.dictionaries(any_text, any_text | st.lists(any_text), max_size=3))
def test_json_that_a_model_wrote_is_repaired(value):
    whole = json.loads(well_formed(json.dumps(value, ensure_ascii=False)))
    for ascii_only in (True, False):
        read = loads_written(json.dumps(value, ensure_ascii=ascii_only))
        assert dumps(read).encode()
        if len(whole) == len(value):  # no two keys became one
            assert read == whole
