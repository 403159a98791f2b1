"""A worker process: engines by name, built from an import path and called by message.

Every scheduler's worker has an `EngineHost`. An engine's exception is returned as an `Answer`, so
that the process survives and the caller can raise it. `main` is a worker of `LocalScheduler`:

    ("ping",) | ("create", path, name, args, kwargs) | ("call", method, name, args, kwargs)
        -> Answer                  one at a time, in the main thread
    ("overlap",)                   from here on the methods of its engines are coroutines:
    (number, method, name, args)
        -> (number, Answer)        on one event loop, in any order

It ends when its channel is closed. Messages are pickles whose tensors travel out of band, without a
second copy on either end (`pack`): both ends are one program of one user.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.api.scheduler_api import EngineCallError
from areal.utils import perf_tracer, stacks
from areal.utils.channel import AsyncChannel, Channel, Part
from areal.utils.import_path import load

if TYPE_CHECKING:
    import torch


def main(fd: str, worker_id: str) -> None:
    """`worker_id` is for those who list processes, and names its trace."""
    stacks.listen()
    perf_tracer.start_below(worker_id)
    os.dup2(2, 1)  # printed text is for the log
    end = socket.socket(fileno=int(fd))
    end.set_inheritable(False)
    host = EngineHost()
    with contextlib.suppress(EOFError):  # the scheduler has closed the channel
        _serve(Channel(end), host)
        asyncio.run(_serve_overlapping(end, host))
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def _serve(channel: Channel, host: EngineHost) -> None:
    """Until the message that makes calls overlap."""
    actions = {"create": host.create, "call": host.call, "ping": Answer, "overlap": Answer}
    action = None
    while action != "overlap":
        action, *args = unpack(channel.receive())
        channel.send(*pack(actions[action](*args)))


async def _serve_overlapping(end: socket.socket, host: EngineHost) -> None:
    channel = await AsyncChannel.open(end)
    running: set[asyncio.Task[None]] = set()

    async def answer(number: int, method: str, name: str, args: Sequence[Any]) -> None:
        result = await host.call_async(method, name, args)
        try:
            parts = pack((number, result))
        except Exception as error:  # a result that cannot be pickled: without a reply it would hang
            parts = pack((number, Answer.of_error(error)))
        channel.send(*parts)

    while True:
        number, method, name, args = unpack(await channel.receive())
        task = asyncio.create_task(answer(number, method, name, args), name=f"{method}-{number}")
        running.add(task)
        task.add_done_callback(running.discard)


@dataclass(slots=True)
class Answer:
    """The result of a call, or its exception with traceback and time."""

    result: Any = None
    error: Exception | None = None
    traceback: str = ""
    failed_at: float = 0.0  # seconds since the epoch

    @classmethod
    def of_error(cls, error: Exception) -> Answer:
        """Inside its `except` block."""
        return cls(None, _travelling(error), traceback.format_exc(), time.time())

    def result_or_raise(self, worker_id: str) -> Any:
        if self.error is not None:
            raise EngineCallError(worker_id, self.traceback, self.failed_at) from self.error
        return self.result


class EngineHost:
    def __init__(self) -> None:
        self._engines: dict[str, Any] = {}

    def create(
        self, path: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Answer:
        def build() -> None:
            self._engines[name] = load(path, key=name)(*args, **kwargs)

        return _answer(build)

    def call(
        self, method: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Answer:
        answer = _answer(lambda: getattr(self._engines[name], method)(*args, **kwargs))
        perf_tracer.save()  # workers are ended by a signal
        return answer

    async def call_async(self, method: str, name: str, args: Sequence[Any]) -> Answer:
        try:
            return Answer(await getattr(self._engines[name], method)(*args))
        except Exception as error:  # the caller raises it
            return Answer.of_error(error)


def _answer(act: Callable[[], Any]) -> Answer:
    try:
        return Answer(act())
    except Exception as error:  # the caller raises it
        return Answer.of_error(error)


def _travelling(error: Exception) -> Exception:
    """The error itself, or a RuntimeError with its text if it cannot be pickled."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # custom pickling may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")


def pack(message: Any) -> list[Part]:
    """The parts of a frame: a pickle, then the bytes of its tensors."""
    buffers: list[pickle.PickleBuffer] = []
    body = io.BytesIO()
    _Pickler(body, protocol=5, buffer_callback=buffers.append).dump(message)
    return [body.getbuffer(), *(buffer.raw() for buffer in buffers)]


def unpack(parts: Sequence[bytearray]) -> Any:
    body, *buffers = parts
    return pickle.loads(body, buffers=buffers)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        # Where torch is not loaded there are no tensors.
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(obj, torch.Tensor):
            return NotImplemented
        tensor = obj.detach().cpu().contiguous()
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(raw.data), tensor.dtype, tuple(tensor.shape))


def _tensor(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    if not len(raw):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)
