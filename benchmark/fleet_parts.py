"""Starts the stand-in servers of benchmark/fleet.py, in Ray's workers; loads no torch there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

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
