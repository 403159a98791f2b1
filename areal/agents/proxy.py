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
| GET /rl/sessions               | admin   | {"sessions": [...]}: those that live                 |
| GET or HEAD /, /api/hello      |         | 200: clients look whether somebody is there          |

A key is sent as `Authorization: Bearer KEY`, as `x-api-key: KEY`, or in the path, for clients that
cannot set one: /sessions/KEY/v1/... Statuses: 400 invalid request, 401 missing or wrong key, 409
session ended, 413 body too large, 429 no session to start now, 500 internal error, 504 took too
long; errors have the shape of the route's API. The key of the proxy's entry (registry.py) opens
what the admin key opens. If a client disconnects, its generation is cancelled and not recorded; if
it tries again, it gets the answer of its first try (retries.py).
A stream begins with the first token, with status 200; a later failure is an error event of its API.
While nothing happens there are keep-alives: comments, or pings in Anthropic's API.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from areal.agents.completions import Route, complete, look, read_prompt
from areal.agents.registry import ID_LENGTH, Entry, session_id_of
from areal.agents.retries import Attempt, SharedCall
from areal.agents.routes import ROUTES, TOKEN_ROUTES
from areal.agents.serving import AppServer, key_of
from areal.agents.session import AgentTimeoutError, Session, SessionEndedError
from areal.agents.sight import sendable_row
from areal.agents.streams import ReplyStream
from areal.agents.token_routes import TokenRoute, complete_tokens
from areal.api.config.inference import AgentConfig
from areal.api.json_text import dumps
from areal.openai.anthropic_requests import PromptBody, prompt_body
from areal.openai.apis import error_for
from areal.openai.errors import WireError, loads_body, parse_body
from areal.openai.models import model_card, model_list
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
    trust,
)

logger = logging.getLogger("AgentProxy")

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

    proxy = AgentProxy(AgentConfig())
    await proxy.start()
    proxy.admit(session)             # its key is accepted from now on
    ...                              # an agent calls proxy.base_url
    proxy.release(session)
    await proxy.stop()
    """

    def __init__(
        self,
        config: AgentConfig,
        *,
        admin_key: str | None = None,
        folder: Path | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """With `mode: online` clients may start the sessions that are passed to `offer`, by
        `admin_key`, or by the key of the entry in `folder`.

        A stream without news gets a keep-alive every `silence_s`.
        """
        self.config = config
        self.silence_s = silence_s
        self.max_body = int(config.max_body_mb * (1 << 20))
        self.id = secrets.token_hex(ID_LENGTH // 2)
        self._folder = folder
        self._admin_keys = [secrets.token_urlsafe(24)]  # that of the entry, and the user's
        if admin_key is not None:
            self._admin_keys.append(admin_key)
        self._sessions: dict[str, Session] = {}
        self._offered: deque[Session] = deque()
        most = config.max_sessions
        self._room = contextlib.nullcontext() if most is None else asyncio.Semaphore(most)
        self._server = AppServer(config.host, config.port, config.advertise_url)
        self._starting = asyncio.Lock()
        self._has_started = False

    @property
    def base_url(self) -> str:
        """What an OpenAI client calls `base_url`."""
        return f"{self._server.url}/v1"

    async def start(self) -> None:
        """Returns when requests are accepted. Idempotent."""
        async with self._starting:
            if self._has_started:
                return
            # Before the first agent, whose timeout it would use up.
            await asyncio.to_thread(wait_until_warm)
            await self._server.start(create_app(self))
            if self._folder is not None:
                self._entry().write(self._folder)
            logger.info("agents talk to %s", self.base_url)
            self._has_started = True

    async def stop(self) -> None:
        for session in [*self._sessions.values(), *self._offered]:
            session.close()
        if self._folder is not None:
            self._entry().remove(self._folder)
        await self._server.stop()

    @contextlib.asynccontextmanager
    async def admitted(self, session: Session) -> AsyncIterator[None]:
        """Accept the session's key meanwhile; waits while there are `max_sessions`."""
        async with self._room:
            self.admit(session)
            try:
                yield
            finally:
                self.release(session)

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
        if not self._has_room:
            raise WireError(
                429,
                f"no session can start now: {self.config.max_sessions} are open "
                "(rollout.agent.max_sessions); ask again later",
            )
        session = self._offered.popleft()
        session.started.set()
        try:
            data = sendable_row(session.data)
            dumps(data)
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
            "data": data,
        }

    def session_of(self, request: Request) -> Session:
        key = key_of(request)
        # Looked up by the public part of the key, then compared as a whole.
        session = self._sessions.get(session_id_of(key))
        if session is None or not session.has_key(key):
            raise WireError(401, "expected 'Authorization: Bearer KEY' with the key of a session")
        trust(request.scope)
        session.touch()
        return session

    def check_admin(self, request: Request) -> None:
        key = key_of(request).encode()
        if not any([hmac.compare_digest(key, known.encode()) for known in self._admin_keys]):
            raise WireError(401, "expected 'Authorization: Bearer KEY' with the admin key")
        trust(request.scope)

    def live_sessions(self) -> list[dict[str, Any]]:
        return [session.describe() for session in [*self._sessions.values(), *self._offered]]

    def _entry(self) -> Entry:
        return Entry.of(self.id, self._server.local_url, self._admin_keys[0])

    @property
    def _has_room(self) -> bool:
        if self.config.max_sessions is None:
            return True
        is_open = [not session.ended.is_set() for session in self._sessions.values()]
        return sum(is_open) < self.config.max_sessions


