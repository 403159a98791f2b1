"""Frames of bytes over a socket pair between a process and its child.

    frame = number of parts, their sizes, then the parts

The pair has no name that another process could connect to. `Channel` blocks, with a deadline;
`AsyncChannel` is the same on an event loop, which it never blocks. What the bytes mean is up to the
user: JSON, or a pickle where both ends are one program of one user.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Iterable

Part = bytes | bytearray | memoryview

_NUMBER = struct.Struct("!Q")
_MAX_PARTS = 1 << 20
_BUFFERED = 16 << 20  # bytes received ahead on an event loop


class Channel:
    """One end; not thread-safe. A received frame has at most `max_bytes`."""

    def __init__(self, end: socket.socket, *, max_bytes: int = 1 << 63) -> None:
        self._socket = end
        self._max_bytes = max_bytes

    def send(self, *parts: Part, timeout_s: float | None = None) -> None:
        """OSError if the other end is closed, TimeoutError if it does not read."""
        deadline = _deadline(timeout_s)
        for part in _framed(parts):
            self._set_timeout(deadline)
            self._socket.sendall(part)

    def receive(self, timeout_s: float | None = None) -> list[bytearray]:
        """The parts of the next frame. EOFError if the other end is closed or sends a malformed
        frame, TimeoutError if the frame is not complete within `timeout_s`."""
        deadline = _deadline(timeout_s)
        (count,) = _NUMBER.unpack(self._read(_NUMBER.size, deadline))
        _check(count, _MAX_PARTS)
        sizes = [size for (size,) in _NUMBER.iter_unpack(self._read(8 * count, deadline))]
        _check(sum(sizes), self._max_bytes)
        return [self._read(size, deadline) for size in sizes]

    def close(self) -> None:
        """Wakes a thread blocked in `receive`; the other end gets an EOFError."""
        with contextlib.suppress(OSError):  # the other end has closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            self._set_timeout(deadline)
            try:
                count = self._socket.recv_into(left)
            except ConnectionError:
                count = 0
            if count == 0:
                raise EOFError("the other end of the channel is closed")
            left = left[count:]
        return data

    def _set_timeout(self, deadline: float | None) -> None:
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left_s)


class AsyncChannel:
    """One end, on the running event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> AsyncChannel:
        return cls(*await asyncio.open_connection(sock=end, limit=_BUFFERED))

    def send(self, *parts: Part) -> None:
        """Never blocks: what the socket does not take is buffered. No-op if it is closed."""
        self._writer.write(b"".join(_framed(parts)))

    async def receive(self) -> list[bytearray]:
        """The parts of the next frame, of any size and whenever it comes: its sender is trusted.
        EOFError as in `Channel.receive`."""
        try:
            (count,) = _NUMBER.unpack(await self._reader.readexactly(_NUMBER.size))
            _check(count, _MAX_PARTS)
            header = await self._reader.readexactly(_NUMBER.size * count)
            sizes = [size for (size,) in _NUMBER.iter_unpack(header)]
            return [bytearray(await self._reader.readexactly(size)) for size in sizes]
        except (asyncio.IncompleteReadError, ConnectionError):
            raise EOFError("the other end of the channel is closed") from None

    def close(self) -> None:
        self._writer.close()


def _framed(parts: Iterable[Part]) -> list[Part]:
    """The header, then the parts."""
    views = [memoryview(part) for part in parts]
    return [b"".join(map(_NUMBER.pack, [len(views), *(view.nbytes for view in views)])), *views]


def _check(found: int, most: int) -> None:
    if found > most:
        raise EOFError(f"the other end of the channel sent a malformed frame: {found} > {most}")


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s
