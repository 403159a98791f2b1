"""Broadcast of weights from one process to many, through a process group of its own.

    sender      group = WeightGroup.open(place(rank=0), device, listener=socket)
                group.send(7, actor.hf_weights(), bucket_bytes=1 << 30)
    receivers   group = WeightGroup.open(place(rank=1), device)
                staged = group.receive(7)             # all of version 7, verified

Weights are sent in buckets: while one is broadcast, the sender gathers the next. Each bucket is
preceded by a header: version, names, dtypes, shapes and a checksum that the receiver recomputes on
the device. A version is returned only when all of it has arrived.

Stock servers join groups as torch.distributed makes them, and know no headers: `open_as_torch`, and
`broadcast` of the tensors whose names a server was told.

The group is never the default group, which a trainer of several ranks has already. Headers use
gloo; buckets use NCCL if every member has its own GPU, else gloo through host memory. Every wait is
bounded by `timeout_s` of the place. Any failure raises `GroupError` and leaves the group unusable:
close it and open a new one.
"""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from areal.utils.addresses import address_towards
from areal.weight_sync.bucket import DTYPE_NAMES, DTYPES, device_checksum, fill_buckets

_POLL_S = 0.001
_ALIGNMENT = 16  # bytes, of each weight in a bucket
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def _no_check() -> None: ...


class GroupError(RuntimeError):
    """The group cannot be opened, broke, or delivered data that failed verification."""


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """One member of a group: the group's parameters and the member's rank. Rank 0 sends."""

    name: str  # shared secret of the members, new for every group
    host: str  # where rank 0 listens
    port: int
    rank: int
    world_size: int
    backend: str  # nccl or gloo, for buckets
    timeout_s: float


class _Backend(Protocol):
    """The used methods of ProcessGroupGloo and ProcessGroupNCCL, missing in torch's stubs."""

    def broadcast(self, tensors: list[torch.Tensor], opts: dist.BroadcastOptions) -> dist.Work: ...

    def abort(self) -> None: ...


@dataclass(slots=True)
class _UnderWay:
    work: dist.Work
    buffer: torch.Tensor  # must live as long as the work


class WeightGroup:
    """Use `open`."""

    def __init__(
        self, place: GroupPlace, device: torch.device, headers: _Backend, buckets: _Backend
    ) -> None:
        self.place = place
        self._device = device
        self._headers: _Backend | None = headers  # None: closed
        self._buckets: _Backend | None = buckets
        self._under_way: list[dist.Work] = []

    @classmethod
    def open(
        cls,
        place: GroupPlace,
        device: str | torch.device,
        *,
        listener: socket.socket | None = None,
    ) -> WeightGroup:
        """Returns when all members have joined. Rank 0 passes its listening socket.

        device: of this member, with its index.
        """
        memory = torch.device(device if place.backend == "nccl" else "cpu")
        with _naming_errors(place):
            store = _store(place, listener)
            headers = _gloo(PrefixStore("headers", store), place)
            buckets = headers
            if place.backend == "nccl":
                buckets = _nccl(PrefixStore("buckets", store), place, memory)
        return cls(place, memory, headers, buckets)

    @classmethod
    def open_as_torch(
        cls, place: GroupPlace, device: str | torch.device, *, listener: socket.socket
    ) -> WeightGroup:
        """As `open`, for rank 0 of a group whose other members call torch.distributed: under the
        store keys of `_new_process_group_helper`."""
        memory = torch.device(device if place.backend == "nccl" else "cpu")
        with _naming_errors(place):
            store = PrefixStore(f"{place.name}/", _store(place, listener))
            if place.backend == "nccl":
                backend = _nccl(PrefixStore("cuda/", store), place, memory)
            else:
                backend = _gloo(PrefixStore("cpu/", store), place)
        return cls(place, memory, backend, backend)

    @property
    def device(self) -> torch.device:
        """Of tensors to `broadcast`."""
        return self._device

    def broadcast(
        self, tensors: Iterable[torch.Tensor], *, check: Callable[[], None] = _no_check
    ) -> None:
        """One broadcast per tensor, in this order, without header or checksum."""
        started = [self._broadcast(tensor.contiguous(), self._buckets) for tensor in tensors]
        self._under_way = [one.work for one in started]
        for one in started:
            self._finish(one, check)

    def send(
        self,
        version: int,
        named_tensors: NamedTensors,
        *,
        bucket_bytes: int,
        check: Callable[[], None] = _no_check,
    ) -> None:
        """Returns when all is sent. `check` is called during every wait, and may raise."""
        last: _UnderWay | None = None
        num_buckets = 0
        for bucket in fill_buckets(named_tensors, bucket_bytes, self._device):
            flat, entries = _pack(bucket, self._device)
            header = {"version": version, "weights": entries, "checksum": device_checksum(flat)}
            if last is not None:
                self._finish(last, check)
            self._send_header({**header, "nbytes": len(flat)}, check)
            last = self._broadcast(flat, self._buckets)
            num_buckets += 1
        if last is not None:
            self._finish(last, check)
        self._send_header({"version": version, "num_buckets": num_buckets}, check)

    def receive(self, version: int) -> list[tuple[str, torch.Tensor]]:
        """All weights of `version`, on this group's device."""
        staged: list[tuple[str, torch.Tensor]] = []
        num_buckets = 0
        while True:
            header = self._receive_header()
            if header["version"] != version:
                raise GroupError(
                    f"the sender sends version {header['version']}, this server was told to expect "
                    f"{version}"
                )
            if "num_buckets" in header:
                if header["num_buckets"] != num_buckets:
                    raise GroupError(f"{num_buckets} buckets came of {header['num_buckets']}")
                return staged
            flat = torch.empty(header["nbytes"], dtype=torch.uint8, device=self._device)
            self._finish(self._broadcast(flat, self._buckets))
            if device_checksum(flat) != header["checksum"]:
                names = [name for name, *_ in header["weights"]]
                raise GroupError(
                    f"bucket {num_buckets} of version {version} ({names[0]} ...) is not what was "
                    "sent: its checksum is wrong"
                )
            staged += _unpack(flat, header["weights"])
            num_buckets += 1

    def close(self) -> None:
        """Leaves the group; members waiting for this one get an error, or time out."""
        backends = (self._headers, self._buckets)
        if self._buckets is not None and self._buckets is not self._headers:
            self._buckets.abort()
        # In a thread: freeing a gloo group with pending sends blocks with the GIL held.
        threading.Thread(
            target=_wait_for_all,
            args=(self._under_way, backends),
            name="weight-group-end",
            daemon=True,
        ).start()
        self._headers = self._buckets = None
        self._under_way = []

    def _send_header(self, header: dict[str, Any], check: Callable[[], None] = _no_check) -> None:
        content = bytearray(json.dumps(header).encode())
        size = torch.tensor([len(content)])
        self._finish(self._broadcast(size, self._headers), check)
        text = torch.frombuffer(content, dtype=torch.uint8)
        self._finish(self._broadcast(text, self._headers), check)

    def _receive_header(self) -> dict[str, Any]:
        size = torch.zeros(1, dtype=torch.int64)
        self._finish(self._broadcast(size, self._headers))
        text = torch.empty(int(size), dtype=torch.uint8)
        self._finish(self._broadcast(text, self._headers))
        return json.loads(text.numpy().tobytes())

    def _broadcast(self, buffer: torch.Tensor, backend: _Backend | None) -> _UnderWay:
        if backend is None:
            raise GroupError("the weight group is closed")
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            work = backend.broadcast([buffer], options)
        except RuntimeError as err:
            raise GroupError(f"the weight group broke: {err}") from err
        self._under_way = [work]
        return _UnderWay(work, buffer)

    def _finish(self, under_way: _UnderWay, check: Callable[[], None] = _no_check) -> None:
        deadline = time.monotonic() + self.place.timeout_s
        while not under_way.work.is_completed():
            check()
            if time.monotonic() > deadline:
                limit = f"{self.place.timeout_s:g} s"
                raise GroupError(f"a member of the weight group did not answer within {limit}")
            time.sleep(_POLL_S)
        try:
            under_way.work.wait()
        except RuntimeError as err:
            raise GroupError(f"the weight group broke: {err}") from err


