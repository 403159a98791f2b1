"""Runs with two stock servers, two training ranks and rollout workers: kill -9 of each kind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cli_process import Program
from engine.remote.test_vllm_remote import write_model
from infra.test_ray_servers_run import (
    check_ledger,
    last_stats,
    num_steps,
    wait_for_last,
    wait_for_steps,
)
from sglang_server import sglang_python
from tiny_run import overrides, query

from areal.cli.demo import recipe_path
from areal.utils.server_envs import find_interpreter
from areal.utils.stacks import descendants

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]

FLEET = [
    "actor.backend=fsdp:d2",
    "rollout.workers=2",
    "rollout.max_head_offpolicyness=1",
    "total_train_steps=100000",  # it ends when the test has seen what it waits for
    "reward_fn=sample_rewards.slow_digit_share",  # else the waiting run would keep a core busy
    "rollout.setup_timeout=900",  # on a machine that is shared
]


def sglang_options(root: Path) -> list[str]:
    """Of the stand-in: there may be no SGLang on this machine."""
    return ["rollout.backend=sglang:d2", f"sglang.python={sglang_python(root)}"]


def vllm_options(root: Path) -> list[str]:
    try:
        python = find_interpreter("vllm")
    except ValueError as error:
        pytest.skip(str(error))
    cheap = ["vllm.enforce_eager=true", "vllm.cpu_cache_gb=1"]
    return ["rollout.backend=vllm:d2", f"vllm.python={python}", *cheap]


def processes_of(run: int, *words: str) -> list[int]:
    """Those below `run` whose command has these words in a row, in the order of their start."""
    wanted = b"\0".join(word.encode() for word in words) + b"\0"
    below = {pid: Path(f"/proc/{pid}/cmdline") for pid in descendants(run)}
    return sorted(pid for pid, file in below.items() if wanted in file.read_bytes())


@pytest.mark.parametrize(
    ("options", "server"),
    [
        pytest.param(sglang_options, ["--tp-size"], id="sglang"),
        pytest.param(vllm_options, ["-m", "vllm.entrypoints.openai.api_server"], id="vllm"),
    ],
)
def test_a_kill_of_each_kind(tmp_path, options, server):
    write_model(tmp_path / "tiny_model", seed=1)
    more = [*FLEET, *options(tmp_path), "trial_name=fleet"]
    tests = str(Path(__file__).parents[1])
    env = {"PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    run = Program(
        "train", recipe_path("arithmetic_grpo.yaml"), *overrides(tmp_path, *more), env=env
    )
    folder = tmp_path / "arithmetic" / "fleet"
    try:
        wait_for_steps(run, folder, 2)
        servers = processes_of(run.pid, *server)
        assert len(servers) == 2
        os.kill(servers[0], signal.SIGKILL)
        wait_for_last(run, folder, lambda stats: stats["server/restarts"] == 1)
        os.kill(processes_of(run.pid, "rollout_worker/1")[0], signal.SIGKILL)
        wait_for_last(run, folder, lambda stats: stats["rollout/workers_replaced"] == 1)
        last = last_stats(folder)
        assert last["server/servers"] == 2 and last["rollout/staleness_max"] <= 1
        before = num_steps(folder)
        os.kill(processes_of(run.pid, "actor/1")[0], signal.SIGKILL)  # from its recover point
        wait_for_last(run, folder, lambda stats: stats["server/restarts"] == 0)
        wait_for_steps(run, folder, before + 3)
    finally:
        run.terminate()
        _, err = run.communicate(timeout=900)
    assert run.returncode == 130, err
    assert "was ended by signal SIGKILL" in err and "; starting another" in err
    assert query(folder, "SELECT count(*) FROM events WHERE kind = 'resumed'") == [(1,)]
    assert last_stats(folder)["server/servers"] == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in servers)
    check_ledger(folder)