def create_app(proxy: AgentProxy) -> FastAPI:
    app = new_session_app()
    app.add_exception_handler(SessionEndedError, _answer_with(lambda error: _ended()))

    async def answer_fault(request: Request, error: Exception) -> Response:
        with contextlib.suppress(WireError):  # the request has no session
            proxy.session_of(request).fail(request.scope["path"], error)
        return error_reply(request, _fault(error))

    app.add_exception_handler(Exception, answer_fault)

    for path, route in {**ROUTES, **TOKEN_ROUTES}.items():
        schema = json_body(route.api.body)
        app.add_api_route(path, _endpoint(proxy, route), methods=["POST"], openapi_extra=schema)

    @app.post("/v1/messages/count_tokens", openapi_extra=json_body(PromptBody))
    async def count_tokens(request: Request) -> dict[str, int]:
        session, content = proxy.session_of(request), await _body(proxy, request)
        call, images = await look(session, parse_chat(prompt_body(content)))
        prompt = await asyncio.to_thread(read_prompt, session.options, call, images, None)
        return {"input_tokens": len(prompt.ids)}

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        proxy.session_of(request)
        return model_list("policy")

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> dict[str, Any]:
        proxy.session_of(request)
        return model_card(name)

    @app.post("/rl/set_reward", openapi_extra=json_body(RewardBody))
    async def set_reward(request: Request) -> dict[str, Any]:
        session, content = proxy.session_of(request), await _body(proxy, request)
        if session.ended.is_set() and not session.awaits_reward:
            raise SessionEndedError
        body = parse_body(RewardBody, content)
        name, reward = body.interaction_id, body.reward
        with _callers_fault("reward"):
            session.set_reward(reward if name is None else {name: reward})
        return {"interactions": len(session.cache)}

    @app.post("/rl/end_session", openapi_extra=json_body(EndBody, required=False))
    async def end_session(request: Request) -> dict[str, Any]:
        session, content = proxy.session_of(request), await _body(proxy, request)
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
        if proxy.config.mode != "online":
            raise WireError(404, "sessions are started by the run itself (rollout.agent.mode)")
        proxy.check_admin(request)
        return JsonReply(proxy.start_offered())

    @app.get("/rl/sessions")
    async def sessions(request: Request) -> dict[str, Any]:
        proxy.check_admin(request)
        return {"sessions": proxy.live_sessions()}

    return app


class SessionPaths:
    """A key in the path: /sessions/KEY/v1/..."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path.startswith("/sessions/"):
            _, _, key, *rest = path.split("/", 3)
            # In place: error handlers outside of this middleware look at the scope too.
            scope["path"], scope["session_key"] = f"/{'/'.join(rest)}", key
        await self._app(scope, receive, send)


def _endpoint(proxy: AgentProxy, route: Route | TokenRoute):
    async def answer(request: Request) -> Response:
        session, body = proxy.session_of(request), await _body(proxy, request)
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
            await while_connected(receive, self._answer(call, scope, receive, send))

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
            whole = await _in_time(session.call(work), session.options.config)
            if session.has_failures:
                session.succeed(self._request_text())
            return whole
        except WireError as refused:
            error = refused
        except SessionEndedError:
            error = _ended()
        except AgentTimeoutError as late:
            session.fail(self._request_text(), late)
            error = WireError(504, str(late))
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


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
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


async def _in_time(call: Coroutine[Any, Any, bytes], config: AgentConfig) -> bytes:
    limit_s = config.request_timeout_seconds
    deadline = asyncio.timeout(limit_s)
    try:
        async with deadline:
            return await call
    except TimeoutError:
        if not deadline.expired():  # raised by the call itself
            raise
        raise AgentTimeoutError(
            f"the call took longer than {limit_s:g} s (rollout.agent.request_timeout_seconds)"
        ) from None


async def _body(proxy: AgentProxy, request: Request) -> dict[str, Any]:
    return loads_body(await read_body(request, proxy.max_body) or b"{}")


@contextlib.contextmanager
def _callers_fault(param: str):
    try:
        yield
    except ValueError as error:
        raise WireError(400, str(error), param) from None


def new_session_app() -> FastAPI:
    """An app whose requests may carry a session's key in their path, and whose errors are in the
    format of the route's API."""
    app = new_app(openapi_url=None)
    app.add_middleware(OneV1)
    app.add_middleware(SessionPaths)
    app.add_exception_handler(WireError, _answer_with(lambda error: error))
    app.add_exception_handler(
        HTTPException, _answer_with(lambda error: WireError(error.status_code, error.detail))
    )
    add_hello(app)
    return app


def _answer_with(wire_error: Callable[[Any], WireError]):
    async def answer(request: Request, error: Exception) -> Response:
        return error_reply(request, wire_error(error))

    return answer


def error_reply(request: Request, error: WireError) -> Response:
    """The error in the format of this route's API."""
    body = error_for(request.scope["path"], request.headers, error)
    # SDKs take a conflict for a reason to try again; a session that has ended stays so.
    headers = {"x-should-retry": "false"} if error.status == 409 else None
    return JsonReply(body, status_code=error.status, headers=headers)


def _ended() -> WireError:
    return WireError(409, "the session has ended")


def _fault(error: Exception) -> WireError:
    return WireError(500, f"{type(error).__name__}: {error}")
