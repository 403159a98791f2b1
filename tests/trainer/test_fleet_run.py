"""Servers join a living run with its weights and leave it, by a kill -9 and in order: the run goes
on, and its ledger balances."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from cli_process import Program
from infra.test_ray_servers_run import (
    check_ledger,
    last_stats,
    num_steps,
    wait_for_last,
    wait_for_steps,
)
from tiny_run import PATIENCE_S, overrides, query, wait_until

from areal.cli.demo import recipe_path
from areal.utils.stacks import descendants

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]

OPTIONS = [
    "actor.weight_update_mode=disk",
    "rollout.max_head_offpolicyness=1",
    "rollout.setup_timeout=900",
    "total_train_steps=100000",  # it ends when the test has seen what it waits for
    "trial_name=fleet",
    "reward_fn=sample_rewards.slow_digit_share",  # else the waiting run would keep a core busy
]


def serve(*argv) -> tuple[int, str, str]:
    process = Program("serve", *argv)
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def listed(folder: Path) -> list[dict]:
    code, out, err = serve("list", folder, "--json")
    assert code == 0, err
    return json.loads(out)["servers"]


def servers_of(run, folder: Path, count: int) -> None:
    wait_for_last(run, folder, lambda stats: stats["server/servers"] == count)


def has_joined(process: Program) -> str:
    """The address of the server that `areal serve join` has started."""
    wait_until(process, lambda: "\n" in process.out())
    line = process.out().splitlines()[0]
    assert " has joined: 2 servers" in line, line + process.err()
    return line.split()[0]


def test_servers_join_and_leave_a_living_run(tmp_path):
    tests = str(Path(__file__).parents[1])
    env = {"PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    more = overrides(tmp_path, *OPTIONS)
    run = Program("train", recipe_path("arithmetic_grpo.yaml"), *more, env=env)
    folder = tmp_path / "arithmetic" / "fleet"
    try:
        wait_for_steps(run, folder, 2)
        wait_until(run, lambda: (folder / "fleet" / "state.json").is_file())
        assert (folder / "fleet").stat().st_mode & 0o077 == 0

        first = Program("serve", "join", folder)
        address = has_joined(first)
        servers_of(run, folder, 2)
        assert {one["address"]: one["state"] for one in listed(folder)}[address] == "serving"
        (server,) = descendants(first.pid)
        os.kill(server, signal.SIGKILL)
        servers_of(run, folder, 1)
        _, err = first.communicate(timeout=PATIENCE_S)
        assert first.returncode == 1 and "SIGKILL" in err

        second = Program("serve", "join", folder)
        address = has_joined(second)
        servers_of(run, folder, 2)
        second.terminate()
        second.communicate(timeout=PATIENCE_S)
        assert second.returncode == 128 + signal.SIGTERM
        servers_of(run, folder, 1)
        assert query(folder, "SELECT text FROM events WHERE kind = 'server_left'") == [(address,)]

        refused(folder)
        before = num_steps(folder)
        wait_for_steps(run, folder, before + 2)
    finally:
        run.terminate()
        _, err = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 130, err
    assert last_stats(folder)["rollout/staleness_max"] <= 1
    assert not (folder / "fleet" / "state.json").exists()
    check_ledger(folder)


def refused(folder: Path) -> None:
    """The last server, one that nobody knows, and what is no address."""
    (only,) = listed(folder)
    code, _, err = serve("leave", folder, only["address"])
    assert code == 2 and "is the last one" in err
    code, _, err = serve("leave", folder, "http://127.0.0.1:9")
    assert code == 2 and "is not one of" in err
    code, _, err = serve("join", folder, "nowhere")
    assert code == 2 and "expected host:port" in err
