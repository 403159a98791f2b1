"""The trainer's side of transports that are a conversation with native servers.

`NativeGroupRoutes` are their words for a broadcast (../collective_sender.py). A `DeltaSender`
remembers the weights that were published last; a failure ends that, and the next version is
published whole. Whoever lacks the base of a change is sent all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from areal.api.io_struct import WeightUpdateMeta
from areal.engine.remote.collective_sender import GroupRoutes
from areal.engine.remote.server_control import ControlClient, ServerRefusedError
from areal.engine.remote.server_pool import Members
from areal.weight_sync.collective import GroupPlace
from areal.weight_sync.delta import DeltaPublisher
from areal.weight_sync.transports import remove_old_versions

if TYPE_CHECKING:
    import torch


class NativeGroupRoutes(GroupRoutes):
    """One process of a server is in the group, and hands the weights to its others."""

    def devices(self, control: ControlClient) -> list[str]:
        return [control.get("/health")["device"]]

    def join(self, control: ControlClient, place: GroupPlace) -> None:
        control.post("/init_weights_group", **asdict(place))

    def take(self, control: ControlClient, group: str, meta: WeightUpdateMeta) -> None:
        order = {"version": meta.version, "recompute_kv": meta.recompute_kv}
        control.post("/update_weights", kind="xccl", group=group, **order)


class DeltaSender:
    def __init__(self) -> None:
        self._publisher = DeltaPublisher()

    def send(
        self,
        members: Members,
        meta: WeightUpdateMeta,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        how = {"bucket_bytes": meta.weight_chunked_mem_mb << 20, "key": meta.key}
        try:
            self._publisher.publish(named_tensors, meta.path, meta.version, **how)
            if not _told_all(members, meta):
                self._publisher.publish_whole(meta.path, meta.version, **how)
                _told_all(members, meta)
        except BaseException:
            self._publisher.forget()
            raise
        if meta.clear_checkpoint_after_load:
            remove_old_versions(Path(meta.path).parent)


def _told_all(members: Members, meta: WeightUpdateMeta) -> bool:
    """Whether every server has the version now; False when one lacks the base of the delta."""
    order = {"path": meta.path, "key": meta.key, "version": meta.version}
    order["recompute_kv"] = meta.recompute_kv

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
