"""A run that hangs ends by itself, with exit code 1 and a last line that names who waits for whom.

Real runs of the command line, each stuck in another way; run/test_watchdog.py has the watchdog by
itself.
"""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from cli_process import Command, Ended, Program
from tiny_run import overrides, query
from trainer.test_ranks_run import ranks_of

from areal.cli.demo import recipe_path
from areal.utils import stacks

TESTS = Path(__file__).resolve().parents[1]
IN_PROCESS = "actor.weight_update_mode=direct"
ENDLESS = (
    "trial_name=stuck",
    "total_train_steps=100000",
    "watchdog.seconds=8",
    "recover.retries=0",
)
MOVES_FIRST = "watchdog.seconds=20"  # for runs that are stopped on their way, on a busy machine


def start(root: Path, *more: str) -> Command:
    argv = ["train", recipe_path("arithmetic_grpo.yaml"), *overrides(root, *ENDLESS, *more)]
    return Command([str(arg) for arg in argv], cwd=TESTS, logs=root, env={})


def last_line(ended: Ended) -> str:
    assert ended.code == 1, ended.err[-3000:]
    line = ended.err.splitlines()[-1]
    assert line.startswith("areal: error: no progress for "), ended.err[-3000:]
    return line


def run_dir(root: Path) -> Path:
    return root / "arithmetic" / "stuck"


def wait_for_a_step(root: Path, at_least: int = 1) -> None:
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline:
        try:
            if query(run_dir(root), "SELECT count(*) FROM steps")[0][0] >= at_least:
                return
        except sqlite3.OperationalError:  # not there yet
            pass
        time.sleep(0.05)
    raise AssertionError("the run does not move")


def test_a_workflow_that_waits_for_ever(tmp_path):
    line = last_line(start(tmp_path, IN_PROCESS, "workflow=broken_parts.WaitsForEver").wait(900))
    assert "the trainer waits for phase rollout > 0 of 8 groups are ready at version 0" in line
    assert "task-0/0 and " in line and "wait for workflow WaitsForEver since" in line
    text = (run_dir(tmp_path) / "logs" / "stacks.txt").read_text()
    assert "prepare_batch" in text, "the trainer's own stack"
    assert "who waits" not in line and "Traceback" not in line


def test_a_reward_that_never_returns(tmp_path):
    """Within its own limit, so that it is the watchdog's turn; its stack says where it hangs."""
    line = last_line(
        start(
            tmp_path,
            IN_PROCESS,
            "reward_fn=broken_parts.hanging_reward",
            "workflow_kwargs.reward_kwargs={timeout_seconds: 100}",
        ).wait(900)
    )
    assert "wait for workflow RLVRWorkflow > reward hanging_reward since" in line
    assert "in hanging_reward" in (run_dir(tmp_path) / "logs" / "stacks.txt").read_text()


@pytest.mark.slow
def test_a_call_that_holds_the_interpreter(tmp_path):
    """No thread of the run could say so: it is seen, named and ended from outside."""
    seconds = "watchdog.seconds=12"  # in which the filter keeps a core busy
    run = supervised(tmp_path, seconds, "dynamic_filter_fn=broken_parts.endless_filter")
    try:
        err = run.communicate(timeout=900)[1]
    finally:
        run.kill()
    line = last_line(Ended(run.returncode, "", err))
    assert "does not respond" in line and "endless_filter (" in line and "broken_parts.py:" in line
    text = (run_dir(tmp_path) / "logs" / "stacks.txt").read_text()
    assert "in endless_filter" in text and "in prepare_batch" in text


@pytest.mark.slow
def test_a_signal_ends_a_run_whose_interpreter_is_held(tmp_path):
    run = supervised(
        tmp_path, "watchdog.seconds=600", "dynamic_filter_fn=broken_parts.endless_filter"
    )
    try:
        wait_until(lambda: is_held(run_dir(tmp_path)))
        run.terminate()
        err = run.communicate(timeout=900)[1]
    finally:
        run.kill()
    assert run.returncode == 130
    line = err.splitlines()[-1]
    assert "did not react to a signal" in line and "endless_filter (" in line


def supervised(root: Path, *more: str) -> Program:
    """The command itself, with its second process."""
    small = overrides(root, *ENDLESS, IN_PROCESS, *more)
    return Program("train", recipe_path("arithmetic_grpo.yaml"), *small, cwd=TESTS)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 900
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def is_held(folder: Path) -> bool:
    """All groups of the first batch were issued, and since then nothing was written."""
    try:
        last = query(folder, "SELECT max(issued_at) FROM tasks")[0][0]
    except sqlite3.OperationalError:
        return False
    return last is not None and time.time() - last > 5


def test_a_data_set_that_hangs(tmp_path):
    """Before there is a run: nothing has been loaded yet."""
    line = last_line(
        start(tmp_path, IN_PROCESS, "train_dataset.path=broken_parts.hanging_loader").wait(900)
    )
    assert "the trainer waits for data set broken_parts.hanging_loader, train since" in line
    assert "in hanging_loader" in (run_dir(tmp_path) / "logs" / "stacks.txt").read_text()


