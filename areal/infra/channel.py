"""Pickled objects with tensors over a socket pair between a process and its child.

    frame = count of buffers, their sizes, then the buffers: [0] a pickle, the rest tensors' bytes

Tensor bytes are sent out of band, without a second copy on either end. Pickle is safe here only
because both ends are the same program of the same user, and the pair has no name that others could
open.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import socket
import struct
from typing import Any

import torch

_NUMBER = struct.Struct("!Q")


class Channel:
    """One end. Not thread-safe."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: Any) -> None:
        """OSError if the other end is closed."""
        buffers: list[pickle.PickleBuffer] = []
        body = io.BytesIO()
        _Pickler(body, protocol=5, buffer_callback=buffers.append).dump(message)
        parts = [body.getbuffer(), *(buffer.raw() for buffer in buffers)]
        header = [len(parts), *(part.nbytes for part in parts)]
        self._socket.settimeout(None)
        self._socket.sendall(b"".join(map(_NUMBER.pack, header)))
        for part in parts:
            self._socket.sendall(part)

    def receive(self, timeout_s: float | None = None) -> Any:
        """TimeoutError after `timeout_s` without data, EOFError if the other end is closed."""
        self._socket.settimeout(timeout_s)
        count = self._read_number()
        sizes = [self._read_number() for _ in range(count)]
        body, *buffers = [self._read(size) for size in sizes]
        return pickle.loads(body, buffers=buffers)

    def close(self) -> None:
        """Wakes a thread blocked in `receive`; the other end gets an EOFError."""
        with contextlib.suppress(OSError):  # the other end has closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read_number(self) -> int:
        return _NUMBER.unpack(self._read(_NUMBER.size))[0]

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            try:
                count = self._socket.recv_into(left)
            except ConnectionError:
                count = 0
            if count == 0:
                raise EOFError("the other end of the channel is closed")
            left = left[count:]
        return data


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        tensor = obj.detach().cpu().contiguous()
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(raw.data), tensor.dtype, tuple(tensor.shape))


def _tensor(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not len(raw):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)