def _wait_for_all(works: list[dist.Work], backends: tuple[_Backend | None, ...]) -> None:
    """Keeps the backends alive until their works are done."""
    while not all(work.is_completed() for work in works):
        time.sleep(0.1)


@contextmanager
def _naming_errors(place: GroupPlace) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as err:  # OSError: no such host
        raise GroupError(f"the weight group of {place.host}:{place.port}: {err}") from err


def _store(place: GroupPlace, listener: socket.socket | None) -> Store:
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  # documented here
        place.host,
        place.port,
        place.world_size,
        is_master=place.rank == 0,
        timeout=timedelta(seconds=place.timeout_s),
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    return PrefixStore(place.name, store)


def _gloo(store: Store, place: GroupPlace) -> _Backend:
    gloo: Any = dist.ProcessGroupGloo  # torch's stub lacks these options
    options = gloo._Options()
    options._timeout = timedelta(seconds=place.timeout_s + 2)  # after the timeout of `_finish`
    # By default gloo listens on the address of the hostname, which may be public.
    own_address = address_towards(place.host, place.port)
    options._devices = [gloo.create_device(hostname=own_address)]
    return gloo(store, place.rank, place.world_size, options)


def _nccl(store: Store, place: GroupPlace, device: torch.device) -> _Backend:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=10 * place.timeout_s)  # after the timeout of `_finish`
    # By default NCCL aborts this process when a member is lost; here that raises an error.
    before = os.environ.get(_NCCL_ERRORS)
    os.environ[_NCCL_ERRORS] = "0"
    try:
        backend = nccl(store, place.rank, place.world_size, options)
    finally:
        if before is None:
            del os.environ[_NCCL_ERRORS]
        else:
            os.environ[_NCCL_ERRORS] = before
    backend.eager_connect_single_device(device)
    return backend


def _pack(
    bucket: dict[str, torch.Tensor], device: torch.device
) -> tuple[torch.Tensor, list[list[Any]]]:
    """A flat byte buffer, and [name, dtype, shape, offset] of each weight in it."""
    entries, end = [], 0
    for name, tensor in bucket.items():
        entries.append([name, DTYPE_NAMES[tensor.dtype], list(tensor.shape), end])
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    flat = torch.zeros(end, dtype=torch.uint8, device=device)
    for (*_, start), tensor in zip(entries, bucket.values(), strict=True):
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        flat[start : start + len(raw)] = raw
    return flat, entries


def _unpack(flat: torch.Tensor, entries: list[list[Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, dtype_name, shape, start in entries:
        dtype = DTYPES[dtype_name]
        end = start + math.prod(shape) * dtype.itemsize
        yield name, flat[start:end].view(dtype).view(shape)
