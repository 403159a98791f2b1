"""What benchmark/fleet.py runs in Ray's workers: stand-in servers, and ranks that send weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from areal.api.io_struct import WeightUpdateMeta
from areal.engine.remote.engine import RemoteEngine
from areal.utils.child_process import ChildProcess


def launch_stand_in(
    *, token: str, host: str, mean_s: float, setup_timeout_s: float
) -> tuple[ChildProcess, str]:
    """As the functions that start real servers; it wants no token and listens on loopback."""
    script = Path(__file__).with_name("generation_stand_in.py")
    child = ChildProcess([sys.executable, str(script), "--mean-s", str(mean_s)], name="stand-in")
    try:
        port = json.loads(child.wait_ready(timeout_s=setup_timeout_s))["port"]
    except BaseException:
        child.terminate()
        raise
    return child, f"127.0.0.1:{port}"


class Rank:
    """A training rank that trains nothing; the first one sends the weights, by its copy of the
    client."""

    def __init__(self, client: RemoteEngine, index: int) -> None:
        self._client = client
        self._index = index

    def start(self) -> bool:
        return True

    def update_weights(self, version: int) -> bool:
        if self._index == 0:
            self._client.update_weights(meta_of(version))
        return True


def meta_of(version: int) -> WeightUpdateMeta:
    """Stand-ins take the version and read nothing."""
    return WeightUpdateMeta(type="disk", path="", version=version)
