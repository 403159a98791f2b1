"""kill -9 at any moment: nothing is lost, nothing is trained twice, and the run goes on.

With staleness 0 on a CPU the resumed run ends with the very bits of one that was never killed.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from pathlib import Path

import pytest
from cli_process import Program
from tiny_run import overrides, query

from areal.cli.demo import recipe_path
from areal.rollout.ledger import Ledger
from areal.run.database import RunDatabase

pytestmark = pytest.mark.usefixtures("forked_children")

STEPS, BATCH = 24, 8
TESTS = Path(__file__).resolve().parents[1]


def start(root: Path, trial: str, eta: int, *more: str) -> Program:
    return Program(
        "train",
        recipe_path("arithmetic_grpo.yaml"),
        *overrides(root, f"trial_name={trial}", f"total_train_steps={STEPS}"),
        f"rollout.max_head_offpolicyness={eta}",
        "recover.freq_steps=2",  # the second point waits for the first: five steps in, there is one
        *more,
        cwd=TESTS,  # where the reward function is imported from
    )


def finish(process: Program) -> None:
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err[-2000:]


def kill_during(process: Program, run_dir: Path, after_steps: int, delay_s: float) -> None:
    """kill -9 once `after_steps` steps are recorded and `delay_s` more has passed."""
    deadline = time.monotonic() + 300
    while process.poll() is None and steps_done(run_dir) < after_steps:
        assert time.monotonic() < deadline, "the run does not move"
        time.sleep(0.01)
    time.sleep(delay_s)
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()


def steps_done(run_dir: Path) -> int:
    if not (run_dir / "run.db").exists():
        return 0
    try:
        return query(run_dir, "SELECT count(*) FROM steps")[0][0]
    except sqlite3.OperationalError:  # the tables are just being made
        return 0


def children_of_run(root: Path) -> list[str]:
    """Living processes that mention `root` in their command line, or have a file open there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            held = [os.path.realpath(file) for file in (process / "fd").iterdir()]
        except OSError:
            continue
        if any(str(root) in text for text in (line, *held)) and int(process.name) != os.getpid():
            found.append(f"{process.name}: {line} {held}")
    return found


@pytest.mark.parametrize(
    ("eta", "kills", "mode"),
    [
        pytest.param(0, (5,), "direct", id="without a server"),
        pytest.param(0, (1, 5, 8), "shm", id="on-policy", marks=pytest.mark.slow),
        pytest.param(2, (5, 8), "shm", id="staleness-2", marks=pytest.mark.slow),
    ],
)
def test_killed_run_resumes(eta, kills, mode, tmp_path):
    """`kills`: after how many steps."""
    transport = f"actor.weight_update_mode={mode}"
    draw = random.Random(7 + eta)
    run_dir = tmp_path / "arithmetic" / "killed"
    for after_steps in kills:
        process = start(tmp_path, "killed", eta, transport)
        kill_during(process, run_dir, after_steps, draw.uniform(0, 0.3))
        deadline = time.monotonic() + 300
        while children_of_run(tmp_path):
            assert time.monotonic() < deadline, children_of_run(tmp_path)
            time.sleep(0.05)
    finish(start(tmp_path, "killed", eta, transport))

    with RunDatabase(run_dir / "run.db") as database:
        balance = Ledger(database).balance()
    assert balance["trained"] == balance["total"] == STEPS * BATCH
    assert query(run_dir, "SELECT count(*) FROM steps")[0][0] == STEPS
    resumed = query(run_dir, "SELECT text FROM events WHERE kind = 'resumed' ORDER BY id")
    # A kill after one step may come before the first recover point.
    assert len(resumed) >= len([after for after in kills if after >= 5])
    if eta == 0:
        finish(start(tmp_path, "whole", eta, transport))
        whole = tmp_path / "arithmetic" / "whole" / "model" / "model.safetensors"
        assert (run_dir / "model" / "model.safetensors").read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_ctrl_c_ends_cleanly_and_resumes(tmp_path):
    run_dir = tmp_path / "arithmetic" / "stopped"
    process = start(tmp_path, "stopped", 2)
    while steps_done(run_dir) < 4:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not children_of_run(tmp_path)
    finish(start(tmp_path, "stopped", 2))
