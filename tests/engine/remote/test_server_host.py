"""A server in a worker of a scheduler: started, killed, started again, and gone at the end."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from processes import parent_of

from areal.api.scheduler_api import Job, Worker
from areal.cli.demo import make_model
from areal.engine.remote.native import launch_native_server
from areal.engine.remote.server_control import ControlClient
from areal.engine.remote.server_process import HostedServer, ServerProcess, launch_server
from areal.infra.scheduler.local import LocalScheduler
from areal.sandbox.watch import descendants

TOKEN = "a-token-nobody-guesses"
WAIT_S = 900


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    scheduler = LocalScheduler(tmp_path_factory.mktemp("logs"), gpus=[])
    yield scheduler
    scheduler.delete_workers()


@pytest.fixture(scope="module")
def worker(scheduler) -> Worker:
    scheduler.create_workers(Job(role="rollout", replicas=1))
    return scheduler.get_workers("rollout", WAIT_S)[0]


def hosted(scheduler, worker, model: Path, logs: Path) -> HostedServer:
    options = {"model_path": model, "token": TOKEN, "num_pages": 100, "device": None}
    options |= {"log_path": logs / "server0.log", "setup_timeout_s": WAIT_S}
    return HostedServer(scheduler, worker, launch_native_server, options, setup_timeout_s=WAIT_S)


def pids_of(address: str) -> tuple[int, int]:
    """Of the server behind `address`, and of its worker, as the kernel knows them."""
    port = address.rpartition(":")[2]
    ControlClient(address, TOKEN, timeout_s=WAIT_S).wait_until_healthy(WAIT_S)
    serving = [pid for pid in descendants(os.getpid()) if listens(pid, int(port))]
    (server,) = serving
    return server, parent_of(server)


def listens(pid: int, port: int) -> bool:
    table = Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = [row.split() for row in table]
    inodes = {row[9] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
    links = [os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    return any(f"socket:[{inode}]" in links for inode in inodes)


def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_does_not_start_says_why(scheduler, worker, tmp_path):
    with pytest.raises(RuntimeError, match=r"native server \(pid .*expected the folder of a Hugg"):
        ServerProcess(hosted(scheduler, worker, tmp_path / "no_model", tmp_path).launch)


@pytest.mark.slow
def test_a_server_is_replaced_and_so_is_its_worker(scheduler, worker, tmp_path):
    make_model(tmp_path / "model")
    process = ServerProcess(hosted(scheduler, worker, tmp_path / "model", tmp_path).launch)
    assert process.describe_end() is None
    server, first_worker = pids_of(process.address)
    environment = Path(f"/proc/{server}/environ").read_bytes().split(b"\0")
    assert not [line for line in environment if line.startswith((b"RANK=", b"WORLD_SIZE="))]

    os.kill(server, signal.SIGKILL)
    assert process.wait_end()
    assert f"(pid {server}) was ended by signal SIGKILL" in process.describe_end()
    first = process.address
    assert process.start_again() == process.address != first
    server, same_worker = pids_of(process.address)
    assert same_worker == first_worker

    os.kill(first_worker, signal.SIGKILL)
    assert process.wait_end()
    assert "worker is gone: rollout/0: rollout/0 (pid" in process.describe_end()
    wait_gone(server)
    process.start_again()
    server, new_worker = pids_of(process.address)
    assert new_worker != first_worker

    process.close()
    assert not process.wait_end()
    wait_gone(server)
    assert (tmp_path / "server0.log").is_file()
    assert TOKEN not in (tmp_path / "server0.log").read_text()


# A server as those of others are: its engine is a process in a session of its own, and deaf.
STAND_IN = """
import pathlib, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(); time.sleep(900)"
command = [sys.executable, "-S", "-u", "-c", deaf]
engine = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
engine.stdout.readline()
pathlib.Path(sys.argv[-1]).write_text(str(engine.pid))
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answer).serve_forever()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="guards are Linux's")
def test_nothing_that_a_stock_server_started_outlives_it(tmp_path):
    (tmp_path / "server.py").write_text(STAND_IN)
    child, address = launch_server(
        "stand-in server",
        [sys.executable, "-S", str(tmp_path / "server.py")],
        {},
        [str(tmp_path / "engine.pid")],
        env={},
        token=TOKEN,
        gpus=None,
        host="127.0.0.1",
        log_path=None,
        setup_timeout_s=WAIT_S,
    )
    engine = int((tmp_path / "engine.pid").read_text())
    assert engine in list(descendants(child.pid))
    child.terminate()
    assert not Path(f"/proc/{engine}").exists()
    assert not ControlClient(address, TOKEN, timeout_s=WAIT_S).is_there(WAIT_S)
