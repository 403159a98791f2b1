"""Receives new weights in a native server, for every transport.

    loader = WeightLoader(engine_loop)
    loader.join(place)                                        # the group of an `xccl` sender
    loader.take(WeightUpdate("xccl", version=3, recompute_kv=True, group=place.name))

A version is received and verified in full beside the running engine; only loading happens between
two steps. Calls block, may come from any thread, and are serialized.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from areal.engine.native.engine import NativeEngine
from areal.engine.native.loop import EngineLoop
from areal.utils.perf_tracer import trace_scope
from areal.weight_sync.collective import GroupPlace, WeightGroup
from areal.weight_sync.delta import Mirror
from areal.weight_sync.publication import PublicationError
from areal.weight_sync.transports import open_sent

Kind = Literal["folder", "delta", "xccl"]
KINDS = get_args(Kind)


class WrongGroupError(RuntimeError):
    """A weight update for a group that this server has not joined."""


@dataclass(frozen=True, slots=True)
class LoraUpdate:
    """The tensors of an update are an adapter's."""

    name: str  # of the run's adapters: served as `{name}-v{version}`
    alpha: float


def load(
    engine: NativeEngine,
    source: Iterable[tuple[str, torch.Tensor]],
    version: int,
    recompute_kv: bool,
    adapter: LoraUpdate | None,
) -> None:
    """Make the weights of `source`, or the adapter, live."""
    with trace_scope("load weights", "comm", version=version):
        if adapter is None:
            engine.load_weights(source, version, recompute_kv=recompute_kv)
        else:
            lora = {"name": adapter.name, "alpha": adapter.alpha}
            engine.load_adapter(source, version, recompute_kv=recompute_kv, **lora)


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """`folder` and `delta` need a path, `xccl` a group."""

    kind: Kind
    version: int
    recompute_kv: bool
    path: str = ""
    key: str = dataclasses.field(default="", repr=False)  # of the sender (utils/manifest.py)
    group: str = ""
    adapter: LoraUpdate | None = None  # None: whole weights


class WeightLoader:
    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._group: WeightGroup | None = None
        self._mirror: Mirror | None = None

    def join(self, place: GroupPlace) -> None:
        """Joins a group, leaving the previous one; returns when all members have joined."""
        with self._lock:
            self._leave()
            self._group = WeightGroup.open(place, self._loop.device)

    def take(self, update: WeightUpdate) -> None:
        """Returns when the new weights are live. On an error the old ones stay live."""
        with self._lock:
            source = self._receive(update)
            version, recompute_kv, adapter = update.version, update.recompute_kv, update.adapter
            self._loop.call(
                lambda engine: load(engine, source, version, recompute_kv, adapter)
            ).result()

    def close(self) -> None:
        with self._lock:
            self._leave()
            if self._mirror is not None:
                self._mirror.close()
                self._mirror = None

    def _receive(self, update: WeightUpdate) -> Iterable[tuple[str, torch.Tensor]]:
        if update.kind == "xccl":
            staged = self._receive_broadcast(update)
            # The other ranks of this server are in no group, so they read it from files.
            return self._kept(staged, update.version) if self._loop.loads_files else staged
        try:
            if update.kind == "delta":
                mirror = self._opened_mirror()
                return mirror.take(update.path, version=update.version, key=update.key)
            return open_sent(update.path, version=update.version, key=update.key)
        except OSError as err:  # a bad path: too long, a symlink loop, no permission
            raise PublicationError(f"{update.path[:200]}: {err.strerror}") from err

    def _receive_broadcast(self, update: WeightUpdate) -> list[tuple[str, torch.Tensor]]:
        group = self._group
        if group is None or group.place.name != update.group:
            here = "none" if group is None else group.place.name
            raise WrongGroupError(
                f"the weights come through the group {update.group}, this server is in {here}: "
                "POST /init_weights_group first"
            )
        try:
            return group.receive(update.version)
        except BaseException:  # leftover transfers would mix with the next version
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
