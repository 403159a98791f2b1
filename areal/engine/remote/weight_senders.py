"""Weight transports that keep state between versions.

`CollectiveSender` (`xccl`) broadcasts to the workers of all servers:

    rank 0    1      2          3      4
    trainer   server A (t2)     server B (t2)      consecutive ranks for a server's workers

Servers that know no headers (`protocol.wants_names`) are told the names of each bucket, and receive
its tensors one by one. The group stays open across versions. A failure, or a change of the servers,
closes it, and the next version opens a new one. A server that joins with a version gets it through
a group of its own, so that it can fail alone.

`DeltaSender` (`delta`) publishes the changes since the version it published last; after a failure,
and for servers that lack that version, it publishes in full.
"""

from __future__ import annotations

import queue
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from areal.api.io_struct import WeightUpdateMeta
from areal.engine.remote.protocol import NamedBucket, ServerProtocol
from areal.engine.remote.server_control import ControlClient, ServerError, ServerRefusedError
from areal.engine.remote.server_pool import ServerPool
from areal.utils import logging
from areal.utils.device import best_device, device_identity
from areal.utils.threads import in_thread
from areal.weight_sync.bucket import fill_buckets
from areal.weight_sync.collective import GroupError, GroupPlace, WeightGroup
from areal.weight_sync.delta import DeltaPublisher
from areal.weight_sync.transports import remove_old_versions

logger = logging.getLogger("ServerPool")

NamedTensors = Iterable[tuple[str, torch.Tensor]]

T = TypeVar("T")

_THREAD = "weight-group"
_GROUP_BROKE = 502  # of a native server: see its module
_POLL_S = 0.005
_OFFER_S = 0.1  # between two looks whether a server that joins is given up
_NAMING_S = 2.0  # timeout of the probe for the server that broke the group


