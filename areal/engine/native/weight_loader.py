"""How new weights come into a native server, by whatever way they were sent.

    inbox = WeightInbox(engine_loop)
    inbox.join(place)                                        # the group of an `xccl` sender
    inbox.take(Order("xccl", version=3, recompute_kv=True, group=place.name))

A whole version is received and verified beside the running engine; only loading it happens between
two steps. Every call blocks and may come from any thread; one at a time is carried out.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from areal.engine.native.loop import EngineLoop
from areal.weight_sync.collective import GroupPlace, WeightGroup
from areal.weight_sync.delta import Mirror
from areal.weight_sync.publication import PublicationError
from areal.weight_sync.transports import open_sent

Kind = Literal["folder", "delta", "xccl"]
KINDS = get_args(Kind)


class WrongGroupError(RuntimeError):
    """An order for a weight group that this server is not in."""


@dataclass(frozen=True, slots=True)
class Order:
    """`folder` and `delta` come by a path, `xccl` through a group."""

    kind: Kind
    version: int
    recompute_kv: bool
    path: str = ""
    key: str = dataclasses.field(
        default="", repr=False
    )  # with which the sender marks what it writes there
    group: str = ""


class WeightInbox:
    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._group: WeightGroup | None = None
        self._mirror: Mirror | None = None

    def join(self, place: GroupPlace) -> None:
        """Enters a group in place of the one before; returns when all members are there."""
        with self._lock:
            self._leave()
            self._group = WeightGroup.open(place, self._loop.device)

    def take(self, order: Order) -> None:
        """Returns when the new weights serve. On an error the old ones go on serving."""
        with self._lock:
            source = self._receive(order)
            self._loop.call(
                lambda engine: engine.load_weights(
                    source, order.version, recompute_kv=order.recompute_kv
                )
            ).result()

    def close(self) -> None:
        with self._lock:
            self._leave()
            if self._mirror is not None:
                self._mirror.close()
                self._mirror = None

    def _receive(self, order: Order) -> Iterable[tuple[str, torch.Tensor]]:
        if order.kind == "xccl":
            staged = self._receive_broadcast(order)
            # The other ranks of this server are in no group: they read what this one received.
            return self._kept(staged, order.version) if self._loop.loads_files else staged
        try:
            if order.kind == "delta":
                mirror = self._opened_mirror()
                return mirror.take(order.path, version=order.version, key=order.key)
            return open_sent(order.path, version=order.version, key=order.key)
        except OSError as err:  # a path that leads nowhere: too long, a loop, not allowed
            raise PublicationError(f"{order.path[:200]}: {err.strerror}") from err

    def _receive_broadcast(self, order: Order) -> list[tuple[str, torch.Tensor]]:
        group = self._group
        if group is None or group.place.name != order.group:
            here = "none" if group is None else group.place.name
            raise WrongGroupError(
                f"the weights come through the group {order.group}, this server is in {here}: "
                "POST /init_weights_group first"
            )
        try:
            return group.receive(order.version)
        except BaseException:  # what was under way would meet the next version
            self._leave()
            raise

    def _kept(
        self, staged: list[tuple[str, torch.Tensor]], version: int
    ) -> Iterable[tuple[str, torch.Tensor]]:
        return self._opened_mirror().keep(staged, version)

    def _opened_mirror(self) -> Mirror:
        if self._mirror is None:
            self._mirror = Mirror()
        return self._mirror

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