@pytest.mark.slow
def test_rollout_workers_that_are_stopped(tmp_path):
    command = start(tmp_path, "rollout.workers=2", MOVES_FIRST)
    wait_for_a_step(tmp_path)
    names = (b"rollout_worker/0", b"rollout_worker/1")
    workers = [pid for name in names for pid in processes_of(command.process.pid, name)]
    assert len(workers) == 2
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    line = last_line(command.wait(900))
    assert "for rollout worker " in line
    assert all(f"stopped: process {pid} (" in line for pid in workers)
    assert "rollout_worker/0)" in line and "rollout_worker/1)" in line


def processes_of(root: int, word: bytes) -> list[int]:
    """Descendants of `root` whose command line has `word`."""
    return [
        pid
        for pid in stacks.descendants(root)
        if word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]


@pytest.mark.slow
def test_a_watcher_that_is_killed_is_replaced(tmp_path):
    command = start(tmp_path, IN_PROCESS, "workflow=broken_parts.WaitsForEver", MOVES_FIRST)
    wait_until(lambda: watchers_of(command.process.pid))
    os.kill(watchers_of(command.process.pid)[0], signal.SIGKILL)
    line = last_line(command.wait(900))
    assert "wait for workflow WaitsForEver since" in line


def watchers_of(root: int) -> list[int]:
    return [
        pid
        for pid in stacks.descendants(root)
        if b"areal.run.watcher" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.mark.slow
def test_a_program_that_holds_the_database_locked(tmp_path):
    command = start(tmp_path, IN_PROCESS, MOVES_FIRST)
    wait_for_a_step(tmp_path)
    with closing(sqlite3.connect(run_dir(tmp_path) / "run.db", timeout=300)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        line = last_line(command.wait(900))
    # In whichever phase, and whether the trainer or another thread of it came first.
    path = re.escape(str(run_dir(tmp_path) / "run.db"))
    assert re.search(rf"(the lock of|another thread that writes) {path} since", line), line


@pytest.mark.slow
def test_a_server_that_accepts_and_never_answers(tmp_path):
    command = start(tmp_path, MOVES_FIRST)
    wait_for_a_step(tmp_path)
    (server,) = servers_of(tmp_path)
    os.kill(server, signal.SIGSTOP)
    line = last_line(command.wait(900))
    assert "native server 127.0.0.1:" in line
    text = (run_dir(tmp_path) / "logs" / "stacks.txt").read_text()
    assert f"process {server} (stopped)" in text and "did not answer" in text


@pytest.mark.slow
def test_a_rank_that_stops_in_a_collective_ends_the_run_for_good(tmp_path):
    """The supervisor does not start it again, though there is a recover point to go on from."""
    small = overrides(tmp_path, *ENDLESS, MOVES_FIRST, "recover.retries=3")
    env = {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    run = Program(
        "train", recipe_path("arithmetic_grpo.yaml"), *small, "actor.backend=archon:d2", env=env
    )
    try:
        wait_for_a_step(tmp_path, at_least=4)
        workers = ranks_of(run.pid)
        os.kill(workers[1], signal.SIGSTOP)
        err = run.communicate(timeout=900)[1]
    finally:
        run.kill()
    line = last_line(Ended(run.returncode, "", err))
    assert re.search(r"the trainer waits for phase \w+ > \w+ on 2 ranks of actor since \d+ s", line)
    assert "resuming from" not in err, "nobody has started it again"
    text = (run_dir(tmp_path) / "logs" / "stacks.txt").read_text()
    assert f"process {workers[1]} (stopped)" in text and f"process {workers[0]}:" in text
    (waiting,) = re.findall(rf"== process {workers[0]}:.*?(?=\n== |\Z)", text, flags=re.DOTALL)
    assert "infra/worker.py" in waiting, "where the other one waits"
    deadline = time.monotonic() + 900
    while any(runs(pid) for pid in workers):
        assert time.monotonic() < deadline, "a stopped rank has outlived its run"
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """A dead one may wait for somebody to ask how it ended."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


GARBAGE_SERVER = """
import http.server, sys

class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(b'{"weight_version": "default"}')

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(b'{"text": "<html>as you like it</html>"}')

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Server).serve_forever()
"""


@pytest.mark.slow
def test_a_server_that_answers_garbage_is_named(tmp_path):
    """No wait, but the same question: what is the matter, on the last line."""
    program = tmp_path / "python"  # called as the interpreter of an environment with SGLang
    program.write_text(f"#!{sys.executable}\n{GARBAGE_SERVER}")
    program.chmod(0o755)
    ended = start(tmp_path, "rollout.backend=sglang:d1", f"sglang.python={program}").wait(900)
    assert ended.code == 1, ended.err[-3000:]
    line = ended.err.splitlines()[-1]
    assert line.startswith("areal: error: ") and "groups failed" in line
    assert re.search(r"ServerError: SGLang server 127\.0\.0\.1:\d+", line), line
    trained = query(run_dir(tmp_path), "SELECT count(*) FROM steps")
    assert trained == [(0,)], "garbage is no data"


def servers_of(root: Path) -> list[int]:
    """Process ids of the servers of the run in `root`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in words and str(root).encode() in b" ".join(words):
            found.append(int(process.name))
    return found
