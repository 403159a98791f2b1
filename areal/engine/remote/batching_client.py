"""Generation over native servers: many concurrent calls, few HTTP exchanges.

    generate --+
    generate --+--> all calls of one event loop tick --> one POST /generate per server
    generate --+                                                     |
        ^--------------- each future, as its line comes back --------+

One exchange carries hundreds of requests, so the cost of HTTP is per tick, not per sample. Calls
with the same prompt go to the same server and share its computation there.

Servers report the tokens of long outputs at intervals. Requests whose connection was lost are
resent with the tokens received so far, at most `retries` times; with a seed they get the same
tokens. Requests with an unusable reply (api/io_struct.py) are resent without the tokens of that
server. If the server has died, they wait for its replacement, or go to other servers if there is
none; that attempt does not count. Every other failure is raised, never turned into data.

`Deadlines` are time limits on a clock that can be stopped from any thread while servers are
unavailable on purpose:

    deadlines = Deadlines(60.0)
    async with deadlines.limit(): ...      # TimeoutError after 60 seconds of the clock
    deadlines.stop(); deadlines.resume()

A limit entered while the clock is stopped starts with its full time.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from areal.api.engine_api import EngineLostError
from areal.api.io_struct import ModelRequest, check_amount, check_tokens, check_versions
from areal.engine.native.sequence import Finished, GenRequest, Progress
from areal.engine.native.wire import (
    BadLineError,
    Refusal,
    Reply,
    decode_line,
    encode_requests,
)
from areal.engine.remote.router import RequestRouter, Server, SingleFlight, retry_delay_s
from areal.engine.remote.server_control import (
    BadReplyError,
    ServerEndedError,
    ServerError,
    error_text,
)
from areal.engine.remote.server_pool import ServerPool
from areal.utils import logging
from areal.utils.waits import waiting

logger = logging.getLogger("NativeRemoteEngine")

_MAX_LINE = 256 << 20  # bytes
PROGRESS_TOKENS = 64  # most tokens of a request that are lost with its server


@dataclass(slots=True, eq=False)
class _Pending:
    """One call."""

    request: ModelRequest
    future: asyncio.Future[Reply]
    so_far: Progress | None = None  # output received so far
    num_sent: int = 0  # tokens of it that were sent to the current server
    attempts: int = 0
    exchange: _Exchange | None = None

    @property
    def max_tokens(self) -> int:
        return len(self.request.input_ids) + self.request.gconfig.max_new_tokens

    @property
    def budget(self) -> int:
        gconfig = self.request.gconfig
        return min(gconfig.max_new_tokens, gconfig.max_tokens - len(self.request.input_ids))

    def add_progress(self, told: Progress) -> None:
        if self.so_far is None:
            self.so_far = told
            return
        self.so_far.tokens += told.tokens
        self.so_far.logprobs += told.logprobs
        self.so_far.versions += told.versions

    def wire_request(self, rid: str) -> GenRequest:
        request = self.request
        self.num_sent = 0 if self.so_far is None else len(self.so_far.tokens)
        return GenRequest(
            rid,
            request.input_ids,
            request.gconfig,
            progress_tokens=PROGRESS_TOKENS,
            so_far=self.so_far,
        )

    def describe(self) -> str:
        exchange = self.exchange
        return "a native server" if exchange is None else _where(exchange.server)


@dataclass(slots=True, eq=False)
class _Exchange:
    """One POST and the calls that wait for it, by their rid on the wire."""

    server: Server
    address: str  # of the server at the time of sending
    waiting: dict[str, _Pending]
    num_wanted: int  # calls not cancelled yet
    refused: set[str] = field(default_factory=set)  # rids of bad replies: more lines may follow
    task: asyncio.Task = field(init=False)  # runs it


class GenerateClient:
    """Bound to the event loop it is created on. `deadlines` bound one attempt of a request.

    `pool` is the server pool; it is called in a thread to replace a lost server.
    """

    def __init__(
        self,
        pool: ServerPool,
        token: str,
        *,
        deadlines: Deadlines,
        retries: int,
        vocab_size: int | None,
        counts: Counter[str],
    ) -> None:
        """`counts` gets `replies_refused`, and after a lost connection `requests_resent` and
        `tokens_kept`."""
        self.events = asyncio.get_running_loop()
        self._router = RequestRouter(pool.addresses)
        self._deadlines = deadlines
        self._retries = retries
        self._pool = pool
        self._vocab_size = vocab_size
        # Single-flight by address: shared by all exchanges that lost one server.
        self._verdicts, self._replacements = SingleFlight(), SingleFlight()
        self._counts = counts
        self._open: set[asyncio.Future[Reply]] = set()  # of all pending calls
        self._outbox: list[_Pending] = []  # calls of this tick
        self._tasks: dict[asyncio.Task, Server] = {}  # of exchanges, with their server
        # Two callers may use one rid (copies of a request): on the wire each attempt has a suffix.
        self._client_id = secrets.token_hex(4)
        self._num_sent = itertools.count()
        # No limits here: the executor bounds the requests in flight.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={"Authorization": f"Bearer {token}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        )

    async def generate(self, request: ModelRequest) -> Reply:
        """ValueError: the request is invalid. ServerError: the server or the connection failed."""
        pending = _Pending(request, self.events.create_future())
        self._open.add(pending.future)
        self._send_soon([pending])
        try:
            with waiting(pending.describe):
                return await pending.future
        except asyncio.CancelledError:
            _give_up(pending)
            raise
        finally:
            self._open.discard(pending.future)

    def add_server(self, address: str) -> None:
        if self._server_of(address) is None:  # it may have joined before this client was created
            self._router.add(address)

    async def drain(self, address: str) -> None:
        """Send the server no more requests, and wait until its in-flight ones are finished."""
        server = self._server_of(address)
        if server is None:
            return
        self._router.remove(server)
        tasks = [task for task, to in self._tasks.items() if to is server]
        if tasks:
            await asyncio.wait(tasks)

    async def close(self) -> None:
        """Cancels pending calls."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._verdicts.close()
        await self._replacements.close()
        await self._session.close()
        # Last, because the event loop may end as soon as the callers have.
        for future in list(self._open):
            future.cancel()

    def _send_soon(self, calls: Iterable[_Pending]) -> None:
        if not self._outbox:
            self.events.call_soon(self._send_outbox)
        self._outbox.extend(calls)

    def _send_outbox(self) -> None:
        calls = [pending for pending in self._outbox if not pending.future.done()]
        self._outbox.clear()
        for server, share in self._assign(calls):
            calls_by_rid = {self._wire_rid(pending): pending for pending in share}
            exchange = _Exchange(server, server.address, calls_by_rid, num_wanted=len(share))
            for pending in share:
                pending.exchange = exchange
            task = exchange.task = self.events.create_task(self._carry(exchange))
            self._tasks[task] = server
            task.add_done_callback(self._tasks.pop)

    def _server_of(self, address: str) -> Server | None:
        return next((one for one in self._router.servers if one.address == address), None)

    def _wire_rid(self, pending: _Pending) -> str:
        return f"{pending.request.rid[:200]}.{self._client_id}.{next(self._num_sent)}"

    def _assign(self, calls: list[_Pending]) -> Iterable[tuple[Server, list[_Pending]]]:
        """The calls of each server, the samples of one prompt together."""
        shares: dict[Server, list[_Pending]] = {}
        for pending in calls:
            server = self._router.take(pending.request.input_ids, pending.max_tokens)
            shares.setdefault(server, []).append(pending)
        return shares.items()

    async def _carry(self, exchange: _Exchange) -> None:
        """One exchange from POST to last line; every call gets a reply, an error or a retry."""
        server, calls = exchange.server, list(exchange.waiting.values())
        try:
            async with self._deadlines.limit():
                await self._post(exchange)
            if exchange.waiting:
                raise aiohttp.ClientPayloadError(f"{len(exchange.waiting)} replies are missing")
        except aiohttp.ClientError as err:
            await self._on_lost(exchange, err)
        except TimeoutError:
            limit = f"{self._deadlines.timeout_s:g} s (rollout.request_timeout)"
            err = ServerError(f"{_where(server)}: no reply within {limit}")
            _fail(exchange.waiting.values(), err)
        except OSError as err:
            await self._on_lost(exchange, err)
        except BadReplyError as err:
            self._refuse(exchange.waiting.values(), server, err)
        except ServerEndedError as err:
            self._elsewhere(exchange.waiting.values(), server, err)
        except (ServerError, ValueError) as err:
            _fail(exchange.waiting.values(), err)
        finally:
            for pending in calls:
                self._router.give_back(server, pending.request.input_ids, pending.max_tokens)

    async def _post(self, exchange: _Exchange) -> None:
        body = encode_requests(
            pending.wire_request(rid) for rid, pending in exchange.waiting.items()
        )
        url = f"http://{exchange.address}/generate"
        async with self._session.post(url, data=body) as answer:
            if answer.status != 200:
                raise _error_of(exchange.server, answer.status, await answer.text())
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._take_line(exchange, line)
                if len(rest) > _MAX_LINE:
                    raise _bad_reply(exchange.server, f"a line of more than {_MAX_LINE} bytes")

    def _take_line(self, exchange: _Exchange, line: bytes) -> None:
        server = exchange.server
        result: Reply | Refusal | Progress | None = None
        fault: str | None = None
        try:
            result = decode_line(line)
            rid = result.rid
        except BadLineError as err:
            rid, fault = err.rid, str(err)
        except ValueError as err:  # not attributable to one request
            raise _bad_reply(server, str(err)) from err
        if rid in exchange.refused:
            return
        if rid not in exchange.waiting:
            raise _bad_reply(server, f"to {rid[:60]!r}, which nobody sent")
        if result is not None:
            fault = self._fault(exchange.waiting[rid], result)
        if fault is not None:
            exchange.refused.add(rid)
            pending = _settled(exchange, rid)
            self._refuse([] if pending is None else [pending], server, _bad_reply(server, fault))
        elif isinstance(result, Progress):
            exchange.waiting[rid].add_progress(result)
        elif result is not None and (pending := _settled(exchange, rid)) is not None:
            self._answer(pending, server, result)

    def _answer(self, pending: _Pending, server: Server, result: Reply | Refusal) -> None:
        if isinstance(result, Reply):
            pending.future.set_result(result)
        elif result.kind == "request":
            pending.future.set_exception(ValueError(result.message))
        else:
            self._elsewhere([pending], server, ServerError(f"{_where(server)}: {result.message}"))

    def _fault(self, pending: _Pending, result: Reply | Refusal | Progress) -> str | None:
        """Why this cannot be trained on; None if it can."""
        try:
            if isinstance(result, Progress):
                self._check_progress(pending, result)
            elif isinstance(result, Reply):
                self._check_reply(pending, result.finished)
        except ValueError as err:
            return str(err)
        return None

    def _check_progress(self, pending: _Pending, told: Progress) -> None:
        before = [] if pending.so_far is None else pending.so_far.versions
        own = before[pending.num_sent :]
        check_tokens(told.tokens, vocab_size=self._vocab_size)
        check_amount(len(before) + len(told.tokens), None, max_tokens=pending.budget)
        newest = self._pool.newest_version
        check_versions(told.versions, newest=newest, first=own[-1] if own else 0)

    def _check_reply(self, pending: _Pending, finished: Finished) -> None:
        tokens, versions, so_far = finished.output_tokens, finished.output_versions, pending.so_far
        check_tokens(tokens, vocab_size=self._vocab_size)
        check_amount(len(tokens), finished.stop_reason, max_tokens=pending.budget)
        if so_far is not None:
            told = so_far.tokens, so_far.versions
            if told != (tokens[: len(so_far.tokens)], versions[: len(so_far.tokens)]):
                raise ValueError("output_tokens: expected those told before, at the beginning")
        check_versions(versions[pending.num_sent :], newest=self._pool.newest_version)

    def _refuse(self, calls: Collection[_Pending], server: Server, err: BadReplyError) -> None:
        self._counts["replies_refused"] += 1
        for pending in calls:
            pending.so_far = None
        if calls:
            self._retry(calls, server, err)

    async def _on_lost(self, exchange: _Exchange, err: Exception) -> None:
        """Resend unanswered requests: at once if the server has died, else after a delay."""
        server, address = exchange.server, exchange.address
        calls = exchange.waiting.values()
        if not await self._verdicts.do(address, self._judge, server, address):
            return self._retry(calls, server, err)
        self._replacements.start(address, self._replace_server, server, address)
        if not self._others(server):
            try:
                await self._replacements.do(address, self._replace_server, server, address)
            except (ServerError, EngineLostError) as lost:
                return _fail(calls, lost)
        return self._send_again(calls)

    async def _judge(self, server: Server, address: str) -> bool:
        """Whether the server at this address has ended."""
        if server.address != address or server not in self._router.servers:
            return True
        return await asyncio.to_thread(self._pool.is_gone, address)

    async def _replace_server(self, server: Server, address: str) -> None:
        if server.address != address:
            return
        self._router.avoid(server, math.inf)
        try:
            successor = await asyncio.to_thread(self._pool.successor, address)
        except EngineLostError as lost:
            logger.error("%s", lost)  # raised again for the next request sent there
            raise
        finally:
            server.avoided_until = 0
        if successor is None:
            self._router.remove(server)
            if not self._router.servers:  # unless one has just joined and is about to be added
                self._router.add(self._pool.addresses[0])
        else:
            server.address = successor

    def _others(self, server: Server) -> bool:
        """Whether requests can go to another server now."""
        return any(one is not server and not one.is_avoided for one in self._router.servers)

    def _elsewhere(self, calls: Collection[_Pending], server: Server, err: ServerError) -> None:
        """Resend to another server, if there is one."""
        if self._others(server):
            self._retry(calls, server, err)
        else:
            _fail(calls, err)

    def _retry(self, calls: Collection[_Pending], server: Server, err: Exception) -> None:
        self._router.avoid(server)
        fault, again = str(err), []  # a BadReplyError names the server itself
        if not isinstance(err, BadReplyError):
            fault = f"{_where(server)}: {type(err).__name__}: {err}"
        for pending in calls:
            pending.attempts += 1
            if pending.attempts <= self._retries:
                again.append(pending)
            else:
                _fail([pending], ServerError(f"{fault} (after {pending.attempts} attempts)"))
        if again:
            delay = retry_delay_s(min(pending.attempts for pending in again))
            logger.warning("%s; sending %d requests again in %.1f s", fault, len(again), delay)
            self.events.call_later(delay, self._send_again, again)

    def _send_again(self, calls: Collection[_Pending]) -> None:
        self._counts["requests_resent"] += len(calls)
        for pending in calls:
            pending.exchange = None
            if pending.so_far is not None:
                self._counts["tokens_kept"] += len(pending.so_far.tokens)
        self._send_soon(calls)


