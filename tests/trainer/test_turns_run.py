"""Whole runs in which actor and server take turns on one device: the same numbers, never both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import grpo_config, query
from trainer.test_kill_and_resume import finish, kill_during, start

from areal.cli.demo import make_model
from areal.rollout.ledger import Ledger
from areal.run.database import RunDatabase
from areal.run.paths import RunPaths
from areal.trainer.experiment import run_experiment
from areal.utils.perf_tracer import read_trace

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]

IN_TURNS = "rollout.scheduling_strategy={type: colocation, target: actor}"
ON_POLICY = (
    "rollout.max_head_offpolicyness=0",
    "total_train_steps=3",
    "evaluator.freq_steps=2",
    "evaluator.eval_before_train=true",
    "actor.kl_ctl=0.1",
    "ref={}",
    "perf_tracer.enabled=true",
)
PASSING = ("timeperf/", "server/", "rollout/", "eval-rollout/")
STEP = ["forward", "advantages", "train", "update_weights"]
TRAINING = {*STEP, "save", "recover"}
# What is saved after an evaluation wants the models back.
EVALUATED = ["to_generation", "evaluate", "to_training", "save", "recover"]
FIRST_STEPS = [
    *("to_training", "to_generation", "rollout", "to_training", *STEP, "save"),
    *("to_generation", "rollout", "to_training", *STEP, *EVALUATED),
]
# The third batch may have been generated beside the evaluation: then nothing has to move for it.
WAYS = [
    [*FIRST_STEPS, *way, *STEP, *EVALUATED]
    for way in (["to_generation", "rollout", "to_training"], ["rollout"])
]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("turns")
    make_model(root / "tiny_model")
    return root


def run(root: Path, trial: str, *more: str) -> RunPaths:
    config = grpo_config(root, f"trial_name={trial}", *ON_POLICY, *more)
    run_experiment(config)
    return RunPaths.of(config)


def numbers(paths: RunPaths) -> list[dict[str, float]]:
    """What each step computed: all but times, what was under way at that moment, and the means of
    episodes, which are added up in the order they end in."""
    rows = query(paths.root, "SELECT stats FROM steps ORDER BY step")
    return [
        {
            key: value
            for key, value in json.loads(row).items()
            if not key.startswith(PASSING) and "per_second" not in key
        }
        for (row,) in rows
    ]


def test_turns_change_no_number_and_never_overlap(root):
    alone, in_turns = run(root, "alone"), run(root, "turns", IN_TURNS)
    assert len(numbers(in_turns)) == 4  # the evaluation before, and three steps
    assert numbers(in_turns) == numbers(alone)
    models = [paths.model / "model.safetensors" for paths in (alone, in_turns)]
    assert models[0].read_bytes() == models[1].read_bytes()
    check_order(in_turns)


def check_order(paths: RunPaths) -> None:
    spans = sorted(
        (event for event in read_trace(paths.trace("controller")) if event["ph"] == "X"),
        key=lambda event: event["ts"],
    )
    phases = [span for span in spans if span["name"] in WAYS[0]]
    assert [span["name"] for span in phases] in WAYS
    generating = [span for span in spans if span["name"] == "generate"]
    computing = [(span["ts"], span["ts"] + span["dur"]) for span in generating]
    assert len(computing) > 3
    for span in phases:
        if span["name"] in TRAINING:
            start, end = span["ts"], span["ts"] + span["dur"]
            assert not [busy for busy in computing if busy[0] < end and busy[1] > start], span


def test_killed_in_turns_it_resumes_and_the_ledger_balances(root):
    """More prompts are in flight than a step takes: they wait through the turns of training."""
    run_dir = root / "arithmetic" / "killed"
    process = start(root, "killed", 2, IN_TURNS, "total_train_steps=10")
    kill_during(process, run_dir, 5, 0.1)
    finish(start(root, "killed", 2, IN_TURNS, "total_train_steps=10"))
    with RunDatabase(run_dir / "run.db") as database:
        balance = Ledger(database).balance()
    assert balance["trained"] == balance["total"] == 80
    assert query(run_dir, "SELECT count(*) FROM steps")[0][0] == 10
    assert query(run_dir, "SELECT count(*) FROM events WHERE kind = 'resumed'") == [(1,)]
