"""Generation over stock servers: one POST per request, repeated until it has ended.

    draft = prompt                            tokens, log-probabilities and versions so far
    while it has not ended:
        version = enter the gate              waits while weights are being loaded
        POST prompt + tokens so far  -------> server
        append its tokens, each of `version` <-------  stop | length | abort (an update came)

A stock server has no versions and cannot say which weights produced a token. So an update aborts
in-flight requests (the server returns the tokens so far), loads, and lets the requests continue
from these tokens: the prefix is recomputed with the new weights. A request that depends on where
its output began (`stop` strings, a frequency penalty) starts over instead.

Requests whose connection was lost, or whose reply is unusable (api/io_struct.py), are resent, at
most `retries` times in a row. If the server has died and is replaced, they wait for the replacement
and continue there with their tokens; that attempt does not count. Every other failure is raised,
never turned into data.

`UpdateGate` is the barrier between requests and weight updates: an update waits for in-flight
requests and blocks new ones, so every token of a request is of the version that `enter` returned.

    event loop:       version = await gate.enter(timeout_s)   ... one request ...   gate.leave()
    trainer's thread: gate.close();  gate.wait_empty(s);  <new weights>;  gate.open(version)

`close_on_its_loop` closes an object on its event loop, from any thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from areal.api.io_struct import (
    HttpGenerationResult,
    HttpRequest,
    ModelRequest,
    ModelResponse,
    StopReason,
    check_amount,
    check_tokens,
)
from areal.api.json_text import loads_object
from areal.engine.remote.protocol import ServerProtocol
from areal.engine.remote.router import RequestRouter, Server, SingleFlight, retry_delay_s
from areal.engine.remote.server_control import BadReplyError, ServerError, error_text
from areal.utils import logging

logger = logging.getLogger("HttpEngine")

_SEED_END = 1 << 63
_MAX_REPLY = 256 << 20  # bytes
_IDLE_S = 3.0  # shorter than servers keep idle connections, else they close one in use


@dataclass(slots=True, eq=False)
class Draft:
    """One request and its output so far."""

    request: ModelRequest
    budget: int  # most output tokens
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None  # None: not ended

    def add(self, result: HttpGenerationResult, version: int) -> None:
        if result.stop_reason == "abort" and self._must_start_over:
            self.tokens, self.logprobs, self.versions = [], [], []
            return
        self.tokens += result.output_tokens
        self.logprobs += result.output_logprobs
        self.versions += [version] * len(result.output_tokens)
        if result.stop_reason != "abort":
            self.stop_reason = result.stop_reason
        elif len(self.tokens) == self.budget:
            self.stop_reason = "length"

    def next_request(self) -> ModelRequest:
        """The rest of the generation as a new request."""
        gconfig, done = self.request.gconfig, len(self.tokens)
        seed = gconfig.seed
        if seed is not None and done:
            # The same seed would repeat the draws of the first segment.
            seed = (seed + done) % _SEED_END
        rest = gconfig.new(
            max_new_tokens=self.budget - done,
            min_new_tokens=min(max(0, gconfig.min_new_tokens - done), self.budget - done),
            seed=seed,
        )
        return ModelRequest(
            input_ids=self.request.input_ids + self.tokens, gconfig=rest, rid=self.request.rid
        )

    def response(self, *, latency: float) -> ModelResponse:
        assert self.stop_reason is not None
        return ModelResponse(
            input_tokens=self.request.input_ids,
            output_tokens=self.tokens,
            output_logprobs=self.logprobs,
            output_versions=self.versions,
            stop_reason=self.stop_reason,
            tokenizer=self.request.tokenizer,
            processor=self.request.processor,
            latency=latency,
        )

    @property
    def _must_start_over(self) -> bool:
        gconfig = self.request.gconfig
        return bool(gconfig.stop) or gconfig.frequency_penalty != 0


@dataclass(slots=True, eq=False)
class _Attempt:
    """One POST; `scope` is its timeout, and cancels it."""

    scope: asyncio.Timeout
    dropped: bool = False


class HttpClient:
    """Bound to the event loop it is created on. `timeout_s` bounds one attempt of a request, and
    its wait for an update; `max_context` is the servers' limit on prompt and output tokens.
    `replace(address)` is called in a thread when a server failed. It returns the address of the
    replacement, or the same address if there is none.
    """

    def __init__(
        self,
        protocol: ServerProtocol,
        addresses: Iterable[str],
        token: str,
        gate: UpdateGate,
        *,
        timeout_s: float,
        retries: int,
        max_context: int | None,
        vocab_size: int | None,
        replace: Callable[[str], str],
    ) -> None:
        self.events = asyncio.get_running_loop()
        self._protocol = protocol
        self._gate = gate
        self._timeout_s = timeout_s
        self._retries = retries
        self._max_context = max_context
        self._vocab_size = vocab_size
        self._router = RequestRouter(addresses)
        self._replace = replace
        self._replacements = SingleFlight()  # by the lost address
        self.num_resent = 0  # requests sent again after a lost connection or a refused reply
        self.num_refused = 0  # replies
        self._attempts: set[_Attempt] = set()
        self._callers: set[asyncio.Task] = set()
        # No limits here: the executor bounds the requests in flight.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            headers={"Authorization": f"Bearer {token}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        )

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """ValueError: the request is invalid. ServerError: the server or the connection failed."""
        started = time.perf_counter()
        draft = Draft(request, self._budget(request))
        cost = len(request.input_ids) + draft.budget
        caller = asyncio.current_task()
        assert caller is not None, "a coroutine is run by a task"
        self._callers.add(caller)
        server = self._router.take(request.input_ids, cost)
        try:
            failures = 0
            while draft.stop_reason is None:
                address = server.address
                try:
                    progressed = await self._extend(draft, server)
                except (aiohttp.ClientError, OSError, ServerError) as err:
                    # Also after a reply: a server that is shutting down may still return 500.
                    is_bad_reply = isinstance(err, BadReplyError)
                    self.num_refused += is_bad_reply
                    if await self._is_replaced(server, address):
                        self.num_resent += 1
                        continue
                    if isinstance(err, ServerError) and not is_bad_reply:
                        raise
                    self._router.give_back(server, request.input_ids, cost)
                    self._router.avoid(server)
                    server, lost = self._router.take(request.input_ids, cost), server
                    await self._after_failure(failures := failures + 1, lost, err)
                else:
                    failures = 0 if progressed else failures
        finally:
            self._router.give_back(server, request.input_ids, cost)
            self._callers.discard(caller)
        return draft.response(latency=time.perf_counter() - started)

    def drop_attempts(self) -> None:
        """Closes the connections of all in-flight requests, which are then resent."""
        for attempt in self._attempts:
            attempt.dropped = True
            attempt.scope.reschedule(self.events.time())

    async def close(self) -> None:
        """Cancels pending calls."""
        callers = [task for task in self._callers if task is not asyncio.current_task()]
        for task in callers:
            task.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        await self._replacements.close()
        await self._session.close()

    async def _is_replaced(self, server: Server, address: str) -> bool:
        """Whether the failed server at `address` was replaced. Raises what `replace` raises."""
        if server.address == address:
            await self._replacements.do(address, self._replace_server, server)
        return server.address != address

    async def _replace_server(self, server: Server) -> None:
        server.address = await asyncio.to_thread(self._replace, server.address)

    def _budget(self, request: ModelRequest) -> int:
        gconfig, prompt = request.gconfig, len(request.input_ids)
        most = min(gconfig.max_tokens, self._max_context or gconfig.max_tokens)
        if not prompt:
            raise ValueError("input_ids: expected at least one token id, got an empty list")
        if prompt >= most:
            raise ValueError(
                f"input_ids: {prompt} tokens leave no room for output: the bound of prompt and "
                f"output is {most}, the smaller of gconfig.max_tokens ({gconfig.max_tokens}) and "
                f"the server's context ({self._max_context})"
            )
        return min(gconfig.max_new_tokens, most - prompt)

    async def _extend(self, draft: Draft, server: Server) -> bool:
        """Generates one more segment; whether it made progress. Retryable errors are raised."""
        try:
            version = await self._gate.enter(self._timeout_s)
        except TimeoutError:
            raise ServerError(
                f"{self._where(server)}: the weight update did not end within {self._timeout_s:g} s"
            ) from None
        try:
            rest = draft.next_request()
            result = await self._post(self._protocol.generation(rest), server)
        finally:
            self._gate.leave()
        if result is None:
            return True  # dropped for an update
        self._check(result, rest.gconfig.max_new_tokens, server)
        draft.add(result, version)
        if result.stop_reason == "abort" and not result.output_tokens:
            return self._was_interrupted(version, server)
        return True

    def _was_interrupted(self, version: int, server: Server) -> bool:
        if self._gate.serves(version):  # not aborted by an update of ours
            raise aiohttp.ClientPayloadError("the server aborted the request")
        return True

    async def _post(self, call: HttpRequest, server: Server) -> HttpGenerationResult | None:
        """The reply; None if the attempt was dropped."""
        attempt = None
        try:
            async with asyncio.timeout(self._timeout_s) as scope:
                attempt = _Attempt(scope)
                self._attempts.add(attempt)
                url = f"http://{server.address}{call.endpoint}"
                async with self._session.request(call.method, url, json=call.payload) as answer:
                    content = await self._content(answer, server)
        except TimeoutError:
            if attempt is not None and attempt.dropped:
                return None
            limit = f"{self._timeout_s:g} s (rollout.request_timeout)"
            raise ServerError(f"{self._where(server)}: no reply within {limit}") from None
        finally:
            self._attempts.discard(attempt)
        if answer.status in (400, 404, 422):
            raise ValueError(f"{self._where(server)} refused the request: {error_text(content)}")
        if answer.status != 200:
            raise ServerError(f"{self._where(server)}: {answer.status}: {error_text(content)}")
        return self._read(content, server)

    def _read(self, content: bytes, server: Server) -> HttpGenerationResult:
        try:
            return self._protocol.read(loads_object(content))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as err:
            raise self._bad_reply(server, f"{type(err).__name__}: {err}") from err

    def _check(self, result: HttpGenerationResult, budget: int, server: Server) -> None:
        try:
            check_tokens(result.output_tokens, vocab_size=self._vocab_size)
            check_amount(len(result.output_tokens), result.stop_reason, max_tokens=budget)
        except ValueError as err:
            raise self._bad_reply(server, str(err)) from err

    async def _content(self, answer: aiohttp.ClientResponse, server: Server) -> bytes:
        chunks, size = [], 0
        async for chunk in answer.content.iter_any():
            size += len(chunk)
            if size > _MAX_REPLY:
                raise self._bad_reply(server, f"more than {_MAX_REPLY} bytes")
            chunks.append(chunk)
        return b"".join(chunks)

    def _bad_reply(self, server: Server, fault: str) -> BadReplyError:
        return BadReplyError(f"{self._where(server)}: malformed reply: {fault}")

    async def _after_failure(self, failures: int, server: Server, err: Exception) -> None:
        fault = str(err)  # a BadReplyError names the server itself
        if not isinstance(err, BadReplyError):
            fault = f"{self._where(server)}: {type(err).__name__}: {err}"
        if failures > self._retries:
            raise ServerError(f"{fault} (after {failures} attempts)")
        self.num_resent += 1
        delay = retry_delay_s(failures)
        logger.warning("%s; sending the request again in %.1f s", fault, delay)
        await asyncio.sleep(delay)

    def _where(self, server: Server) -> str:
        return f"{self._protocol.kind} {server.address}"


class UpdateGate:
    def __init__(self) -> None:
        self.version = 0
        self._changed = threading.Condition()
        self._is_open = True
        self._num_inside = 0
        self._failure: str | None = None
        self._waiters: set[asyncio.Future[None]] = set()

    async def enter(self, timeout_s: float) -> int:
        """Waits while the gate is closed; returns the live version. TimeoutError after `timeout_s`.

        RuntimeError if an update has failed: no version is live then.
        """
        async with asyncio.timeout(timeout_s):
            while (waiter := self._pass_or_wait()) is not None:
                try:
                    await waiter
                finally:
                    with self._changed:
                        self._waiters.discard(waiter)
        return self.version

    def leave(self) -> None:
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_open = False

    def wait_empty(self, timeout_s: float) -> bool:
        """Whether all requests left in time. Blocking: not for the event loop."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_inside == 0, timeout_s)

    def open(self, version: int) -> None:
        with self._changed:
            self.version, self._is_open, self._failure = version, True, None
            self._wake_all()

    def fail(self, reason: str) -> None:
        """Current and future callers of `enter` get RuntimeError with `reason`."""
        with self._changed:
            self._is_open, self._failure = True, reason
            self._wake_all()

    def serves(self, version: int) -> bool:
        """Whether the gate is open at `version`."""
        with self._changed:
            return self._is_open and self.version == version

    def _pass_or_wait(self) -> asyncio.Future[None] | None:
        """None: the caller entered. Else a future to await before the next try."""
        with self._changed:
            if self._failure is not None:
                raise RuntimeError(self._failure)
            if self._is_open:
                self._num_inside += 1
                return None
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            return waiter

    def _wake_all(self) -> None:
        for waiter in self._waiters:
            waiter.get_loop().call_soon_threadsafe(_wake, waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


_CLOSE_S = 10.0  # a live event loop needs milliseconds


def close_on_its_loop(
    events: asyncio.AbstractEventLoop, close: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Runs `close()` on `events`; waits for it, unless this is the loop's own thread."""
    if events.is_closed():
        return
    if not events.is_running():
        events.run_until_complete(close())
    elif runs_here(events):
        events.create_task(close(), name="client-close")
    else:
        asyncio.run_coroutine_threadsafe(close(), events).result(_CLOSE_S)


def runs_here(events: asyncio.AbstractEventLoop) -> bool:
    """Whether the caller runs on `events`."""
    try:
        return asyncio.get_running_loop() is events
    except RuntimeError:
        return False
