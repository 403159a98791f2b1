"""Generation over inference servers: routing, deadlines, checks of replies, retries, continuation.

    generate --+
    generate --+--> all calls of one event loop tick --> exchanges: one POST per server, or per call
    generate --+                                                     |
        ^--------------- each future, as its result comes back ------+

A server that `batches` gets the calls of a tick in one exchange, so the cost of HTTP is per tick,
not per sample. Calls with the same prompt go to the same server and share its computation there.
How an exchange is spelled is up to the protocol (protocol.py); which servers there are, to the pool
(server_pool.py), which is asked before each exchange.

    connection lost                       resent with its tokens, at most `retries` times
    connection lost, server has died      to another, or waits for the replacement; not counted
    reply unusable (api/io_struct.py)     resent without its tokens, at most `retries` times; with
                                          those that its caller was told (`on_tokens`)
    aborted by a weight update            resent with its tokens; not counted
    anything else                         raised, never turned into data
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import groupby

import aiohttp

from areal.api.engine_api import EngineLostError
from areal.api.io_struct import (
    NO_ROOM,
    ModelRequest,
    ModelResponse,
    Sample,
    check_amount,
    check_token,
    check_versions,
)
from areal.engine.native.frames import Result
from areal.engine.remote.deadlines import Deadlines
from areal.engine.remote.protocol import Draft, ServerProtocol, bad_reply
from areal.engine.remote.router import RequestRouter, Server, SingleFlight, retry_delay_s
from areal.engine.remote.server_control import BadReplyError, ServerEndedError, ServerError
from areal.engine.remote.server_pool import ServerPool
from areal.engine.remote.update_gate import GateState, UpdateGate
from areal.engine.server_time import InFlight
from areal.utils import logging
from areal.utils.perf_tracer import trace_generation
from areal.utils.threads import in_thread
from areal.utils.waits import waiting

logger = logging.getLogger("RemoteEngine")

_ABORT_S = 30.0  # a live server needs milliseconds
_IDLE_S = 3.0  # shorter than servers keep idle connections, else they close one in use


@dataclass(slots=True, eq=False)
class _Wait:
    """What a caller awaits: the end of all samples it asked for."""

    future: asyncio.Future[None]
    num_missing: int


@dataclass(slots=True, eq=False)
class _Call:
    """One sample that a caller waits for."""

    draft: Draft
    wait: _Wait
    cost: int  # most tokens of prompt and output
    attempts: int = 0
    exchange: _Exchange | None = None
    rid: str = ""  # on the wire, in `exchange`
    has_ended: bool = False
    error: Exception | None = None  # that it ended with

    @property
    def is_over(self) -> bool:
        """It has ended, or its caller was cancelled."""
        return self.has_ended or self.wait.future.done()

    def end(self, error: Exception | None = None) -> None:
        if not self.is_over:
            self.has_ended, self.error = True, error
            self.wait.num_missing -= 1
            if not self.wait.num_missing:
                self.wait.future.set_result(None)


@dataclass(slots=True, eq=False)
class _Exchange:
    """One POST and the calls that wait for it, by their rid on the wire."""

    server: Server
    waiting: dict[str, _Call]
    num_wanted: int  # calls not cancelled yet
    places: list[tuple[Sequence[int], int]]  # prompts and tokens that the router has counted
    closed: set[str] = field(default_factory=set)  # rids whose further results are ignored
    given_up: list[str] = field(default_factory=list)  # rids that the server is still to abort
    entry: GateState | None = None  # while it is inside the gate
    is_dropped: bool = False
    task: asyncio.Task = field(init=False)  # runs it


class GenerateClient:
    """Bound to the event loop it is created on.

    `pool` is called in a thread to replace a lost server. `gate` is needed unless servers version
    tokens. `deadlines` bound one attempt of a request, and its wait for an update; `max_context` is
    the servers' limit on prompt and output tokens, if it is known here.
    """

    def __init__(
        self,
        protocol: ServerProtocol,
        pool: ServerPool,
        *,
        gate: UpdateGate | None,
        deadlines: Deadlines,
        retries: int,
        max_context: int | None,
        vocab_size: int | None,
        counts: Counter[str],
        in_flight: InFlight,
    ) -> None:
        """`counts` gets `replies_refused`, and after a failure `requests_resent` and `tokens_kept`;
        `in_flight` gets when exchanges ran."""
        self.events = asyncio.get_running_loop()
        self._protocol = protocol
        self._pool = pool
        self._gate = gate
        self._router = RequestRouter(pool.addresses)
        self._deadlines = deadlines
        self._retries = retries
        self._max_context = max_context
        self._vocab_size = vocab_size
        # Single-flight by address: shared by all exchanges that lost one server.
        self._verdicts, self._replacements = SingleFlight(), SingleFlight()
        self._counts = counts
        self._in_flight = in_flight
        self._open: set[asyncio.Future[None]] = set()  # that callers await
        self._outbox: list[_Call] = []  # calls of this tick
        self._exchanges: dict[asyncio.Task, _Exchange] = {}
        self._aborts: set[asyncio.Task] = set()  # of requests that nobody waits for
        self._is_closed = False
        # Two callers may use one rid (copies of a request): on the wire each attempt has a suffix.
        self._client_id = secrets.token_hex(4)
        self._num_sent = itertools.count()
        self._sessions: dict[str, aiohttp.ClientSession] = {}  # by token

    async def generate(self, request: ModelRequest) -> ModelResponse:
        """ValueError: the request is invalid. ServerError: the server or the connection failed."""
        began = time.perf_counter()
        draft = Draft(request, self._budget(request))
        (call,) = await self._run(request, [draft])
        if call.error is not None:
            raise call.error
        return draft.response(latency=time.perf_counter() - began)

    async def generate_group(
        self, request: ModelRequest, seeds: Sequence[int | None]
    ) -> list[Sample | Exception]:
        """One sample of `request` per seed, by one future: no task, no wake-up for each."""
        budget, group = self._budget(request), f"{request.rid[:200]}.{next(self._num_sent)}"
        drafts = [Draft(request, budget, group, seed) for seed in seeds]
        calls = await self._run(request, drafts)
        return [call.draft.sample() if call.error is None else call.error for call in calls]

    async def _run(self, request: ModelRequest, drafts: Sequence[Draft]) -> list[_Call]:
        """Returns when all drafts of `request` have ended, well or not."""
        assert drafts, "nothing would end the wait"
        self._protocol.check_request(request)
        began = time.perf_counter()
        wait = _Wait(self.events.create_future(), len(drafts))
        calls = [_Call(draft, wait, len(request.input_ids) + draft.budget) for draft in drafts]
        self._open.add(wait.future)
        self._send_soon(calls)
        try:
            with waiting(lambda: self._describe(calls[-1])):
                await wait.future
        except asyncio.CancelledError:
            for call in calls:
                self._give_up(call)
            raise
        finally:
            self._open.discard(wait.future)
        trace_generation(began, time.perf_counter(), max(draft.ttft for draft in drafts))
        return calls

    async def drain(self, address: str) -> None:
        """Waits until in-flight requests of a server that has left the pool are finished."""
        tasks = [task for task, one in self._exchanges.items() if one.server.address == address]
        if tasks:
            await asyncio.wait(tasks)

    def drop_exchanges(self) -> None:
        """Closes the connections of all in-flight requests, which are then resent."""
        for exchange in self._exchanges.values():
            if exchange.entry is not None:
                exchange.is_dropped = True
                exchange.task.cancel()

    async def close(self) -> None:
        """Cancels pending calls."""
        self._is_closed = True
        tasks = [*self._exchanges, *self._aborts]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._verdicts.close()
        await self._replacements.close()
        for session in self._sessions.values():
            await session.close()
        # Last, because the event loop may end as soon as the callers have.
        for future in list(self._open):
            future.cancel()

    def _budget(self, request: ModelRequest) -> int:
        gconfig, prompt = request.gconfig, len(request.input_ids)
        most = min(gconfig.max_tokens, self._max_context or gconfig.max_tokens)
        if not prompt:
            raise ValueError("input_ids: expected at least one token id, got an empty list")
        if prompt >= most:
            raise ValueError(
                f"input_ids: {prompt} tokens leave {NO_ROOM}: the bound of prompt and "
                f"output is {most}, the smaller of gconfig.max_tokens ({gconfig.max_tokens}) and "
                f"the server's context ({self._max_context})"
            )
        return min(gconfig.max_new_tokens, most - prompt)

    def _send_soon(self, calls: Iterable[_Call]) -> None:
        if not self._outbox:
            self.events.call_soon(self._send_outbox)
        self._outbox.extend(calls)

    def _send_outbox(self) -> None:
        calls = [call for call in self._outbox if not call.is_over]
        self._outbox.clear()
        if self._is_closed:
            return
        self._follow_pool()
        for exchange in self._assign(calls):
            task = exchange.task = self.events.create_task(self._carry(exchange))
            self._exchanges[task] = exchange
            task.add_done_callback(self._exchanges.pop)

    def _follow_pool(self) -> None:
        """A server that drains or left the pool gets no more requests."""
        self._pool.follow_owner()
        self._router.follow(self._pool.accepting)

    def _assign(self, calls: list[_Call]) -> Iterable[_Exchange]:
        """Into exchanges, the samples of one prompt to one server."""
        exchanges: dict[object, _Exchange] = {}
        batches = self._protocol.batches
        for _, alike in groupby(calls, key=lambda call: (batches and call.draft.group) or call):
            share = list(alike)
            request, cost = share[0].draft.request, sum(call.cost for call in share)
            server = self._router.take(request.input_ids, cost)
            # Images have an exchange of their own: many would exceed what a server reads.
            key: object = server if batches and not request.image_data else share[0]
            exchange = exchanges.setdefault(key, _Exchange(server, {}, 0, []))
            exchange.places.append((request.input_ids, cost))
            exchange.num_wanted += len(share)
            for call in share:
                call.rid, call.exchange = self._wire_rid(call), exchange
                exchange.waiting[call.rid] = call
        return exchanges.values()

    def _session_of(self, address: str) -> aiohttp.ClientSession:
        """Connections of the servers that share a token: those of a run, or a joined one."""
        token = self._pool.token_of(address)
        session = self._sessions.get(token)
        if session is None:
            # No limits here: the executor bounds the requests in flight.
            session = self._sessions[token] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
                headers={"Authorization": f"Bearer {token}"},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            )
        return session

    def _wire_rid(self, call: _Call) -> str:
        return f"{call.draft.request.rid[:200]}.{self._client_id}.{next(self._num_sent)}"

    async def _carry(self, exchange: _Exchange) -> None:
        """One exchange from POST to last result; every call gets one, an error or a retry."""
        server = exchange.server
        try:
            await self._exchange(exchange)
            if exchange.waiting:
                raise aiohttp.ClientPayloadError(f"{len(exchange.waiting)} replies are missing")
        except asyncio.CancelledError:
            if not exchange.is_dropped:
                raise
            self._send_soon(exchange.waiting.values())
        except aiohttp.ClientError as err:
            await self._on_lost(exchange, err)
        except TimeoutError:
            limit = f"{self._deadlines.timeout_s:g} s (rollout.request_timeout)"
            err = ServerError(f"{self._where(server)}: no reply within {limit}")
            _fail(exchange.waiting.values(), err)
        except OSError as err:
            await self._on_lost(exchange, err)
        except BadReplyError as err:
            self._refuse(exchange.waiting.values(), server, err)
        except ServerError as err:
            await self._on_error(exchange, err)
        except (RuntimeError, ValueError) as err:
            _fail(exchange.waiting.values(), err)
        finally:
            for prompt, cost in exchange.places:
                self._router.give_back(server, prompt, cost)

    async def _exchange(self, exchange: _Exchange) -> None:
        entry = GateState() if self._gate is None else await self._enter(self._gate, exchange)
        exchange.entry = entry
        drafts = {}
        for rid, call in exchange.waiting.items():
            drafts[rid] = call.draft
            call.draft.num_sent = len(call.draft.tokens)
        address = exchange.server.address
        try:
            if self._gate is not None and not self._pool.has(address):  # it may have missed weights
                raise aiohttp.ClientConnectionError("the server has left the pool")
            results = self._protocol.generate(
                self._session_of(address), address, drafts, entry.version
            )
            with self._in_flight.request(address):
                async with self._deadlines.limit(), aclosing(results):
                    async for together in results:
                        for rid, result in together:
                            self._take(exchange, entry, rid, result)
                        if exchange.closed and not exchange.waiting:
                            break
        finally:
            exchange.entry = None
            if self._gate is not None:
                self._gate.leave()

    async def _enter(self, gate: UpdateGate, exchange: _Exchange) -> GateState:
        timeout_s = self._deadlines.timeout_s
        try:
            return await gate.enter(timeout_s)
        except TimeoutError:
            where = self._where(exchange.server)
            fault = f"{where}: the weight update did not end within {timeout_s:g} s"
            raise ServerError(fault) from None

    def _take(
        self, exchange: _Exchange, entry: GateState, rid: str, result: Result | Exception
    ) -> None:
        server = exchange.server
        if rid in exchange.closed:
            return
        call = exchange.waiting.get(rid)
        if call is None:
            fault = f"to {rid[:60]!r}, which nobody sent"
            raise bad_reply(self._protocol.kind, server.address, fault)
        if isinstance(result, Result):
            gate, aborted = self._gate, result.stop_reason == "abort"
            if gate is not None and gate.is_void(entry, aborted=aborted):
                exchange.closed.add(rid)
                result = Result.of([], [], [], "abort")
            try:
                self._check(call.draft, result)
            except ValueError as err:
                result = bad_reply(self._protocol.kind, server.address, err)
            else:
                call.draft.add(result)
                if call.exchange is not None and not call.is_over:
                    call.draft.tell(result)
                elif call.exchange is None and result.stop_reason is None:
                    self._abort_soon(exchange, rid)  # the first abort came before the request
                if call.draft.stop_reason is None:
                    return
        call = _settled(exchange, rid)
        if isinstance(result, Exception):
            self._take_error(exchange, rid, call, result)
        elif call is None:
            return
        elif call.draft.stop_reason == "abort":
            has_progressed = len(call.draft.tokens) > call.draft.num_sent
            self._continue(call, server, entry, has_progressed=has_progressed)
        else:
            call.end()

    def _take_error(
        self, exchange: _Exchange, rid: str, call: _Call | None, error: Exception
    ) -> None:
        if isinstance(error, BadReplyError):
            exchange.closed.add(rid)
            self._refuse([] if call is None else [call], exchange.server, error)
        elif call is None:
            return
        elif isinstance(error, ServerError):
            self._elsewhere([call], exchange.server, error)
        else:
            call.end(error)

    def _check(self, draft: Draft, result: Result) -> None:
        """ValueError says why this cannot be trained on."""
        if self._vocab_size is not None and len(result.tokens):
            check_token(int(result.tokens.max()), vocab_size=self._vocab_size)
        num_tokens = len(draft.tokens) + len(result.tokens)
        check_amount(num_tokens, result.stop_reason, max_tokens=draft.budget)
        if self._gate is None:
            versions = [version for version, _ in result.runs]
            newest, first = self._pool.newest_version, draft.last_own_version
            check_versions(versions, newest=newest, first=first)

    def _continue(
        self, call: _Call, server: Server, entry: GateState, *, has_progressed: bool
    ) -> None:
        """Send the rest of an aborted request; an abort in vain that no update ordered counts."""
        is_ours = self._gate is not None and not self._gate.serves(entry.version)
        if is_ours or has_progressed:
            self._send_soon([call])
        else:
            self._retry([call], server, ServerError("the server aborted the request"))

    def _refuse(self, calls: Collection[_Call], server: Server, err: BadReplyError) -> None:
        self._counts["replies_refused"] += 1
        for call in calls:
            if call.draft.request.on_tokens is None:
                call.draft.start_over()
        if calls:
            self._retry(calls, server, err)

    async def _on_lost(self, exchange: _Exchange, err: Exception) -> None:
        """Resend unanswered requests: at once if the server has died, else after a delay."""
        if await self._has_died(exchange.server):
            await self._on_death(exchange)
        else:
            self._retry(exchange.waiting.values(), exchange.server, err)

    async def _on_error(self, exchange: _Exchange, err: ServerError) -> None:
        """An error for all of the exchange. Also a server that is shutting down returns some."""
        if isinstance(err, ServerEndedError) and self._others(exchange.server):
            self._retry(exchange.waiting.values(), exchange.server, err)
        elif await self._has_died(exchange.server):
            await self._on_death(exchange)
        else:
            _fail(exchange.waiting.values(), err)

    async def _has_died(self, server: Server) -> bool:
        return await self._verdicts.do(server.address, self._judge, server)

    async def _judge(self, server: Server) -> bool:
        self._follow_pool()
        if server not in self._router.servers:
            return True
        return await asyncio.to_thread(self._pool.is_gone, server.address)

    async def _on_death(self, exchange: _Exchange) -> None:
        server, calls = exchange.server, exchange.waiting.values()
        replacing = self._replacements.start(server.address, self._replace_server, server)
        if not self._others(server):
            try:
                await asyncio.shield(replacing)
            except (RuntimeError, OSError) as lost:
                return _fail(calls, lost)
        return self._send_again(calls)

    async def _replace_server(self, server: Server) -> None:
        if server not in self._router.servers:
            return
        self._router.avoid(server, math.inf)
        try:
            # Not in the threads of `to_thread`: with many servers lost it would take them all.
            successor = in_thread("replace-server", self._pool.successor, server.address)
            await asyncio.wrap_future(successor)
        except EngineLostError as lost:
            logger.error("%s", lost)  # raised again for the next request sent there
            raise
        finally:
            if server in self._router.servers:  # else it stays avoided
                server.avoided_until = 0
        self._follow_pool()

    def _others(self, server: Server) -> bool:
        """Whether requests can go to another server now."""
        return any(one is not server and not one.is_avoided for one in self._router.servers)

    def _elsewhere(self, calls: Collection[_Call], server: Server, err: ServerError) -> None:
        """Resend to another server, if there is one."""
        if self._others(server):
            self._retry(calls, server, err)
        else:
            _fail(calls, err)

    def _retry(self, calls: Collection[_Call], server: Server, err: Exception) -> None:
        self._router.avoid(server)
        fault, again = str(err), []  # a BadReplyError names the server itself
        if not isinstance(err, BadReplyError):
            fault = f"{self._where(server)}: {type(err).__name__}: {err}"
        for call in calls:
            call.attempts += 1
            if call.attempts <= self._retries:
                again.append(call)
            else:
                _fail([call], ServerError(f"{fault} (after {call.attempts} attempts)"))
        if again:
            delay = retry_delay_s(min(call.attempts for call in again))
            logger.warning("%s; sending %d requests again in %.1f s", fault, len(again), delay)
            self.events.call_later(delay, self._send_again, again)

    def _send_again(self, calls: Collection[_Call]) -> None:
        self._counts["requests_resent"] += len(calls)
        for call in calls:
            call.exchange = None
            self._counts["tokens_kept"] += len(call.draft.tokens)
        self._send_soon(calls)

    def _give_up(self, call: _Call) -> None:
        """Frees the generation: by closing the connection, unless others wait for it, too."""
        exchange, call.exchange = call.exchange, None
        if exchange is None:
            return
        exchange.num_wanted -= 1
        if exchange.num_wanted == 0:
            exchange.task.cancel()
        else:
            self._abort_soon(exchange, call.rid)

    def _abort_soon(self, exchange: _Exchange, rid: str) -> None:
        """When all who give up in this iteration of the loop have: often that is everyone, whose
        connection is closed then, and thousands of requests to abort are not needed."""
        if not exchange.given_up:
            self.events.call_soon(self._send_aborts, exchange)
        exchange.given_up.append(rid)

    def _send_aborts(self, exchange: _Exchange) -> None:
        rids, exchange.given_up = exchange.given_up, []
        is_ending = exchange.task.done() or exchange.task.cancelling()
        for rid in () if is_ending else rids:
            task = self.events.create_task(self._send_abort(exchange.server.address, rid))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _send_abort(self, address: str, rid: str) -> None:
        with suppress(aiohttp.ClientError, OSError):  # a server that is gone has freed it
            async with asyncio.timeout(_ABORT_S):
                await self._protocol.abort(self._session_of(address), address, rid)

    def _describe(self, call: _Call) -> str:
        exchange = call.exchange
        return f"a {self._protocol.kind}" if exchange is None else self._where(exchange.server)

    def _where(self, server: Server) -> str:
        return f"{self._protocol.kind} {server.address}"


def _fail(calls: Iterable[_Call], err: Exception) -> None:
    for call in calls:
        call.end(type(err)(*err.args))  # a copy: each caller raises its own


def _settled(exchange: _Exchange, rid: str) -> _Call | None:
    """The call, removed from the exchange; None if it was cancelled."""
    call = exchange.waiting.pop(rid)
    if call.exchange is None:  # given up
        return None
    call.exchange = None
    exchange.num_wanted -= 1
    # Else cancelled in this very tick: its caller has not run since.
    return None if call.is_over else call


def runs_here(events: asyncio.AbstractEventLoop) -> bool:
    """Whether the caller runs on `events`."""
    try:
        return asyncio.get_running_loop() is events
    except RuntimeError:
        return False
