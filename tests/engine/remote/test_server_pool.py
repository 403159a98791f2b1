"""ServerPool: a server that cannot be started again is left out, and the last one never.

The processes are real and really killed; what answers under their addresses is a few lines of HTTP.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from areal.api.engine_api import EngineLostError
from areal.api.io_struct import WeightUpdateMeta
from areal.engine.remote.admission import JoinsWithNextWeights
from areal.engine.remote.native import NativeProtocol, NativeRemoteEngine
from areal.engine.remote.server_pool import ServerPool
from areal.engine.remote.server_process import ServerProcess
from areal.engine.remote.weight_senders import DeltaSender
from areal.utils.child_process import ChildProcess
from areal.utils.threads import in_thread


class FakeServer:
    """Answers /health, takes weights, and remembers what it was told."""

    def __init__(self) -> None:
        self.version, self.orders, self.refuses = 0, [], False
        server = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self):
                self._say({"status": "ok", "version": server.version, "model": "m"})

            def do_POST(self):
                order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if server.refuses:
                    return self._say({"error": "no such folder"}, status=400)
                if self.path == "/score":
                    return self._say({"logprobs": [[-1.0] * len(o) for o in order["sequences"]]})
                server.orders.append((self.path, order))
                server.version = order.get("version", server.version)
                self._say({})

            def _say(self, content, status=200):
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.address = "{}:{}".format(*self._http.server_address)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def end(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class Launcher:
    """The nth start answers at `servers[n]`; when there is none left, it fails."""

    def __init__(self, *servers: FakeServer) -> None:
        self._servers = list(servers)
        self.children: list[ChildProcess] = []

    def __call__(self) -> tuple[ChildProcess, str]:
        if not self._servers:
            raise RuntimeError("no room for another")
        self.children.append(ChildProcess(["sleep", "1000"], name="server"))
        return self.children[-1], self._servers.pop(0).address


@pytest.fixture
def fakes():
    servers = [FakeServer() for _ in range(3)]
    yield servers
    for server in servers:
        server.end()


def kill(server: FakeServer, launcher: Launcher) -> None:
    server.end()
    os.kill(launcher.children[-1].pid, signal.SIGKILL)


def test_a_server_is_started_again_then_left_out_and_the_last_is_raised(fakes, caplog):
    first, second, again = fakes
    launchers = [Launcher(first, again), Launcher(second)]
    processes = [ServerProcess(launcher) for launcher in launchers]
    options = {"timeout_s": 10, "setup_timeout_s": 10, "processes": processes, "max_restarts": 2}
    pool = ServerPool(NativeProtocol(), [p.address for p in processes], "token", **options)
    order = {"path": "p", "version": 4, "recompute_kv": True}
    try:
        pool.note_weights(4, order)  # nobody had sent them: both get them now
        assert first.version == second.version == 4
        pool.set_paused(True)
        kill(first, launchers[0])
        assert pool.is_gone(first.address) and not pool.is_gone(second.address)
        answers = pool.on_all(lambda control: control.get("/health"))
        assert {control.address for control in answers} == {again.address, second.address}
        # The weights and the pause, before anybody could send it a request.
        assert again.orders == [("/update_weights", order), ("/pause", {})]
        assert pool.addresses == [again.address, second.address] and pool.restarts.num_all == 1
        assert pool.successor(first.address) == again.address

        kill(again, launchers[0])
        assert pool.successor(again.address) is None
        assert "no room for another" in caplog.text and "the others go on" in caplog.text
        assert pool.addresses == [second.address]
        assert pool.successor(first.address) is None  # who was slow does not stay behind
        assert pool.on_one(1, lambda control: control.address) == second.address

        kill(second, launchers[1])
        with pytest.raises(EngineLostError, match="no room for another"):
            pool.successor(second.address)
        with pytest.raises(EngineLostError, match="by signal SIGKILL"):  # it has no restarts left
            pool.on_all(lambda control: control.get("/health"))
        assert pool.addresses == [second.address]
    finally:
        for process in processes:
            process.close()


class MeetingLauncher(Launcher):
    """Starts again only once another one starts again at the same time."""

    def __init__(self, meeting: Meeting, *servers: FakeServer) -> None:
        super().__init__(*servers)
        self._meeting = meeting

    def __call__(self) -> tuple[ChildProcess, str]:
        if self.children:
            self._meeting.attend()
        return super().__call__()


class Meeting:
    def __init__(self) -> None:
        self.most = self._now = 0
        self._counting, self._pair = threading.Lock(), threading.Barrier(2)
        self.meanwhile = lambda: None

    def attend(self) -> None:
        with self._counting:
            self._now += 1
            self.most = max(self.most, self._now)
        self._pair.wait(900)
        self.meanwhile()
        with self._counting:
            self._now -= 1


def test_servers_lost_together_are_replaced_together_and_the_others_are_not_held_up():
    stays, *lost = [FakeServer() for _ in range(11)]
    replacements = [FakeServer() for _ in lost]
    meeting = Meeting()
    launchers = [MeetingLauncher(meeting, *pair) for pair in zip(lost, replacements, strict=True)]
    processes = [ServerProcess(launcher) for launcher in launchers]
    addresses = [server.address for server in [*lost, stays]]
    options = {"timeout_s": 900, "setup_timeout_s": 900, "processes": processes}
    pool = ServerPool(NativeProtocol(), addresses, "token", max_restarts=1, **options)

    def change_members() -> None:
        pool.drain(stays.address)
        pool.stop_draining(stays.address)

    meeting.meanwhile = lambda: in_thread("change", change_members).result(900)
    order = {"path": "p", "version": 4, "recompute_kv": True}
    try:
        pool.note_weights(4, order)
        for server, launcher in zip(lost, launchers, strict=True):
            kill(server, launcher)
        with ThreadPoolExecutor(20) as threads:  # each loss is noticed twice
            found = list(threads.map(pool.successor, 2 * addresses))
        assert found == 2 * [server.address for server in [*replacements, stays]]
        assert pool.addresses == found[:11] and pool.restarts.num_all == 10
        assert 2 <= meeting.most <= 8
        assert [server.orders for server in replacements] == [[("/update_weights", order)]] * 10
        assert set(pool.states().values()) == {"serving"}
    finally:
        for process in processes:
            process.close()
        for server in [stays, *replacements]:
            server.end()


def test_a_server_that_leaves_while_it_is_replaced_stays_away(fakes):
    stays, lost, replacement = fakes
    launcher = Launcher(lost, replacement)
    starts = [launcher]
    process = ServerProcess(lambda: starts[-1]())
    options = {"timeout_s": 900, "setup_timeout_s": 900, "processes": [process]}
    pool = ServerPool(NativeProtocol(), [lost.address, stays.address], "token", **options)

    def start_late() -> tuple[ChildProcess, str]:
        pool.drain(lost.address)
        pool.leave(lost.address)
        return launcher()

    starts.append(start_late)
    kill(lost, launcher)
    assert pool.successor(lost.address) is None
    assert pool.addresses == [stays.address]
    assert launcher.children[-1].wait(900) is not None  # nobody would end it


def test_servers_that_get_no_weights_have_new_restarts_for_each_batch(fakes):
    launcher = Launcher(*fakes)
    process = ServerProcess(launcher)
    limits = {"setup_timeout_s": 900, "request_timeout_s": 900, "request_retries": 0}
    engine = NativeRemoteEngine(
        [process.address], "token", processes=[process], max_restarts=1, **limits
    )
    batch = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2).bool()}
    try:
        for server in fakes[:2]:
            assert engine.compute_logp(batch).tolist() == [[-1.0, -1.0]]
            kill(server, launcher)
        assert engine.compute_logp(batch).tolist() == [[-1.0, -1.0]]
        assert len(launcher.children) == 3
    finally:
        process.close()


def test_weights_that_cannot_be_sent_again(fakes):
    pool = ServerPool(
        NativeProtocol(), [fakes[0].address], "token", timeout_s=10, setup_timeout_s=10
    )
    pool.note_weights(0, None)
    with pytest.raises(RuntimeError, match="lacks version 1 of the weights.*shm or disk"):
        pool.note_weights(1, None)


def test_a_server_that_joins_and_cannot_load_the_weights_ends_no_update(fakes, tmp_path):
    member, newcomer, _ = fakes
    newcomer.refuses = True
    protocol, limits = NativeProtocol(), {"timeout_s": 900, "setup_timeout_s": 900}
    pool = ServerPool(protocol, [member.address], "token", **limits)
    joining = JoinsWithNextWeights(protocol, pool)
    meta = WeightUpdateMeta(type="delta", path=str(tmp_path / "1"), version=1)
    with ThreadPoolExecutor(1) as threads:
        joined = threads.submit(joining.join, newcomer.address, None, timeout_s=900)
        while newcomer.address not in pool.awaiting:
            assert not joined.done()
            time.sleep(0.01)
        with pytest.raises(ValueError, match="is joining already"):
            joining.join(newcomer.address, None, timeout_s=900)
        joining.begin_update()
        DeltaSender(protocol).send(pool, meta, [("weight", torch.ones(2))])
        joining.admit(1)
        with pytest.raises(RuntimeError, match="has version 0 of the weights, 1 was sent"):
            joined.result(900)
    assert member.version == 1 and pool.addresses == [member.address] and not pool.awaiting
