"""The generating half of a client of stock servers: one POST per request, until it has ended.

    draft = prompt                            tokens, log-probabilities and versions so far
    while it has not ended:
        version = enter the gate              waits while weights are being loaded
        POST prompt + tokens so far  -------> server
        append its tokens, each of `version` <-------  stop | length | abort (an update came)

A stock server knows no versions and cannot say which weights made which token of an answer. So an
update ends what runs (the server answers with the tokens it has), loads, and lets the requests in
again with what they had: the prefix is computed once more, by the new weights. A request whose
meaning depends on where its output began (`stop` texts, a frequency penalty) starts over instead.

Requests whose connection was lost, or whose reply cannot be trained on (api/io_struct.py), go out
again, at most `retries` times in a row. Where the server has died and is replaced they wait for the
replacement, go on there with the tokens they have, and that attempt does not count. Everything else
that goes wrong is raised, never turned into data.

The door that requests pass one by one and that a weight update closes behind them.

    event loop:       version = await gate.enter(timeout_s)   ... one request ...   gate.leave()
    trainer's thread: gate.close();  gate.wait_empty(s);  <new weights>;  gate.open(version)

What was let in under a version has left before the next one loads: every token of a request is
therefore of the version that `enter` returned. `fail` opens the door to an error instead.

Closing what lives on an event loop, from whichever thread the owner is on.
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
from areal.engine.remote.router import Fleet, Server, SharedWork, retry_delay_s
from areal.engine.remote.server_control import BadReplyError, ServerError, error_text
from areal.utils import logging

logger = logging.getLogger("HttpEngine")

_SEED_END = 1 << 63
_MAX_REPLY = 256 << 20  # bytes
_IDLE_S = 3.0  # shorter than servers keep idle connections, else they close one as we use it


@dataclass(slots=True, eq=False)
class Draft:
    """One request and what it has so far."""

    request: ModelRequest
    budget: int  # most output tokens
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None  # None: it goes on

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
        """What is still to be generated, as a request of its own."""
        gconfig, done = self.request.gconfig, len(self.tokens)
        seed = gconfig.seed
        if seed is not None and done:
            # With the same seed again, the draws of the first segment would be repeated.
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
    """One POST; `scope` bounds it in time and is how it is dropped."""

    scope: asyncio.Timeout
    dropped: bool = False


class HttpClient:
    """Lives on the event loop it is made on. `timeout_s` bounds one attempt of a request, and its
    wait for an update; `max_context` is the most tokens of prompt and output that servers take.
    `replace(address)` is called in a thread when a server failed. It returns the address of the
    server that takes its place, the same one when there is none.
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
        self._fleet = Fleet(addresses)
        self._replace = replace
        self._replacements = SharedWork()  # by the address that was lost
        self.num_resent = 0  # requests sent again after a lost connection or a refused reply
        self.num_refused = 0  # replies
        self._attempts: set[_Attempt] = set()
        self._callers: set[asyncio.Task] = set()
        # No limits here: the executor's gate decides how many requests are in flight.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            headers={"Authorization": f"Bearer {token}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        )

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """ValueError: the request is at fault. ServerError: the server, or the way to it."""
        started = time.perf_counter()
        draft = Draft(request, self._budget(request))
        cost = len(request.input_ids) + draft.budget
        caller = asyncio.current_task()
        assert caller is not None, "a coroutine is run by a task"
        self._callers.add(caller)
        server = self._fleet.take(request.input_ids, cost)
        try:
            failures = 0
            while draft.stop_reason is None:
                address = server.address
                try:
                    progressed = await self._extend(draft, server)
                except (aiohttp.ClientError, OSError, ServerError) as err:
                    # Also after an answer: a server that is about to end may still say 500.
                    is_bad_reply = isinstance(err, BadReplyError)
                    self.num_refused += is_bad_reply
                    if await self._is_replaced(server, address):
                        self.num_resent += 1
                        continue
                    if isinstance(err, ServerError) and not is_bad_reply:
                        raise
                    self._fleet.give_back(server, request.input_ids, cost)
                    self._fleet.avoid(server)
                    server, lost = self._fleet.take(request.input_ids, cost), server
                    await self._after_failure(failures := failures + 1, lost, err)
                else:
                    failures = 0 if progressed else failures
        finally:
            self._fleet.give_back(server, request.input_ids, cost)
            self._callers.discard(caller)
        return draft.response(latency=time.perf_counter() - started)

    def drop_attempts(self) -> None:
        """Closes the connections of all requests that run; they go out again by themselves."""
        for attempt in self._attempts:
            attempt.dropped = True
            attempt.scope.reschedule(self.events.time())

    async def close(self) -> None:
        """Calls that still wait are cancelled."""
        callers = [task for task in self._callers if task is not asyncio.current_task()]
        for task in callers:
            task.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        await self._replacements.close()
        await self._session.close()

    async def _is_replaced(self, server: Server, address: str) -> bool:
        """Whether another process is in the place of the one that had `address`; asked when it
        failed. Raises what `replace` does."""
        if server.address == address:
            await self._replacements.do(address, self._look_after, server)
        return server.address != address

    async def _look_after(self, server: Server) -> None:
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
        """One more segment; whether it was of use. Raises what is worth a retry as it comes."""
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
        if self._gate.serves(version):  # nobody here ordered it
            raise aiohttp.ClientPayloadError("the server aborted the request")
        return True

    async def _post(self, call: HttpRequest, server: Server) -> HttpGenerationResult | None:
        """The answer; None when the attempt was dropped."""
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
        """Waits while the gate is closed; the version that serves. TimeoutError after `timeout_s`.

        RuntimeError when an update has failed: no version serves then.
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
        """Whether everybody left in time. Blocks: not for the event loop."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_inside == 0, timeout_s)

    def open(self, version: int) -> None:
        with self._changed:
            self.version, self._is_open, self._failure = version, True, None
            self._wake_all()

    def fail(self, reason: str) -> None:
        """Whoever comes, or waits, is told `reason`."""
        with self._changed:
            self._is_open, self._failure = True, reason
            self._wake_all()

    def serves(self, version: int) -> bool:
        """Whether requests go in, and `version` is what they get."""
        with self._changed:
            return self._is_open and self.version == version

    def _pass_or_wait(self) -> asyncio.Future[None] | None:
        """None: the caller is in. Else what to wait for before it may try again."""
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


_CLOSE_S = 10.0  # for an event loop that is alive, a matter of milliseconds


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
    """Whether the caller is on `events`."""
    try:
        return asyncio.get_running_loop() is events
    except RuntimeError:
        return False
