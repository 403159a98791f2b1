"""The ranks of benchmark/fleet.py, which run in Ray's workers: they send weights and sleep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal.api.io_struct import WeightUpdateMeta

if TYPE_CHECKING:
    from areal.engine.remote.engine import RemoteEngine


class Rank:
    """A training rank that trains nothing; the first one has a copy of the client and sends the
    weights, the others only answer."""

    def __init__(self, client: RemoteEngine | None) -> None:
        self._client = client

    def start(self) -> bool:
        return True

    def use(self, client: RemoteEngine | None) -> None:
        """The client of another fleet."""
        self._client = client

    def update_weights(self, version: int) -> bool:
        if self._client is not None:
            self._client.update_weights(meta_of(version))
        return True


def meta_of(version: int) -> WeightUpdateMeta:
    """Stand-ins take the version and read nothing."""
    return WeightUpdateMeta(type="disk", path="", version=version)