def _fail(calls: Iterable[_Pending], err: Exception) -> None:
    for pending in calls:
        if not pending.future.done():
            pending.future.set_exception(type(err)(*err.args))


def _give_up(pending: _Pending) -> None:
    """Drops an exchange whose calls were all cancelled; the server then aborts them."""
    exchange, pending.exchange = pending.exchange, None
    if exchange is not None:
        exchange.num_wanted -= 1
        if exchange.num_wanted == 0:
            exchange.task.cancel()


def _settled(exchange: _Exchange, rid: str) -> _Pending | None:
    """The call, removed from the exchange; None if it was cancelled."""
    pending = exchange.waiting.pop(rid)
    if pending.exchange is None:  # given up
        return None
    pending.exchange = None
    exchange.num_wanted -= 1
    # Else cancelled in this very tick: its caller has not run since.
    return None if pending.future.done() else pending


def _bad_reply(server: Server, fault: str) -> BadReplyError:
    return BadReplyError(f"{_where(server)}: malformed reply: {fault}")


def _error_of(server: Server, status: int, body: str) -> Exception:
    message = error_text(body)
    if status == 400:
        return ValueError(message)
    if status == 503:
        return ServerEndedError(f"{_where(server)}: {status}: {message}", status)
    return ServerError(f"{_where(server)}: {status}: {message}")


