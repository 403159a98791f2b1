"""Real runs whose rewards say the unsayable, reach for the run, or are killed time and again."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from cli_process import Program
from tiny_run import areal, overrides, query

from areal.cli.demo import recipe_path
from areal.utils.stacks import descendants

ASCII_TERMINAL = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def train(root, *more, env=None, program=Program):
    """With the inference engine in the run's own process."""
    return program(
        "train",
        recipe_path("arithmetic_grpo.yaml"),
        *overrides(root, "recover.retries=0", "actor.weight_update_mode=direct", *more),
        cwd=root,
        env={
            "PYTHONPATH": os.pathsep.join(str(Path(__file__).parents[i]) for i in (1, 2)),
            **(env or {}),
        },
    )


def run_dir(root):
    return next(path.parent for path in root.rglob("run.db"))


@pytest.mark.slow
def test_half_a_character_in_an_error_is_a_failure_like_others(tmp_path):
    process = train(
        tmp_path,
        "reward_fn=sample_faults.sometimes_half_a_character",
        "workflow_kwargs.reward_kwargs={max_retries: 0}",
        "rollout.max_failure_ratio=0.9",
        "total_train_steps=2",
        env={**ASCII_TERMINAL, "PYTHONIOENCODING": "ascii"},
        program=areal,  # these variables are read when an interpreter starts
    )
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    reasons = query(run_dir(tmp_path), "SELECT why FROM tasks WHERE state = 'failed'")
    assert any("half a \\ud83d smile" in why for (why,) in reasons)


@pytest.mark.slow
def test_and_the_cause_on_the_last_line_of_a_run_that_it_ends(tmp_path):
    process = train(
        tmp_path,
        "reward_fn=sample_faults.half_a_character",
        "workflow_kwargs.reward_kwargs={max_retries: 0}",
        env={**ASCII_TERMINAL, "PYTHONIOENCODING": "ascii"},
        program=areal,
    )
    out, err = process.communicate(timeout=900)
    assert process.returncode == 1
    last = err.strip().splitlines()[-1]
    assert last.startswith("areal: error: ") and "ValueError: half a \\ud83d smile" in last


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock is of Linux")
def test_a_reward_cannot_read_or_lock_the_database_of_its_run(tmp_path):
    """It raises when it can, which fails the run; else it does its work."""
    process = train(
        tmp_path,
        "reward_fn=sample_faults.reach_for_the_run",
        "workflow_kwargs.reward_kwargs={limits: {env: [RUNS_OF_TEST]}, max_retries: 0}",
        env={"RUNS_OF_TEST": str(tmp_path)},
    )
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds workers through /proc")
def test_a_run_survives_kills_of_its_reward_processes(tmp_path):
    """First while they load, then also while they work."""
    process = train(
        tmp_path,
        "reward_fn=sample_slow_import.slow_digit_share",
        "workflow_kwargs.reward_kwargs={max_workers: 1}",
    )
    kills, deadline = 0, time.monotonic() + 300
    while process.poll() is None and kills < 9:
        assert time.monotonic() < deadline
        time.sleep(0.7 if kills < 6 else 2.5)
        for pid in descendants(process.pid):
            try:
                if b"sandbox/worker.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    kills += 1
            except OSError:
                continue
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    assert kills == 9
    states = dict(query(run_dir(tmp_path), "SELECT state, count(*) FROM tasks GROUP BY state"))
    assert "failed" not in states and states["trained"] == 48
