"""Every route of an HTTP app against requests nobody meant to send, over real connections.

schemathesis reads the app's OpenAPI description and sends what it allows and what it forbids; what
no schema says (bytes that are no JSON, headers, methods) is `NOISE`. Every answer must come in
time, be no fault of ours, show no traceback, have its error as JSON, and be a refusal where the
description forbids what was sent.

    description = schemathesis.openapi.from_url(...)
    http_fuzz.every_route(description, lambda case: http_fuzz.ask(case, url, key), max_examples=20)
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import requests
from hypothesis import given, settings
from hypothesis import strategies as st
from json_fuzz import NO_JSON
from schemathesis import BaseSchema, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import negative_data_rejection

TIMEOUT_S = 900  # for one answer of a busy machine; a hang is longer
HEADERS = st.dictionaries(
    st.sampled_from(["content-type", "accept", "content-encoding", "x-api-key", "cookie", "range"]),
    st.sampled_from(["", "application/json", "text/xml", "gzip", "bytes=9-", "a; b=c", "\xff"]),
    max_size=2,
)
METHODS = ["POST"] * 6 + ["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]
NOISE = st.tuples(st.sampled_from(METHODS), HEADERS, NO_JSON)


def every_route(
    description: BaseSchema, send: Callable[[Case], None], *, max_examples: int
) -> None:
    """`max_examples` of what each route allows, and as many of what it forbids, if anything."""
    for found in description.get_all_operations():
        route = found.ok()
        for mode in GenerationMode if route.body or route.query else [GenerationMode.POSITIVE]:
            cases = route.as_strategy(generation_mode=mode)
            settings(max_examples=max_examples)(given(cases)(send))()


def is_allowed(case: Case) -> bool:
    """Whether it is what the description asks for."""
    return case.meta.generation.mode.is_positive


def ask(case: Case, base_url: str, key: str) -> requests.Response:
    answer = case.call(base_url=base_url, headers=bearer(key), timeout=TIMEOUT_S)
    check(answer.status_code, answer.text, case)
    checks = [not_a_server_error]
    if b'"refused"' not in answer.content:  # a request of several may be turned down by itself
        checks.append(negative_data_rejection)
    case.validate_response(answer, checks=checks)
    return answer


def send_noise(url: str, key: str, noise: tuple[str, dict[str, str], bytes]) -> None:
    method, headers, body = noise
    headers = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = requests.request(
        method, url, headers={**headers, **bearer(key)}, data=body, timeout=TIMEOUT_S
    )
    check(answer.status_code, answer.text, noise)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def check(status: int, text: str, request: Any) -> None:
    assert status < 500, (request, status, text)
    assert "Traceback" not in text and 'File "' not in text, (request, text)
    if status >= 400 and text:
        error = json.loads(text)["error"]
        assert error, request


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes it, before its timeout."""
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True
