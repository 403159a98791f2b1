"""A whole run with two inference servers, one of which is killed: it is replaced, or left out, and
the run goes to its end with every prompt accounted for."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from pathlib import Path

import pytest
from cli_process import Program
from tiny_run import overrides, query, wait_until

from areal.cli.demo import recipe_path
from areal.rollout.ledger import Ledger
from areal.run.database import RunDatabase
from areal.utils.stacks import descendants

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]

LEFT_OUT = "a server is lost, the others go on"


def servers_of(run: int) -> list[int]:
    """The native servers below the process `run`, in the order of their start."""
    wanted = b"\0-m\0areal.cli.main\0serve\0"
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(run)}
    return sorted(pid for pid, command in commands.items() if wanted in command)


def num_steps(folder: Path) -> int:
    try:
        return len(query(folder, "SELECT step FROM steps"))
    except sqlite3.OperationalError:  # the file or its tables are still to be made
        return 0


@pytest.mark.parametrize(
    ("backend", "mode", "says"),
    [
        ("archon:d1", "shm", "starting another"),
        ("archon:d2", "shm", "starting another"),  # ranks send the weights
        ("archon:d1", "delta", LEFT_OUT),  # nothing a new server could load
    ],
)
def test_a_run_outlives_one_of_its_servers(tmp_path, backend, mode, says):
    more = [
        "rollout.backend=native:d2",
        f"actor.backend={backend}",
        f"actor.weight_update_mode={mode}",
        "trial_name=two",
        "total_train_steps=8",
        "rollout.max_head_offpolicyness=1",
    ]
    tests = str(Path(__file__).parents[1])
    env = {"PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    run = Program(
        "train", recipe_path("arithmetic_grpo.yaml"), *overrides(tmp_path, *more), env=env
    )
    folder = tmp_path / "arithmetic" / "two"
    wait_until(run, lambda: num_steps(folder) >= 2)
    servers = servers_of(run.pid)
    assert len(servers) == 2
    os.kill(servers[0], signal.SIGKILL)
    _, err = run.communicate(timeout=900)
    assert run.returncode == 0, err
    assert says in err
    logs = {file.name for file in (folder / "logs").glob("server*.log")}
    assert logs == {"server0.log", "server1.log"}
    stats = [json.loads(row) for (row,) in query(folder, "SELECT stats FROM steps ORDER BY step")]
    assert len(stats) == 8 and stats[-1]["server/version"] == 8
    assert stats[-1]["server/servers"] == (1 if says == LEFT_OUT else 2)
    assert stats[-1]["server/restarts"] == (0 if says == LEFT_OUT else 1)
    with RunDatabase(folder / "run.db") as database:
        balance = Ledger(database).balance()
    assert balance["trained"] == balance["total"] == 8 * 8