def _where(server: Server) -> str:
    return f"native server {server.address}"


class Deadlines:
    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._lock = threading.Lock()  # guards all below
        self._due: dict[asyncio.Timeout, tuple[asyncio.AbstractEventLoop, float]] = {}
        self._stopped_at: float | None = None
        self._stood_s = 0.0

    def __reduce__(self) -> tuple[type[Deadlines], tuple[float]]:
        """A copy in another process has its own running clock."""
        return Deadlines, (self.timeout_s,)

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        async with asyncio.timeout(None) as scope:
            with self._lock:
                due = self._clock() + self.timeout_s
                self._due[scope] = (asyncio.get_running_loop(), due)
            self._set_alarm(scope)
            try:
                yield
            finally:
                with self._lock:
                    del self._due[scope]

    def stop(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._stopped_at is None:
                self._stopped_at = time.monotonic()
            self._set_alarms()

    def resume(self) -> None:
        with self._lock:
            if self._stopped_at is not None:
                self._stood_s += time.monotonic() - self._stopped_at
                self._stopped_at = None
            self._set_alarms()

    def _clock(self) -> float:
        now = time.monotonic() if self._stopped_at is None else self._stopped_at
        return now - self._stood_s

    def _set_alarms(self) -> None:
        for scope, (events, _) in self._due.items():
            events.call_soon_threadsafe(self._set_alarm, scope)

    def _set_alarm(self, scope: asyncio.Timeout) -> None:
        """Runs on the event loop of `scope`, which may have ended by then."""
        with self._lock:
            if scope not in self._due:
                return
            events, due = self._due[scope]
            left_s = None if self._stopped_at is not None else due - self._clock()
        scope.reschedule(None if left_s is None else events.time() + left_s)
