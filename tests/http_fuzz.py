"""Requests that nobody meant to send: what every HTTP route must stand.

`requests_of(app, examples)` draws (method, path, headers, body): any bytes, any JSON, and an honest
body with one thing changed. `check` is what the answer must be: never a fault of ours, never a
traceback, errors as JSON.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from hypothesis import strategies as st

METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]
ODD_VALUES = st.sampled_from(
    [None, True, 0, -1, 1.5, 1e308, 2**31, 2**63, -(2**63), 10**40, "", "\x00", "\ud800", "é" * 300]
    + [[], {}, [[]], [None], {"": None}, "../../etc/passwd", "${oc.env:HOME}", "{{7*7}}"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | ODD_VALUES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
HEADERS = st.dictionaries(
    st.sampled_from(["content-type", "accept", "content-encoding", "x-api-key", "cookie", "range"]),
    st.sampled_from(["", "application/json", "text/xml", "gzip", "bytes=9-", "a; b=c", "\xff"]).map(
        lambda text: text.encode("latin-1")
    ),
    max_size=2,
)
DEEP = b'{"a":' * 3000 + b"1" + b"}" * 3000


def routes(app: FastAPI) -> dict[str, set[str]]:
    """path -> methods, of all there are."""
    return {route.path: route.methods for route in app.routes if isinstance(route, APIRoute)}


def requests_of(app: FastAPI, examples: dict[str, Any]) -> st.SearchStrategy:
    known = routes(app)
    missing = {path for path, methods in known.items() if "POST" in methods} - examples.keys()
    assert not missing, f"give these routes an honest body: {missing}"
    return st.sampled_from(sorted(known)).flatmap(
        lambda path: st.tuples(
            st.sampled_from([*known[path]] * 6 + METHODS),
            st.just(path) if "{" not in path else _filled(path),
            HEADERS,
            bodies(examples.get(path, {})),
        )
    )


def bodies(honest: Any) -> st.SearchStrategy[bytes]:
    return st.one_of(
        changed(honest).map(to_bytes),
        changed(honest).map(to_bytes),
        changed(honest).map(to_bytes),
        VALUES.map(to_bytes),
        st.binary(max_size=40),
        st.sampled_from([b"", b"null", b"NaN", b"[", b'{"a": Infinity}', b"\xef\xbb\xbf{}", DEEP]),
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


def check(status: int, text: str, request: object) -> None:
    assert status < 500, (request, status, text)
    assert "Traceback" not in text and 'File "' not in text, (request, text)
    if status >= 400 and text:
        error = json.loads(text)["error"]
        assert error, request


def _filled(path: str) -> st.SearchStrategy[str]:
    words = st.sampled_from(["x", "%2e%2e", "%00", "%ff", "a/b", "..", "%0d%0aA:b", "é", "%"])
    return words.map(lambda word: path[: path.index("{")] + word)


def _places(tree: Any) -> Any:
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from _places(tree[key])
