"""The HTTP server agents call: OpenAI's and Anthropic's routes on the controller's event loop.

| route                          | key     | answer                                               |
|--------------------------------|---------|------------------------------------------------------|
| POST /v1/chat/completions      | session | a chat completion, or a stream of its chunks         |
| POST /v1/responses             | session | a response, or a stream of its events                |
| POST /v1/messages              | session | an Anthropic message, or a stream of its events      |
| POST /v1/messages/count_tokens | session | the number of tokens of the prompt                   |
| POST /v1/completions           | session | the completion of a text or of token ids             |
| POST /inference/v1/generate    | session | tokens for tokens, as vLLM spells it                 |
| GET /v1/models                 | session | the only model; /v1/models/NAME: by any name         |
| POST /rl/set_reward            | session | {"reward", "interaction_id"?}: the newest, or by id  |
| POST /rl/end_session           | session | {"reward"?}: the episode is over                     |
| POST /rl/start_session         | admin   | {"session_id", "api_key", "base_url", "session_url", |
|                                |         | "data"} of the next                                  |
| GET or HEAD /, /api/hello      |         | 200: clients look whether somebody is there          |

A key is sent as `Authorization: Bearer KEY`, as `x-api-key: KEY`, or in the path, for clients that
cannot set one: /sessions/KEY/v1/... Statuses: 400 invalid request, 401 missing or wrong key, 409
session ended, 413 body too large, 429 no session to start now, 500 internal error; errors have the
shape of the route's API. Listens on localhost only. If a client disconnects, its generation is
cancelled and not recorded; if it tries again, it gets the answer of its first try (retries.py).
A stream begins with the first token, with status 200; a later failure is an error event of its API.
While nothing happens there are keep-alives: comments, or pings in Anthropic's API.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from areal.agents.completions import Route, complete
from areal.agents.retries import Attempt, SharedCall
from areal.agents.routes import ROUTES, TOKEN_ROUTES
from areal.agents.session import Session, SessionEndedError
from areal.agents.streams import ReplyStream
from areal.agents.token_routes import TokenRoute, complete_tokens
from areal.api.json_text import dumps
from areal.openai.anthropic_requests import PromptBody, prompt_body
from areal.openai.apis import error_for
from areal.openai.errors import WireError, loads_body, parse_body
from areal.openai.models import model_card, model_list
from areal.openai.prompts import chat_prompt_ids
from areal.openai.requests import parse_chat
from areal.utils import logging
from areal.utils.chat_template import wait_until_warm
from areal.utils.http_body import Body, Expect, Text, json_body
from areal.utils.http_server import (
    SILENCE_S,
    STREAM_HEADERS,
    JsonReply,
    OneV1,
    add_hello,
    new_app,
    read_body,
    server_config,
    trust,
)

logger = logging.getLogger("AgentProxy")

_HOST = "127.0.0.1"
_KEEP_ALIVE_S = 5  # of idle connections

_Score = float | bool
Reward = Annotated[
    _Score | Annotated[dict[str, _Score], Field(min_length=1)],
    Expect("a finite number, or finite numbers by interaction id"),
]


class RewardBody(Body):
    reward: Reward
    interaction_id: Text | None = None  # None: the newest


class EndBody(Body):
    reward: Reward | None = None


class AgentProxy:
    """Runs on the event loop of the first `start`.

    proxy = AgentProxy(port=0)
    await proxy.start()
    proxy.admit(session)             # its key is accepted from now on
    ...                              # an agent calls proxy.base_url
    proxy.release(session)
    await proxy.stop()
    """

    _server: _Server  # while it runs

    def __init__(
        self, *, port: int = 0, admin_key: str | None = None, silence_s: float = SILENCE_S
    ) -> None:
        """With an `admin_key` clients may start the sessions that are passed to `offer`.

        A stream without news gets a keep-alive every `silence_s`.
        """
        self.silence_s = silence_s
        self._port = port
        self._admin_key = admin_key
        self._sessions: dict[str, Session] = {}
        self._offered: deque[Session] = deque()
        self._starting = asyncio.Lock()
        self._serving: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        """What an OpenAI client calls `base_url`."""
        return f"http://{_HOST}:{self._port}/v1"

    async def start(self) -> None:
        """Returns when requests are accepted. Idempotent."""
        async with self._starting:
            if self._serving is not None:
                return
            # Before the first agent, whose timeout it would use up.
            await asyncio.to_thread(wait_until_warm)
            listener = _bind(self._port)
            self._port = listener.getsockname()[1]
            config = server_config(create_app(self), keep_alive_s=_KEEP_ALIVE_S)
            self._server = _Server(config)
            self._serving = asyncio.create_task(
                self._server.serve(sockets=[listener]), name="agent-proxy"
            )
            while not self._server.started:
                if self._serving.done():
                    self._serving.result()
                    raise RuntimeError("the server for agents ended while it was starting")
                await asyncio.sleep(0.005)
            logger.info("agents talk to %s", self.base_url)

    async def stop(self) -> None:
        for session in [*self._sessions.values(), *self._offered]:
            session.close()
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._serving = None

    def admit(self, session: Session) -> None:
        self._sessions[session.id] = session

    def offer(self, session: Session) -> None:
        """Queue the session for the next client that starts one."""
        self._offered.append(session)

    def release(self, session: Session) -> None:
        """Reject the session's key from now on."""
        session.close()
        self._sessions.pop(session.id, None)
        if session in self._offered:
            self._offered.remove(session)

    def start_offered(self) -> dict[str, Any]:
        """What a client needs to use the session it was just given."""
        if not self._offered:
            raise WireError(429, "no session can start now: the run has enough; ask again later")
        session = self._offered.popleft()
        session.started.set()
        try:
            dumps(session.data)
        except (TypeError, ValueError, RecursionError) as error:
            session.fail("/rl/start_session", error)
            session.close()
            raise RuntimeError(f"a row of the data set cannot be sent as JSON: {error}") from error
        self.admit(session)
        return {
            "session_id": session.id,
            "api_key": session.key,
            "base_url": self.base_url,
            "session_url": f"{self.base_url.removesuffix('/v1')}/sessions/{session.key}",
            "data": session.data,
        }

    def session_of(self, request: Request) -> Session:
        key = _key_of(request)
        # Looked up by the public part of the key, then compared as a whole.
        session = self._sessions.get(key.removeprefix("sk-areal-").partition("-")[0])
        if session is None or not session.has_key(key):
            raise WireError(401, "expected 'Authorization: Bearer KEY' with the key of a session")
        trust(request.scope)
        return session

    def check_admin(self, request: Request) -> None:
        expected = self._admin_key
        if expected is None:
            raise WireError(404, "sessions are started by the run itself (rollout.agent.mode)")
        if not hmac.compare_digest(_key_of(request).encode(), expected.encode()):
            raise WireError(401, "expected 'Authorization: Bearer KEY' with the admin key")
        trust(request.scope)


