"""The life of a server that `areal serve join` has started, against a run that comes and goes."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import Future

import pytest

from areal.cli.serve_fleet import _host_and_port, _Membership
from areal.run.mailbox import MailboxServer
from areal.utils.child_process import ChildProcess
from areal.utils.threads import in_thread

WAIT_S = 900
ADDRESS = "127.0.0.1:1"


class Run:
    """Answers as a run does, and forgets its servers as one that is started again."""

    def __init__(self, folder) -> None:
        self.servers: dict[str, str] = {}
        self.left: list[str] = []
        self.joins: list[dict] = []
        self.mailbox = MailboxServer(folder, self.handle, self.describe)

    def handle(self, op, fields):
        assert op == "join"
        self.joins.append(fields)
        self.servers[fields["address"]] = "serving"
        return {"servers": dict(self.servers)}

    def describe(self):
        return {"servers": dict(self.servers), "left": list(self.left)}


@pytest.fixture
def child():
    child = ChildProcess([sys.executable, "-c", "import time; time.sleep(9000)"], name="server")
    yield child
    child.terminate()


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "fleet")
    run.mailbox.start()
    yield run
    run.mailbox.close()


def keep(run, tmp_path, child, patience_s=WAIT_S) -> Future[str]:
    """Why it ended."""
    member = _Membership(tmp_path / "fleet", ADDRESS, "its-token", child, patience_s)
    future = in_thread("keep", member.keep)
    wait_for(lambda: run.joins or future.done())
    return future


def wait_for(condition):
    waited, deadline = threading.Event(), time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        waited.wait(0.05)


def test_it_joins_again_and_ends_when_it_is_told_to_leave(run, tmp_path, child):
    kept = keep(run, tmp_path, child)
    run.servers.clear()  # the run was killed and goes on
    wait_for(lambda: len(run.joins) == 2)
    assert run.joins == [{"address": ADDRESS, "token": "its-token"}] * 2
    run.servers.clear()
    run.left.append(ADDRESS)
    assert kept.result(WAIT_S) == "has left the run"


def test_it_ends_with_the_run(run, tmp_path, child):
    kept = keep(run, tmp_path, child)
    run.mailbox.close()
    assert kept.result(WAIT_S) == "the run has ended"


def test_it_ends_with_its_server(run, tmp_path, child):
    kept = keep(run, tmp_path, child)
    child.terminate()
    with pytest.raises(RuntimeError, match="server"):
        kept.result(WAIT_S)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.7:8000", "10.0.0.7:8000"),
        ("http://gpu-3:8000/", "gpu-3:8000"),
        ("gpu-3", None),
        ("https://gpu-3:8000", None),
        ("gpu-3:http", None),
        ("", None),
    ],
)
def test_addresses(text, address):
    if address is not None:
        assert _host_and_port(text) == address
    else:
        with pytest.raises(ValueError, match="expected host:port"):
            _host_and_port(text)