class CollectiveSender:
    """`timeout_s` bounds how long a member of the group may keep the others waiting."""

    def __init__(self, protocol: ServerProtocol, *, timeout_s: float) -> None:
        self._protocol = protocol
        self._timeout_s = timeout_s
        self._line: _Line | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process opens its own group."""
        return {**self.__dict__, "_line": None}

    def send(
        self,
        controls: Sequence[ControlClient],
        meta: WeightUpdateMeta,
        named_tensors: NamedTensors,
        *,
        newcomers: Sequence[ControlClient] = (),
    ) -> None:
        """RuntimeError names the failing server. A newcomer that fails lacks the version, and the
        others get it."""
        if self._protocol.wants_names:
            # It loads bucket by bucket and reports no version: after a failure nobody could tell
            # what it has, so that it must not fail alone.
            controls, newcomers = (*controls, *newcomers), ()
        if self._line is None or self._line.controls != controls:
            self.close()
            self._line = _Line(self._protocol, controls, self._timeout_s)
        copies = [self._start_copy(control, meta) for control in newcomers]
        try:
            self._line.send(meta, _copied(named_tensors, copies))
        except BaseException:
            for copy in copies:
                copy.abandon("the update failed")
            self.close()
            raise
        for copy in copies:
            copy.finish()

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _start_copy(self, control: ControlClient, meta: WeightUpdateMeta) -> _Copy:
        line = _Line(self._protocol, (control,), self._timeout_s)
        # On any port: the configured one is in use by the group of the members.
        return _Copy(line, replace(meta, nccl_master_port=0), self._timeout_s)


def _copied(named_tensors: NamedTensors, copies: Sequence[_Copy]) -> NamedTensors:
    for named in named_tensors:
        for copy in copies:
            copy.offer(named)
        yield named


class _Copy:
    """Sends the tensors of an update to one server that joins, in a thread of its own.

        consumes: `offer`     waits for: the server, at most `timeout_s` at a time
        unblocked by: the server, its timeout, `abandon`

    What it keeps the members waiting for is less than they wait for the sender.
    """

    def __init__(self, line: _Line, meta: WeightUpdateMeta, timeout_s: float) -> None:
        self._name = f"{line.controls[0].kind} {line.controls[0].address}"
        self._timeout_s = timeout_s
        self._left_s = timeout_s / 2
        self._fault: str | None = None
        self._offered: queue.Queue[tuple[str, torch.Tensor] | None] = queue.Queue(maxsize=1)
        self._sending = in_thread(_THREAD, self._send, line, meta)

    def offer(self, named: tuple[str, torch.Tensor] | None) -> None:
        """None ends the update. Returns when it was taken, or will never be."""
        began = time.monotonic()
        while self._fault is None and not self._sending.done():
            try:
                self._offered.put(named, timeout=_OFFER_S)
                break
            except queue.Full:
                if time.monotonic() - began > self._left_s:
                    self.abandon(f"{self._name} keeps the others waiting")
        self._left_s -= time.monotonic() - began

    def abandon(self, why: str) -> None:
        self._fault = why
        with suppress(queue.Full):  # it then looks when it takes what is there
            self._offered.put_nowait(None)

    def finish(self) -> None:
        """Returns when the server has the version, or not."""
        self.offer(None)
        try:
            self._sending.result(self._timeout_s if self._fault is None else 0.0)
        except (RuntimeError, OSError) as error:  # OSError: also a timeout, or no port
            fault = self._fault or str(error) or f"not loaded within {self._timeout_s:g} s"
            logger.warning("%s joins and did not get the weights: %s", self._name, fault)

    def _send(self, line: _Line, meta: WeightUpdateMeta) -> None:
        try:
            line.send(meta, self._taken())
        finally:
            line.close()

    def _taken(self) -> NamedTensors:
        while True:
            named = self._offered.get()
            if self._fault is not None:  # also instead of an end: it must not look complete
                raise RuntimeError(self._fault)
            if named is None:
                return
            yield named


class _Line:
    """The group of some servers; it stays open until it fails."""

    def __init__(
        self, protocol: ServerProtocol, controls: Sequence[ControlClient], timeout_s: float
    ) -> None:
        self.controls = controls
        self._protocol = protocol
        self._timeout_s = timeout_s
        self._group: WeightGroup | None = None

    def send(self, meta: WeightUpdateMeta, named_tensors: NamedTensors) -> None:
        """After an error it is of no more use."""
        if self._group is None:
            self._group = self._open(meta)
        send = self._broadcast_by_name if self._protocol.wants_names else self._broadcast
        send(self._group, meta, named_tensors)

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _open(self, meta: WeightUpdateMeta) -> WeightGroup:
        device = torch.empty(0, device=best_device()).device  # with its index
        of_servers = [self._protocol.group_devices(control) for control in self.controls]
        devices = [device_identity(device), *(each for own in of_servers for each in own)]
        # NCCL needs one GPU per member.
        alone = len(set(devices)) == len(devices) and "cpu" not in devices
        listener = socket.create_server(
            (meta.nccl_master_address, meta.nccl_master_port or 0), backlog=len(devices)
        )
        place = GroupPlace(
            name=f"{meta.nccl_group_name}-{secrets.token_hex(8)}",
            host=meta.nccl_master_address,
            port=listener.getsockname()[1],
            rank=0,
            world_size=len(devices),
            backend="nccl" if alone else "gloo",
            timeout_s=float(self._timeout_s),
        )
        calls, rank = _Calls(), 1
        for control, own in zip(self.controls, of_servers, strict=True):
            own_place = replace(place, rank=rank)
            calls.start(control, partial(self._protocol.join_group, control, own_place))
            rank += len(own)
        make = WeightGroup.open_as_torch if self._protocol.wants_names else WeightGroup.open
        opening = in_thread(_THREAD, lambda: make(place, device, listener=listener))
        return calls.while_answering(lambda: _result(opening, check=calls.check))

    def _broadcast(
        self, group: WeightGroup, meta: WeightUpdateMeta, named_tensors: NamedTensors
    ) -> None:
        calls = _Calls()
        for control in self.controls:
            calls.start(control, partial(self._protocol.receive, control, group.place.name, meta))
        calls.while_answering(
            lambda: group.send(
                meta.version,
                named_tensors,
                bucket_bytes=meta.weight_chunked_mem_mb << 20,
                check=calls.check,
            )
        )

    def _broadcast_by_name(
        self, group: WeightGroup, meta: WeightUpdateMeta, named_tensors: NamedTensors
    ) -> None:
        buckets = fill_buckets(named_tensors, meta.weight_chunked_mem_mb << 20, group.device)
        bucket = next(buckets, {})
        while bucket:
            following = next(buckets, {})
            calls = _Calls()
            for control in self.controls:
                told = NamedBucket(group.place.name, bucket, meta.version, is_last=not following)
                calls.start(control, partial(self._protocol.receive_bucket, control, told))
            tensors = bucket.values()
            calls.while_answering(partial(group.broadcast, tensors, check=calls.check))
            bucket = following


class _Calls:
    """Concurrent calls, one per server."""

    def __init__(self) -> None:
        self._futures: dict[ControlClient, Future[Any]] = {}

    def start(self, control: ControlClient, call: Callable[[], Any]) -> None:
        self._futures[control] = in_thread(_THREAD, call)

    def check(self) -> None:
        """Raises the error of a finished call, if any."""
        for future in self._futures.values():
            if future.done():
                future.result()

    def while_answering(self, act: Callable[[], T]) -> T:
        """Result of `act` once all calls have finished. Server errors take precedence over its."""
        try:
            result = act()
            for future in self._futures.values():
                future.result()
            return result
        except GroupError as err:
            raise self._who_broke(err) from err
        except ServerRefusedError as err:  # a member may find out first that another is gone
            if err.status == _GROUP_BROKE:
                raise self._who_broke(err) from err
            raise

    def _who_broke(self, err: GroupError | ServerRefusedError) -> RuntimeError:
        """The error, with the servers that do not answer, or their errors."""
        silent, said = [], []
        for control, future in self._futures.items():
            if not control.is_there(_NAMING_S):
                silent.append(f"{control.kind} {control.address}")
            if future.done() and (fault := future.exception()) and fault is not err:
                said.append(str(fault))
        found = f"; no answer from {', '.join(silent)}" if silent else ""
        return RuntimeError("; ".join([f"{err}{found}", *said]))


def _result(future: Future[T], *, check: Callable[[], None]) -> T:
    while not future.done():
        check()
        time.sleep(_POLL_S)
    return future.result()


class DeltaSender:
    def __init__(self, protocol: ServerProtocol) -> None:
        self._protocol = protocol
        self._publisher = DeltaPublisher()

    def send(self, pool: ServerPool, meta: WeightUpdateMeta, named_tensors: NamedTensors) -> None:
        how = {"bucket_bytes": meta.weight_chunked_mem_mb << 20, "key": meta.key}
        try:
            self._publisher.publish(named_tensors, meta.path, meta.version, **how)
            if not self._load_on_all(pool, meta):
                self._publisher.publish_whole(meta.path, meta.version, **how)
                self._load_on_all(pool, meta)
        except BaseException:
            self._publisher.forget()
            raise
        if meta.clear_checkpoint_after_load:
            remove_old_versions(Path(meta.path).parent)

    def _load_on_all(self, pool: ServerPool, meta: WeightUpdateMeta) -> bool:
        """Whether every server has the version now; False when one lacks the base of the delta.

        One that joins may be unable to load it (it does not see the folder, say): then it is not
        admitted, and the update goes on."""

        def load(control: ControlClient) -> bool:
            try:
                return self._protocol.load_delta(control, meta)
            except ServerError as error:
                if control.address in pool.addresses:
                    raise
                logger.warning("a server that joins cannot load the weights: %s", error)
                return True

        return all(pool.on_all(load, receivers=True).values())
