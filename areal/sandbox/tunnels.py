"""Tunnels: connections from inside of a sandbox session to the addresses listed for it.

    inside   program -> connect(127.77.0.1:443) -> socket of the session's own network
    outside  accept on that socket -> look up the listed name -> check -> connect -> copy bytes

Each listening socket stands for one listed address, so that nothing a program sends chooses where
its bytes go: there is no request to parse. A name is looked up at each connection, and what it
resolves to is checked and then connected to by number (addresses.py). Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from areal.sandbox.addresses import Address, public
from areal.utils import logging

logger = logging.getLogger("Sandbox")

MAX_CONNECTIONS = 32  # of one session; more are closed at once
_CONNECT_S = 30.0
_CHUNK = 1 << 16
# Threads of their own: a program inside may ask for many names that take long to look up, and the
# event loop's threads have the work of all episodes to do.
_LOOKUPS = ThreadPoolExecutor(max_workers=4, thread_name_prefix="sandbox-lookup")


class Tunnels:
    """Takes over `listeners`, one for each of `addresses`."""

    def __init__(self, listeners: Sequence[socket.socket], addresses: Sequence[Address]) -> None:
        self._tasks = [
            _owning(listener, self._accept(listener, address), "sandbox-tunnels")
            for listener, address in zip(listeners, addresses, strict=True)
        ]
        self._open: set[asyncio.Task[None]] = set()
        self._warned: set[Address] = set()

    def hang_up(self) -> None:
        """End all connections; new ones may follow."""
        for task in self._open:
            task.cancel()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.hang_up()

    async def _accept(self, listener: socket.socket, address: Address) -> None:
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                near, _ = await loop.sock_accept(listener)
            except OSError as error:
                logger.warning("sandbox.network: %s: %s", address.name, error)
                await asyncio.sleep(1)
                continue
            if len(self._open) >= MAX_CONNECTIONS:
                near.close()
                continue
            task = _owning(near, self._carry(near, address), f"sandbox-to-{address.name}")
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _carry(self, near: socket.socket, address: Address) -> None:
        """One connection, to its end. A host that cannot be reached hangs up."""
        near.setblocking(False)
        try:
            async with asyncio.timeout(_CONNECT_S):
                far = await _connect(address)
        except (OSError, TimeoutError) as error:
            self._warn(address, error)
            return
        with far:
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy(near, far), name="sandbox-out")
                both.create_task(_copy(far, near), name="sandbox-in")

    def _warn(self, address: Address, error: Exception) -> None:
        """Once for each address of a session: programs inside may try thousands of times."""
        if address not in self._warned:
            self._warned.add(address)
            why = str(error) or type(error).__name__
            logger.warning("sandbox.network: %s:%d: %s", address.name, address.port, why)


def _owning(end: socket.socket, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """A task that closes its socket last: the event loop may still know the descriptor before."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(lambda _: end.close())
    return task


async def _connect(address: Address) -> socket.socket:
    loop = asyncio.get_running_loop()
    if address.pinned is not None:
        ips = [address.pinned]
    else:
        look_up = partial(socket.getaddrinfo, type=socket.SOCK_STREAM)
        found = await loop.run_in_executor(_LOOKUPS, look_up, address.name, address.port)
        resolved = list(dict.fromkeys(str(one[4][0]) for one in found))
        ips = public(resolved)
        if not ips:
            raise OSError(
                f"it resolves to {', '.join(resolved)}, which is no public address; list it as "
                f"{address.name}=ADDRESS:{address.port} if that is meant"
            )
    failure: OSError | None = None
    for ip in ips:
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        far = socket.socket(family, socket.SOCK_STREAM)
        try:
            far.setblocking(False)
            await loop.sock_connect(far, (ip, address.port))
        except OSError as error:
            far.close()
            failure = error
        except BaseException:
            far.close()
            raise
        else:
            return far
    assert failure is not None  # `ips` is not empty
    raise failure


async def _copy(source: socket.socket, target: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    try:
        while data := await loop.sock_recv(source, _CHUNK):
            await loop.sock_sendall(target, data)
    except OSError:  # one end is gone: so is the connection
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
    else:
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)
