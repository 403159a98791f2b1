"""A run whose inference engine is cut over two processes."""

from __future__ import annotations

import pytest
from tiny_run import grpo_config, query

from areal.run.paths import RunPaths
from areal.trainer.experiment import run_experiment

pytestmark = pytest.mark.usefixtures("forked_children")


def test_a_run_with_two_ranks(tmp_path):
    config = grpo_config(tmp_path, "rollout.backend=native:d1t2", "total_train_steps=2")
    run_experiment(config)
    paths = RunPaths.of(config)
    rows = query(paths.root, "SELECT step, count(*) FROM tasks GROUP BY step")
    assert [step for step, _ in rows] == [0, 1]
