"""A run that hangs ends by itself, with exit code 1 and a last line that names who waits for whom.

Real runs of the command line, each stuck in another way.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from cli_process import Command, Ended
from tiny_run import overrides, query

from areal.cli.demo import recipe_path

TESTS = Path(__file__).resolve().parents[1]
IN_PROCESS = "actor.weight_update_mode=direct"
ENDLESS = (
    "trial_name=stuck",
    "total_train_steps=100000",
    "watchdog.seconds=4",
    "recover.retries=0",
)


def start(root: Path, *more: str) -> Command:
    small = overrides(root, *ENDLESS)
    argv = ["train", recipe_path("arithmetic_grpo.yaml"), *small, *more]
    return Command([str(arg) for arg in argv], cwd=TESTS, logs=root, env={})


def last_line(ended: Ended) -> str:
    assert ended.code == 1, ended.err[-3000:]
    line = ended.err.splitlines()[-1]
    assert line.startswith("areal: error: nothing has moved for "), ended.err[-3000:]
    return line


def run_dir(root: Path) -> Path:
    return root / "arithmetic" / "stuck"


def wait_for_a_step(root: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        try:
            if query(run_dir(root), "SELECT count(*) FROM steps")[0][0] > 0:
                return
        except sqlite3.OperationalError:  # not there yet
            pass
        time.sleep(0.05)
    raise AssertionError("the run does not move")


def test_a_workflow_that_waits_for_ever(tmp_path):
    line = last_line(start(tmp_path, IN_PROCESS, "workflow=broken_parts.WaitsForEver").wait(120))
    assert "the trainer waits for phase rollout > 0 of 8 groups wait at version 0" in line
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
        ).wait(120)
    )
    assert "wait for workflow RLVRWorkflow > reward hanging_reward since" in line
    assert "in hanging_reward" in (run_dir(tmp_path) / "logs" / "stacks.txt").read_text()


def test_a_program_that_holds_the_database_locked(tmp_path):
    command = start(tmp_path, IN_PROCESS)
    wait_for_a_step(tmp_path)
    with closing(sqlite3.connect(run_dir(tmp_path) / "run.db", timeout=30)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        line = last_line(command.wait(120))
    assert f"for the lock of {run_dir(tmp_path) / 'run.db'} since" in line


@pytest.mark.slow
def test_a_server_that_accepts_and_never_answers(tmp_path):
    command = start(tmp_path)
    wait_for_a_step(tmp_path)
    (server,) = servers_of(tmp_path)
    os.kill(server, signal.SIGSTOP)
    line = last_line(command.wait(120))
    assert "native server 127.0.0.1:" in line
    text = (run_dir(tmp_path) / "logs" / "stacks.txt").read_text()
    assert f"process {server} (stopped)" in text and "did not answer" in text


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
