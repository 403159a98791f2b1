"""Whole runs whose models live on several ranks: the same losses, and a clear end when one dies."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import safetensors.numpy
from cli_process import Program
from tiny_run import grpo_config, overrides, query, wait_until
from trainer.test_offline_runs import config_of, rows_of

from areal.api.scheduler_api import SchedulingStrategy
from areal.cli.demo import make_model, recipe_path
from areal.run.paths import RunPaths
from areal.run.recover import newest_step
from areal.trainer.experiment import TRAINERS, run_experiment
from areal.utils.stacks import descendants

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]

IN_PROCESS = "actor.weight_update_mode=direct"
ON_POLICY = ("rollout.max_head_offpolicyness=0", "total_train_steps=3", "actor.ppo_n_minibatches=2")
PACKED = "actor.enable_tree_training=false"  # stages of a pipeline take no trees


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    make_model(root / "tiny_model")
    return root


def losses(root: Path, trial: str, *more: str, ratio: bool = False) -> list[dict[str, float]]:
    config = grpo_config(root, f"trial_name={trial}", *ON_POLICY, PACKED, *more)
    run_experiment(config)
    model = RunPaths.of(config).model
    assert (model / "model.safetensors").is_file() and (model / "tokenizer.json").is_file()
    root = RunPaths.of(config).root
    stored = query(root, "SELECT data FROM samples")
    shown = [safetensors.numpy.load(data) for (data,) in stored]
    assert any("entropy" in sample for sample in shown), "training told no entropy"
    rows = query(root, "SELECT stats FROM steps ORDER BY step")
    keys = ("loss", "grad_norm", "entropy/avg", "advantages/max", "n_tokens", "lr")
    keys += ("tree_token_ratio",) if ratio else ()
    return [{key: json.loads(row)[f"actor/{key}"] for key in keys} for (row,) in rows]


@pytest.fixture(scope="module")
def alone(root) -> list[dict[str, float]]:
    """One rank and the inference engine, in the controller."""
    return losses(root, "alone", IN_PROCESS)


def step_of(stats: dict[str, float]) -> dict[str, float]:
    """What the optimizer did."""
    return {key: stats[key] for key in ("loss", "grad_norm", "advantages/max", "lr")}


def check_same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected) == 3
    for step, other in zip(found, expected, strict=True):
        assert step == pytest.approx(other, rel=1e-4, abs=1e-5)


def test_two_stages_train_as_one(root, alone):
    """The embedding of this model is its head too, so the first stage and the last share it."""
    stages = ("actor.backend=archon:p2", "actor.archon.pp_schedule=1F1B")
    check_same(losses(root, "stages", *stages), alone)


@pytest.mark.parametrize(
    "layout",
    [
        ("archon:d2", "actor.weight_update_mode=xccl"),
        ("archon:p2", "actor.archon.pp_schedule=1F1B"),
    ],
    ids=["d2", "p2"],
)
def test_ranks_train_as_one_by_a_loss_by_import_path(root, alone, layout):
    """The formula of the shipped loss as a user's function, on data-parallel ranks that broadcast
    their weights, and on stages of a pipeline. It also computes rows without an advantage, over
    which other statistics are taken."""
    own = ("actor.policy_loss=sample_losses.clipped", "actor.eps_clip_higher=null")
    backend, *more = layout
    found = losses(root, f"own-{backend[-2:]}", f"actor.backend={backend}", *more, *own)
    check_same(*([step_of(step) for step in steps] for steps in (found, alone)))


def test_trees_on_two_ranks_train_as_one(root, alone):
    """Samples of one prompt are on one rank, which computes the prompt once."""
    trees = ("actor.enable_tree_training=true", "actor.mb_spec.n_mbs=1")
    found = [
        losses(root, f"trees{backend[-2:]}", f"actor.backend={backend}", *more, *trees, ratio=True)
        for backend, *more in (("archon:d1", IN_PROCESS), ("archon:d2",))
    ]
    for step, other in zip(*found, strict=True):
        ratio, ratio_alone = step.pop("tree_token_ratio"), other.pop("tree_token_ratio")
        assert ratio < 0.9 and ratio == pytest.approx(ratio_alone, abs=0.05)
    for steps in found:
        check_same(steps, alone)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_rows_that_do_not_divide(root, kind):
    """Five rows a step on two ranks; a reference model shares the actor's processes."""
    found = [offline_stats(root, kind, backend) for backend in ("archon:d1", "archon:d2")]
    assert len(found[0]) == 3
    if kind == "dpo":  # before the first update the policy is its reference: nothing but ties
        assert [steps[0]["reward_accuracy"] for steps in found] == [0.5, 0.5]
    for step, other in zip(*found, strict=True):
        assert step == pytest.approx(other, rel=1e-4, abs=1e-5)


def offline_stats(root: Path, kind: str, backend: str) -> list[dict[str, float]]:
    config = config_of(kind, root, trial=backend.replace(":", "-"))
    config.actor.backend = backend
    config.total_train_steps = 3
    if kind == "dpo":
        config.ref.backend = backend
        config.ref.scheduling_strategy = SchedulingStrategy("colocation", "actor")
    with TRAINERS[kind](config, rows_of(kind, 20), rows_of(kind, 4)) as trainer:
        trainer.train()
    steps = query(RunPaths.of(config).root, "SELECT stats FROM steps WHERE step >= 0")
    return [
        {key: value for key, value in json.loads(row).items() if not is_timing(key)}
        for (row,) in steps
    ]


def is_timing(key: str) -> bool:
    return key.startswith("timeperf/") or "per_second" in key


def test_a_killed_rank_is_named_and_the_run_goes_on_from_its_point_by_itself(root):
    more = [*ON_POLICY, "trial_name=killed", "total_train_steps=8", "actor.backend=archon:d2"]
    argv = ["train", recipe_path("arithmetic_grpo.yaml"), *overrides(root, *more)]
    env = {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        )
    }
    run = Program(*argv, env=env)
    run_dir = root / "arithmetic" / "killed"
    # Not for a number of steps: a point is written while the steps after it go on.
    wait_until(run, lambda: newest_step(run_dir / "recover") is not None)
    workers = ranks_of(run.pid)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    _, err = run.communicate(timeout=900)
    assert run.returncode == 0, err
    assert "actor/1: actor/1" in err and "was ended by signal SIGKILL" in err
    assert "resuming from the recover point of step" in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    assert query(run_dir, "SELECT count(*) FROM events WHERE kind = 'resumed'") == [(1,)]
    assert query(run_dir, "SELECT step FROM steps ORDER BY step") == [(step,) for step in range(8)]


def ranks_of(run: int) -> list[int]:
    """The training ranks below the process `run`, in the order of their start."""
    module = b"areal.infra.worker"
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(run)}
    return sorted(pid for pid, command in commands.items() if module in command.split(b"\0"))
