"""Which server gets a request: where its prompt, or the beginning of it, is cached; else by load.

    server = router.take(prompt, num_tokens)    # where to send it
    ...                                         # its reply, or its loss: router.avoid(server)
    router.give_back(server, prompt, num_tokens)

A server computes and caches a prompt once, so a request whose prompt is in flight goes to the same
server. One that begins like an earlier prompt, as the next turn of a dialogue does, goes to the
server that had the longest such beginning, unless that one has more to do than the others. Any
other goes to the server with the fewest tokens in flight. A server that lost a connection gets new
prompts only if all have, for a while. `follow` changes the servers; requests of one that is gone
are given back like the rest.

`SingleFlight`: concurrent callers with one key share one task, which continues if one of them is
cancelled. Both are used on one event loop, hence without locks.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

_AVOID_S = 5.0  # how long a server that lost a connection is avoided
_BACKOFF_S = 0.1  # before the first retry; doubles with each
_MAX_BACKOFF_S = 10.0
_BLOCK = 64  # tokens: beginnings are remembered in steps of this
_MAX_BEGINNINGS = 1 << 17  # remembered, each of a block
# A request follows its beginning to a server with up to this share more to do than the idlest one,
# and the tokens of the beginning: those need not be computed there.
_MORE_TO_DO = 1.25


@dataclass(slots=True, eq=False)
class Server:
    address: str
    tokens_in_flight: int = 0
    avoided_until: float = 0.0  # time.monotonic()

    @property
    def is_avoided(self) -> bool:
        return self.avoided_until > time.monotonic()


@dataclass(slots=True, eq=False)
class _Group:
    """In-flight requests with the same prompt."""

    server: Server
    size: int = 0


class RequestRouter:
    def __init__(self, addresses: Iterable[str]) -> None:
        self.servers = [Server(address) for address in addresses]
        self._followed: Sequence[str] = ()
        self._groups: dict[tuple[int, ...], _Group] = {}  # by prompt
        # The server of each beginning, by a hash: a wrong guess costs time only. Oldest first.
        self._homes: OrderedDict[int, Server] = OrderedDict()

    def take(self, prompt: Sequence[int], num_tokens: int) -> Server:
        """`num_tokens` is the maximum of prompt and output tokens."""
        key = tuple(prompt)
        group = self._groups.get(key)
        if group is None or group.server.is_avoided:
            server = self._place(key)
            if group is None or group.server is not server:
                group = self._groups[key] = _Group(server)
        group.size += 1
        group.server.tokens_in_flight += num_tokens
        return group.server

    def give_back(self, server: Server, prompt: Sequence[int], num_tokens: int) -> None:
        server.tokens_in_flight -= num_tokens
        group = self._groups.get(tuple(prompt))
        if group is not None and group.server is server:  # else the prompt has moved
            group.size -= 1
            if group.size == 0:
                del self._groups[tuple(prompt)]

    def avoid(self, server: Server, for_s: float = _AVOID_S) -> None:
        server.avoided_until = max(server.avoided_until, time.monotonic() + for_s)

    def follow(self, addresses: Sequence[str]) -> None:
        """These are the servers from now on. One that is replaced has another address. The same
        list again costs nothing: it must not change."""
        if addresses is self._followed:
            return
        self._followed = addresses
        for server in self.servers:
            if server.address not in addresses:
                server.avoided_until = math.inf  # its prompts no longer attract requests
        known = {server.address: server for server in self.servers}
        self.servers = [known.get(address) or Server(address) for address in addresses]

    def _place(self, prompt: tuple[int, ...]) -> Server:
        idlest = self._least_loaded()
        if len(self.servers) == 1:
            return idlest
        beginnings = _beginnings(prompt)
        chosen, homes = idlest, self._homes
        for number in range(len(beginnings), 0, -1):
            home = homes.get(beginnings[number - 1])
            if home is not None:
                most = _MORE_TO_DO * idlest.tokens_in_flight + number * _BLOCK
                if not home.is_avoided and home.tokens_in_flight <= most:
                    chosen = home
                break
        for beginning in beginnings:
            homes[beginning] = chosen
            homes.move_to_end(beginning)
        while len(homes) > _MAX_BEGINNINGS:
            homes.popitem(last=False)
        return chosen

    def _least_loaded(self) -> Server:
        now = time.monotonic()
        return min(self.servers, key=lambda one: (one.avoided_until > now, one.tokens_in_flight))


def _beginnings(prompt: tuple[int, ...]) -> list[int]:
    """Hashes of the first block, the first two blocks, ..."""
    hashes, so_far = [], 0
    for end in range(_BLOCK, len(prompt) + 1, _BLOCK):
        so_far = hash((so_far, prompt[end - _BLOCK : end]))
        hashes.append(so_far)
    return hashes


def retry_delay_s(attempts: int) -> float:
    """Delay after the `attempts`-th failure."""
    return min(_BACKOFF_S * 2 ** (attempts - 1), _MAX_BACKOFF_S)


class SingleFlight:
    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[Any]] = {}

    def start(
        self, key: Hashable, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any
    ) -> asyncio.Task[Any]:
        """Starts `work(*args)`, unless a task with this key is running."""
        task = self._tasks.get(key)
        if task is None or task.done():  # its callback may not have run yet
            task = self._tasks[key] = asyncio.create_task(work(*args), name=str(key))
            task.add_done_callback(partial(self._forget, key))
            # Awaiting callers get the exception; without any, asyncio must not log it.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    def _forget(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    async def do(
        self, key: Hashable, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any
    ) -> Any:
        """What `work(*args)` returns or raises."""
        return await asyncio.shield(self.start(key, work, *args))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
