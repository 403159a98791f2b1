"""The dashboard's HTTP server: one page, its files and the JSON routes, read-only.

Who may ask: a browser that has opened the link with the token once, and has the cookie since. Every
other request is refused, and so is one under a foreign host name: a page of another site could
otherwise have its own name point to this machine (DNS rebinding). Texts of a run are hostile: a
content security policy runs no script but the page's own, which writes text nodes only.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, RedirectResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal.dashboard.reader import UnreadableRunError
from areal.dashboard.routes import Routes
from areal.utils.http_server import JsonReply, new_app, trust

PAGE = Path(__file__).parent / "page"
FILES = {"/": "index.html", "/app.js": "app.js", "/style.css": "style.css"}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",  # the link has the token
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
}


def create_app(routes: Routes, token: str, port: int) -> FastAPI:
    app = new_app(openapi_url=None)
    app.add_middleware(Guard, token=token, port=port)

    # In a thread: SQLite blocks.
    @app.get("/api/{path:path}")
    def answer(path: str, request: Request) -> Response:
        try:
            return JsonReply(routes.answer(path, dict(request.query_params)))
        except LookupError as error:
            return JsonReply({"error": str(error.args[0])}, status_code=404)
        except (UnreadableRunError, FileNotFoundError) as error:
            return JsonReply({"error": str(error)}, status_code=503)
        except ValueError as error:
            return JsonReply({"error": str(error)}, status_code=400)

    for path, name in FILES.items():
        app.add_api_route(path, _file_sender(PAGE / name), methods=["GET"])
    return app


def _file_sender(file: Path) -> Callable[[], Response]:
    kind = f"{_TYPES[file.suffix]}; charset=utf-8"

    def send() -> Response:
        return Response(file.read_bytes(), media_type=kind)

    return send


class Guard:
    """Middleware: host name, method, token; and the headers of every reply."""

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}
        # Cookies know no ports: several dashboards must not log each other out.
        self._cookie = f"areal_dash_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        app = self._refusal(scope) or self._app
        await app(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if headers.get("host") not in self._hosts:
            return PlainTextResponse("unknown host: open the link that areal dash printed", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("the dashboard only reads", 405)
        if self._is_token(_given_token(scope)):
            reply = RedirectResponse("/", 303)
            reply.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return reply
        if not self._is_token(_cookie(headers, self._cookie)):
            return PlainTextResponse("open the link that areal dash printed, with its token", 401)
        trust(scope)
        return None

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def _given_token(scope: Scope) -> str:
    if scope["path"] != "/":
        return ""
    query = parse_qs(scope["query_string"].decode("latin-1"))
    return query.get("token", [""])[0]


def _cookie(headers: Headers, name: str) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value