def create_app(proxy: AgentProxy) -> FastAPI:
    app = new_app(openapi_url=None)
    app.add_middleware(OneV1)
    app.add_middleware(_Paths)
    app.add_exception_handler(WireError, _answer(lambda error: error))
    app.add_exception_handler(
        HTTPException, _answer(lambda error: WireError(error.status_code, error.detail))
    )
    app.add_exception_handler(SessionEndedError, _answer(lambda error: _ended()))

    async def answer_fault(request: Request, error: Exception) -> Response:
        with contextlib.suppress(WireError):  # the request has no session
            proxy.session_of(request).fail(request.scope["path"], error)
        return _error(request, _fault(error))

    app.add_exception_handler(Exception, answer_fault)

    for path, route in {**ROUTES, **TOKEN_ROUTES}.items():
        schema = json_body(route.api.body)
        app.add_api_route(path, _endpoint(proxy, route), methods=["POST"], openapi_extra=schema)

    @app.post("/v1/messages/count_tokens", openapi_extra=json_body(PromptBody))
    async def count_tokens(request: Request) -> dict[str, int]:
        session, content = proxy.session_of(request), await _body(request)
        call = parse_chat(prompt_body(content))
        tokenizer = session.options.tokenizer
        return {"input_tokens": len(await asyncio.to_thread(chat_prompt_ids, tokenizer, call))}

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        proxy.session_of(request)
        return model_list("policy")

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> dict[str, Any]:
        proxy.session_of(request)
        return model_card(name)

    add_hello(app)

    @app.post("/rl/set_reward", openapi_extra=json_body(RewardBody))
    async def set_reward(request: Request) -> dict[str, Any]:
        session, content = proxy.session_of(request), await _body(request)
        if session.ended.is_set():
            raise SessionEndedError
        body = parse_body(RewardBody, content)
        name, reward = body.interaction_id, body.reward
        with _callers_fault("reward"):
            session.set_reward(reward if name is None else {name: reward})
        return {"interactions": len(session.cache)}

    @app.post("/rl/end_session", openapi_extra=json_body(EndBody, required=False))
    async def end_session(request: Request) -> dict[str, Any]:
        session, content = proxy.session_of(request), await _body(request)
        reward = parse_body(EndBody, content).reward
        if not session.cache:
            # Nothing to reward, but the client is done: a session that nobody ends again would
            # keep its place in the run until the timeout.
            reward = None
        with _callers_fault("reward"):
            session.end(reward)
        return {"interactions": len(session.cache)}

    @app.post("/rl/start_session")
    async def start_session(request: Request) -> Response:
        proxy.check_admin(request)
        return JsonReply(proxy.start_offered())

    return app


