"""JSON that nobody meant to send: any bytes, any JSON, an honest value with one thing changed."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

ODD_VALUES = st.sampled_from(
    [None, True, 0, -1, 1.5, 1e308, 2**31, 2**63, -(2**63), 10**40, "", "\x00", "\ud800", "é" * 300]
    + [float("inf"), float("-inf"), float("nan"), 10**400, 10**4200, {"\udfff": 1}, ["\ud83d"]]
    + [[], {}, [[]], [None], {"": None}, "../../etc/passwd", "${oc.env:HOME}", "{{7*7}}"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | ODD_VALUES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
DEEP = b'{"a":' * 3000 + b"1" + b"}" * 3000
HALVES = b'{"model": "\\ud800", "messages": [{"role": "user", "content": "\\udfff"}]}'  # of letters
NO_JSON = st.binary(max_size=40) | st.sampled_from(
    [b"", b"null", b"NaN", b"[", b'{"a": Infinity}', b"\xef\xbb\xbf{}", DEEP, HALVES]
)


def bodies(honest: Any) -> st.SearchStrategy[bytes]:
    return st.one_of(
        changed(honest).map(to_bytes),
        changed(honest).map(to_bytes),
        changed(honest).map(to_bytes).map(with_overflow),
        VALUES.map(to_bytes),
        NO_JSON,
    )


@st.composite
def changed(draw: st.DrawFn, honest: Any) -> Any:
    """`honest` with one place of it replaced, removed or joined by something else."""
    tree = copy.deepcopy(honest)
    places = list(_places(tree))
    if not places:
        return draw(VALUES)
    where, key = draw(st.sampled_from(places))
    what = draw(st.sampled_from(["replace", "replace", "replace", "remove", "join"]))
    if what == "replace":
        where[key] = draw(VALUES)
    elif what == "remove":
        del where[key]
    elif isinstance(where, dict):
        where[draw(st.text(max_size=8))] = draw(VALUES)
    else:
        where.append(draw(VALUES))
    return tree


def to_bytes(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def with_overflow(body: bytes) -> bytes:
    """Infinity as a number that JSON has and a double has not."""
    return body.replace(b"Infinity", b"1e999")


def _places(tree: Any) -> Any:
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from _places(tree[key])
