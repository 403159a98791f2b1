"""Servers that are forked for tests end as those that are not: none is left behind."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest
from tiny_run import PATIENCE_S

from areal.cli.demo import make_model
from areal.engine.remote.native import launch_native_server

pytestmark = pytest.mark.usefixtures("forked_children")


def listens(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_by_a_signal(tmp_path, number):
    make_model(tmp_path / "model")
    child, address = launch_native_server(
        tmp_path / "model", token="secret", num_pages=100, setup_timeout_s=PATIENCE_S
    )
    assert listens(address)
    os.kill(child.pid, number)
    assert child.wait(PATIENCE_S) is not None
    deadline = time.monotonic() + PATIENCE_S
    while listens(address):
        assert time.monotonic() < deadline
        time.sleep(0.02)
