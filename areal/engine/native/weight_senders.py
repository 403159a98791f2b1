"""The trainer's side of transports that are a conversation with native servers.

| sender           | remembers                                                                     |
|------------------|-------------------------------------------------------------------------------|
| CollectiveSender | the process group of this process (rank 0) and the first rank of every server |
| DeltaSender      | the weights that were published last                                          |

A failure ends what is remembered: the next version opens a new group, or is published whole. So
does a change of the servers for the group; whoever lacks the base of a change is sent all.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from areal.api.io_struct import WeightUpdateMeta
from areal.engine.native.members import Members
from areal.engine.server_control import ControlClient, ServerRefusedError
from areal.utils.device import best_device, device_identity
from areal.utils.in_thread import in_thread
from areal.weight_sync.collective import GroupError, GroupPlace, WeightGroup
from areal.weight_sync.delta import DeltaPublisher
from areal.weight_sync.transports import remove_old_versions

NamedTensors = Iterable[tuple[str, torch.Tensor]]

T = TypeVar("T")

_THREAD = "native-weights"
_POLL_S = 0.005
_NAMING_S = 2.0  # how long a server may take to show that it was not the one who is gone


class CollectiveSender:
    """`timeout_s` bounds how long a member of the group may keep the others waiting."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._controls: Sequence[ControlClient] = ()  # the members of the group
        self._group: WeightGroup | None = None
        self._num_opened = 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy in another process opens a group of its own."""
        return {**self.__dict__, "_group": None}

    def send(
        self,
        controls: Sequence[ControlClient],
        meta: WeightUpdateMeta,
        named_tensors: NamedTensors,
    ) -> None:
        """RuntimeError names the server that is at fault."""
        if controls != self._controls:
            self.close()
            self._controls = controls
        try:
            if self._group is None:
                self._group = self._open(meta)
            self._broadcast(meta, named_tensors)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _open(self, meta: WeightUpdateMeta) -> WeightGroup:
        device = torch.empty(0, device=best_device()).device  # with its number
        devices = [device_identity(device)]
        devices += [control.get("/health")["device"] for control in self._controls]
        # NCCL wants a GPU per member.
        alone = len(set(devices)) == len(devices) and "cpu" not in devices
        listener = socket.create_server(
            (meta.nccl_master_address, meta.nccl_master_port or 0), backlog=len(devices)
        )
        self._num_opened += 1
        place = GroupPlace(
            name=f"{meta.nccl_group_name}-{self._num_opened}-{secrets.token_hex(8)}",
            host=meta.nccl_master_address,
            port=listener.getsockname()[1],
            rank=0,
            world_size=len(devices),
            backend="nccl" if alone else "gloo",
            timeout_s=float(self._timeout_s),
        )
        calls = _Calls()
        for rank, control in enumerate(self._controls, start=1):
            calls.post(control, "/init_weights_group", **(asdict(place) | {"rank": rank}))
        opening = in_thread(_THREAD, lambda: WeightGroup.open(place, device, listener=listener))
        return calls.while_answering(lambda: _result(opening, check=calls.check))

    def _broadcast(self, meta: WeightUpdateMeta, named_tensors: NamedTensors) -> None:
        group = self._group
        order = {"kind": "xccl", "group": group.place.name, "version": meta.version}
        calls = _Calls()
        for control in self._controls:
            calls.post(control, "/update_weights", recompute_kv=meta.recompute_kv, **order)
        calls.while_answering(
            lambda: group.send(
                meta.version,
                named_tensors,
                bucket_bytes=meta.weight_chunked_mem_mb << 20,
                check=calls.check,
            )
        )


class DeltaSender:
    def __init__(self) -> None:
        self._publisher = DeltaPublisher()

    def send(self, members: Members, meta: WeightUpdateMeta, named_tensors: NamedTensors) -> None:
        size = {"bucket_bytes": meta.weight_chunked_mem_mb << 20}
        try:
            self._publisher.publish(named_tensors, meta.path, meta.version, **size)
            if not _told_all(members, meta):
                self._publisher.publish_whole(meta.path, meta.version, **size)
                _told_all(members, meta)
        except BaseException:
            self._publisher.forget()
            raise
        if meta.clear_checkpoint_after_load:
            remove_old_versions(Path(meta.path).parent)


def _told_all(members: Members, meta: WeightUpdateMeta) -> bool:
    """Whether every server has the version now; False when one lacks the base of the delta."""
    order = {"path": meta.path, "version": meta.version, "recompute_kv": meta.recompute_kv}

    def tell(control: ControlClient) -> bool:
        if control.get("/health")["version"] == meta.version:  # told before, by the delta
            return True
        try:
            control.post("/update_weights", kind="delta", **order)
        except ServerRefusedError as err:
            if err.status != 409:
                raise
            return False
        return True

    return all(members.on_all(tell).values())


class _Calls:
    """One POST to each of several servers, under way at the same time."""

    def __init__(self) -> None:
        self._futures: dict[ControlClient, Future[dict[str, Any]]] = {}

    def post(self, control: ControlClient, route: str, **order: Any) -> None:
        self._futures[control] = in_thread(_THREAD, lambda: control.post(route, **order))

    def check(self) -> None:
        """Raises what a server has answered, if it is an error."""
        for future in self._futures.values():
            if future.done():
                future.result()

    def while_answering(self, act: Callable[[], Any]) -> Any:
        """What `act` returns, once all servers have answered. Their errors say more than its."""
        try:
            result = act()
        except GroupError as err:
            raise self._who_broke(err) from err
        for future in self._futures.values():
            future.result()
        return result

    def _who_broke(self, err: GroupError) -> RuntimeError:
        """The cause, with the servers that do not answer, or what they said."""
        silent, said = [], []
        for control, future in self._futures.items():
            if not control.is_there(_NAMING_S):
                silent.append(control.address)
            if future.done() and (fault := future.exception()):
                said.append(str(fault))
        found = f"; no answer from native server {', '.join(silent)}" if silent else ""
        return RuntimeError("; ".join([f"{err}{found}", *said]))


def _result(future: Future[T], *, check: Callable[[], None]) -> T:
    while not future.done():
        check()
        time.sleep(_POLL_S)
    return future.result()