class _Server(uvicorn.Server):
    """Leaves signal handling to the hosting process."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def _bind(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_HOST, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ValueError(
            f"rollout.agent.port: cannot listen on {_HOST}:{port} ({error.strerror}); choose "
            "another port, or 0"
        ) from None
    return listener


class _Paths:
    """A key in the path: /sessions/KEY/v1/..."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.startswith("/sessions/"):
            _, _, key, *rest = path.split("/", 3)
            path = f"/{'/'.join(rest)}"
            scope = {**scope, "path": path, "session_key": key}
        await self._app(scope, receive, send)


def _endpoint(proxy: AgentProxy, route: Route | TokenRoute):
    async def answer(request: Request) -> Response:
        session, body = proxy.session_of(request), await _body(request)
        attempt = Attempt.of(request.scope["path"], request.headers, dumps(body).encode())
        return _ModelReply(session, route, body, attempt, proxy.silence_s)

    return answer


class _ModelReply(Response):
    """Runs a model call, or joins it (retries.py), and sends its reply, whole or as a stream."""

    def __init__(
        self,
        session: Session,
        route: Route | TokenRoute,
        body: dict[str, Any],
        attempt: Attempt,
        silence_s: float,
    ) -> None:
        super().__init__()
        self._session = session
        self._route = route
        self._body = body
        self._attempt = attempt
        self._silence_s = silence_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._session.attempts.join(self._attempt, self._start) as call:
            await _while_connected(receive, self._answer(call, scope, receive, send))

    def _start(self) -> SharedCall:
        stream = ReplyStream(self._route.api.events)
        return SharedCall(self._ask(stream), stream)

    async def _answer(self, call: SharedCall, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS}
        async for data in call.stream.read(self._silence_s):
            if head:
                await send(head)
                head = None
            await send({"type": "http.response.body", "body": data, "more_body": True})
        if head:
            whole = await call.answer()
            await Response(whole, media_type="application/json")(scope, receive, send)
        else:  # a failure was told by the stream
            await send({"type": "http.response.body", "body": b""})

    async def _ask(self, stream: ReplyStream) -> bytes:
        """Raises a WireError, also where the stream tells it: the attempt is not remembered."""
        session = self._session
        try:
            if isinstance(self._route, TokenRoute):
                work = complete_tokens(session, self._route, self._body, stream)
            else:
                work = complete(session, self._route, self._body, stream)
            whole = await session.call(work)
            if session.has_failures:
                session.succeed(self._request_text())
            return whole
        except WireError as refused:
            error = refused
        except SessionEndedError:
            error = _ended()
        except Exception as fault:  # internal: reported to the agent and recorded by the session
            logger.warning("a call of an agent failed", exc_info=fault)
            session.fail(self._request_text(), fault)
            error = _fault(fault)
        if stream.has_begun:
            stream.fail(error)
        raise error

    def _request_text(self) -> str:
        """Equal for a retry of the same request by an SDK."""
        return f"{self._route.api.id_prefix}{dumps(self._body)}"


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`; cancels it if the client disconnects first."""
    task = asyncio.create_task(work, name="agent-reply")
    watcher = asyncio.create_task(_left(receive), name="client-watch")
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        task.cancel()
        watcher.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> dict[str, Any]:
    return loads_body(await read_body(request) or b"{}")


def _key_of(request: Request) -> str:
    if (key := request.scope.get("session_key")) is not None:
        return key
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


@contextlib.contextmanager
def _callers_fault(param: str):
    try:
        yield
    except ValueError as error:
        raise WireError(400, str(error), param) from None


def _answer(wire_error: Callable[[Any], WireError]):
    async def answer(request: Request, error: Exception) -> Response:
        return _error(request, wire_error(error))

    return answer


def _error(request: Request, error: WireError) -> Response:
    """The error in the format of this route's API."""
    body = error_for(request.scope["path"], request.headers, error)
    # SDKs take a conflict for a reason to try again; a session that has ended stays so.
    headers = {"x-should-retry": "false"} if error.status == 409 else None
    return JsonReply(body, status_code=error.status, headers=headers)


def _ended() -> WireError:
    return WireError(409, "the session has ended")


def _fault(error: Exception) -> WireError:
    return WireError(500, f"{type(error).__name__}: {error}")
