"""Small real runs of the shipped recipes, for tests: a few prompts, a few steps, one core."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from areal.cli.demo import make_model, recipe_path
from areal.cli.train import load_config

# What a test waits for a run that goes on as it should: on a busy machine every process takes
# minutes to start.
PATIENCE_S = 900.0

SMALL = (
    "train_dataset.batch_size=8",
    "native.num_pages=512",  # to clear the memory of 64 whole contexts takes as long as a step
    "gconfig.n_samples=4",
    "gconfig.max_new_tokens=6",
    "total_train_steps=6",
    "valid_dataset.dataset_kwargs={num_rows: 16}",
    "evaluator.freq_steps=null",
    "evaluator.eval_before_train=false",
    "recover.freq_steps=2",
    "reward_fn=sample_rewards.digit_share_reward_fn",
)
FEW_ROWS = "train_dataset.dataset_kwargs={num_rows: 512}"  # to draw all takes as long as a step


def overrides(root: Path, *more: str) -> list[str]:
    """The GRPO recipe made small, in `root`, on a model with random weights."""
    model = root / "tiny_model"
    if not model.is_dir():
        make_model(model)
    # Another data set may have no such key.
    rows = [] if any(one.startswith("train_dataset.path=") for one in more) else [FEW_ROWS]
    return [f"cluster.fileroot={root}", f"actor.path={model}", *SMALL, *rows, *more]


def grpo_config(root: Path, *more: str):
    return load_config([recipe_path("arithmetic_grpo.yaml"), *overrides(root, *more)])


def areal(*argv: str | Path, **popen) -> subprocess.Popen:
    """The command line in a process of its own. Nobody reads the pipes while a test waits: they
    have room for thousands of steps, or the run would stand still."""
    return subprocess.Popen(
        [sys.executable, "-m", "areal.cli.main", *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pipesize=1 << 20,
        text=True,
        env={**os.environ, **popen.pop("env", {})},
        **popen,
    )


def wait_until(run: subprocess.Popen, condition: Callable[[], bool]) -> None:
    """Until the run has come so far; fails with what it wrote when it ends before, or does not."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if run.poll() is not None or time.monotonic() > deadline:
            run.terminate()
            pytest.fail(run.communicate(timeout=PATIENCE_S)[1])
        time.sleep(0.1)


def query(run_dir: Path, sql: str) -> list[tuple]:
    """Read the run's database as an operator would, also while the run is alive."""
    with closing(sqlite3.connect(f"file:{run_dir / 'run.db'}?mode=ro", uri=True)) as connection:
        return connection.execute(sql).fetchall()
