"""Arguments written as text get the types of the tool's JSON schema."""

from __future__ import annotations

import pytest
from written_output import parse, qwen_xml

from areal.openai.parsing.values import ToolSchemas

PARAMETERS = {
    "properties": {
        "string": {"type": "string"},
        "integer": {"type": "integer"},
        "number": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "object": {"type": "object"},
        "maybe": {"type": ["string", "null"]},
        "optional": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        "choice": {"enum": ["1", "2"]},
        "named": {"$ref": "#/$defs/Name"},
        "circular": {"$ref": "#/$defs/Loop"},
        "untyped": {},
        "wrong": 3,
    },
    "$defs": {
        "Name": {"type": "string"},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}] * 50 + [{"type": "string"}]},
    },
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("string", "5", "5"),
        ("string", ' "a" ', ' "a" '),
        ("integer", " 5\n", 5),
        ("integer", "five", "five"),
        ("integer", "9" * 400, "9" * 400),
        ("number", "5", 5),
        ("number", "0.5", 0.5),
        ("number", "NaN", "NaN"),
        ("flag", "true", True),
        ("flag", "False", False),
        ("list", '[1, "a"]', [1, "a"]),
        ("list", "[1,", "[1,"),
        ("object", '{"a": null}', {"a": None}),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("maybe", "None", "None"),
        ("optional", "None", None),
        ("optional", "7", 7),
        ("either", "7", 7),
        ("either", '"7"', '"7"'),
        ("either", "true", "true"),
        ("choice", "1", "1"),
        ("named", "5", "5"),
        ("circular", "5", "5"),
        ("untyped", "5", 5),
        ("untyped", '"a"', '"a"'),
        ("untyped", "a b", "a b"),
        ("wrong", "[]", []),
        ("missing", "x", "x"),
    ],
)
def test_types(key, text, value):
    tool = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
    found = ToolSchemas([tool]).typed("f", key, text)
    assert found == value and type(found) is type(value)
    assert ToolSchemas([tool]).typed("other", "string", "a") == "a"


def test_schemas_that_are_none():
    for function in ({}, {"name": "f"}, {"name": "f", "parameters": {"properties": []}}):
        assert ToolSchemas([{"function": function}]).typed("f", "a", "1") == 1


def test_values_keep_their_white_space():
    text = "  indented\n\n"
    assert parse(qwen_xml("add", {"text": text}), "qwen3_coder")[2] == [("add", {"text": text})]
