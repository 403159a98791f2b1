"""The generating half of a native client: many calls, few HTTP exchanges.

    generate --+
    generate --+--> all calls of one tick of the event loop --> one POST /generate per server
    generate --+                                                     |
        ^--------------- each future, as its line comes back --------+

One exchange carries hundreds of requests, so the cost of HTTP is paid per tick, not per sample.
Calls with the same prompt go to the same server and share its computation there. Requests whose
connection was lost go out again as a whole, at most `retries` times; with a seed they come back
with the same tokens. Where the server has died and is replaced they wait for the replacement, and
that attempt does not count. Everything else that goes wrong is raised, never turned into data.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp

from areal.api.engine_api import EngineLostError
from areal.api.io_struct import ModelRequest
from areal.engine.fleet import Caretaker, Fleet, Server, retry_delay_s
from areal.engine.native.deadlines import Deadlines
from areal.engine.native.sequence import GenRequest
from areal.engine.native.wire import Refusal, Reply, decode_line, encode_requests
from areal.engine.server_control import ServerError, error_text
from areal.utils import logging
from areal.utils.waits import waiting

logger = logging.getLogger("NativeRemoteEngine")


@dataclass(slots=True, eq=False)
class _Pending:
    """One call."""

    request: ModelRequest
    future: asyncio.Future[Reply]
    attempts: int = 0
    exchange: _Exchange | None = None

    @property
    def max_tokens(self) -> int:
        return len(self.request.input_ids) + self.request.gconfig.max_new_tokens

    def describe(self) -> str:
        exchange = self.exchange
        return "a native server" if exchange is None else _where(exchange.server)


@dataclass(slots=True, eq=False)
class _Exchange:
    """One POST and the calls that wait for it, by the rid they travel under."""

    server: Server
    address: str  # that of the server when it was sent
    waiting: dict[str, _Pending]
    num_wanted: int  # calls nobody has cancelled yet
    task: asyncio.Task | None = None


class GenerateClient:
    """Lives on the event loop it is made on. `deadlines` bound one attempt of a request.

    `replace(address)` is called in a thread when a connection to a server was lost. It returns the
    address of the server that takes its place, the same one when there is none.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        token: str,
        *,
        deadlines: Deadlines,
        retries: int,
        replace: Callable[[str], str],
    ) -> None:
        self.events = asyncio.get_running_loop()
        self._fleet = Fleet(addresses)
        self._deadlines = deadlines
        self._retries = retries
        self._caretaker = Caretaker(replace)
        self.num_resent = 0  # requests sent again after a lost connection
        self._open: set[asyncio.Future[Reply]] = set()  # of all calls that wait
        self._outbox: list[_Pending] = []  # calls of this tick
        self._tasks: set[asyncio.Task] = set()
        # Two callers may use one rid (copies of a request): on the wire each try has its own tail.
        self._client_id = secrets.token_hex(4)
        self._num_sent = itertools.count()
        # No limits here: the executor's gate decides how many requests are in flight.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={"Authorization": f"Bearer {token}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        )

    async def generate(self, request: ModelRequest) -> Reply:
        """ValueError: the request is at fault. ServerError: the server, or the way to it."""
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

    async def close(self) -> None:
        """Calls that still wait are cancelled."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._caretaker.close()
        await self._session.close()
        # Last: the event loop may end as soon as its callers have.
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
            exchange.task = self._start(self._carry(exchange), "native-exchange")

    def _start(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task:
        task = self.events.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _wire_rid(self, pending: _Pending) -> str:
        return f"{pending.request.rid[:200]}.{self._client_id}.{next(self._num_sent)}"

    def _assign(self, calls: list[_Pending]) -> Iterable[tuple[Server, list[_Pending]]]:
        """The calls of each server, the samples of one prompt together."""
        shares: dict[Server, list[_Pending]] = {}
        for pending in calls:
            server = self._fleet.take(pending.request.input_ids, pending.max_tokens)
            shares.setdefault(server, []).append(pending)
        return shares.items()

    async def _carry(self, exchange: _Exchange) -> None:
        """One exchange from POST to last line; every call ends in a reply, an error or a retry."""
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
            self._fail(exchange, ServerError(f"{_where(server)}: no reply within {limit}"))
        except OSError as err:
            await self._on_lost(exchange, err)
        except (ServerError, ValueError) as err:
            self._fail(exchange, err)
        finally:
            for pending in calls:
                self._fleet.give_back(server, pending.request.input_ids, pending.max_tokens)

    async def _post(self, exchange: _Exchange) -> None:
        body = encode_requests(
            GenRequest(rid, pending.request.input_ids, pending.request.gconfig)
            for rid, pending in exchange.waiting.items()
        )
        url = f"http://{exchange.address}/generate"
        async with self._session.post(url, data=body) as answer:
            if answer.status != 200:
                raise _error_of(exchange.server, answer.status, await answer.text())
            rest = b""
            async for chunk in answer.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    _settle(exchange, _read(line, exchange.server))

    async def _on_lost(self, exchange: _Exchange, err: Exception) -> None:
        """Send again what is unanswered: at once when the server was replaced, else a bit later."""
        try:
            is_replaced = await self._caretaker.is_replaced(exchange.server, exchange.address)
        except (ServerError, EngineLostError) as lost:
            return self._fail(exchange, lost)
        if not is_replaced:
            return self._retry(exchange, err)
        self.num_resent += len(exchange.waiting)
        for pending in exchange.waiting.values():
            pending.exchange = None
        return self._send_soon(exchange.waiting.values())

    def _retry(self, exchange: _Exchange, err: Exception) -> None:
        self._fleet.avoid(exchange.server)
        again = []
        for pending in exchange.waiting.values():
            pending.exchange = None
            pending.attempts += 1
            if pending.attempts <= self._retries:
                again.append(pending)
            elif not pending.future.done():
                fault = f"{_where(exchange.server)}: {type(err).__name__}: {err}"
                pending.future.set_exception(
                    ServerError(f"{fault} (after {pending.attempts} attempts)")
                )
        if again:
            self.num_resent += len(again)
            delay = retry_delay_s(min(pending.attempts for pending in again))
            logger.warning(
                "%s: %s: %s; sending %d requests again in %.1f s",
                _where(exchange.server), type(err).__name__, err, len(again), delay,
            )  # fmt: skip
            self.events.call_later(delay, self._send_soon, again)

    def _fail(self, exchange: _Exchange, err: Exception) -> None:
        for pending in exchange.waiting.values():
            if not pending.future.done():
                pending.future.set_exception(type(err)(*err.args))


def _give_up(pending: _Pending) -> None:
    """An exchange whose calls were all cancelled is dropped: the server then aborts them."""
    exchange, pending.exchange = pending.exchange, None
    if exchange is not None:
        exchange.num_wanted -= 1
        if exchange.num_wanted == 0:
            exchange.task.cancel()


def _read(line: bytes, server: Server) -> Reply | Refusal:
    try:
        return decode_line(line)
    except ValueError as err:  # the server's fault, not that of whoever asked
        raise ServerError(f"{_where(server)}: a line that is no reply: {err}") from err


def _settle(exchange: _Exchange, result: Reply | Refusal) -> None:
    pending = exchange.waiting.pop(result.rid, None)
    if pending is None:
        raise ServerError(f"{_where(exchange.server)}: a reply to {result.rid}, which nobody sent")
    if pending.exchange is None:  # given up
        return
    pending.exchange = None
    exchange.num_wanted -= 1
    if pending.future.done():  # cancelled in this very tick: its caller has not run since
        return
    if isinstance(result, Reply):
        pending.future.set_result(result)
    elif result.kind == "request":
        pending.future.set_exception(ValueError(result.message))
    else:
        pending.future.set_exception(ServerError(f"{_where(exchange.server)}: {result.message}"))


def _error_of(server: Server, status: int, body: str) -> Exception:
    message = error_text(body)
    if status == 400:
        return ValueError(message)
    return ServerError(f"{_where(server)}: {status}: {message}")


def _where(server: Server) -> str:
    return f"native server {server.address}"
