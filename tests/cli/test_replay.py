"""`areal replay`: a step trained again is the same to the bit, or the difference is named."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tiny_run import grpo_config
from trainer.test_offline_runs import config_of

from areal.api.cli_args import dump_yaml
from areal.cli.main import main
from areal.rollout.trajectory import decode, encode
from areal.run.database import RunDatabase, Start
from areal.run.numerics import numeric_environment
from areal.run.paths import RunPaths
from areal.trainer.experiment import load_datasets, run_experiment
from areal.trainer.rl_trainer import PPOTrainer

pytestmark = pytest.mark.usefixtures("forked_children")

SMALL = (
    "actor.weight_update_mode=direct",
    "train_dataset.batch_size=3",
    "gconfig.n_samples=4",
    "total_train_steps=4",
    "recover.freq_steps=1",
    "recover.keep=9",
)
PPO = (
    *SMALL,
    "trial_name=ppo",
    "rollout.max_head_offpolicyness=0",
    "actor.reward_norm=null",
    "critic={ppo_n_minibatches: 2, optimizer: {lr: 1.0e-3}}",
    "ref={}",
    "actor.kl_ctl=0.1",
    "actor.kl_target=0.01",
    "actor.kl_horizon=20",
    "recover.keep=2",
)


class Stop(Exception):
    """What ends a run in the middle."""


def stop_after_two(done: int, total: int, stats: object) -> None:
    if done == 2:
        raise Stop


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def stale_run(root) -> Path:
    """Two steps ahead of training; from step 2 on with another learning rate."""
    options = (*SMALL, "trial_name=stale", "rollout.max_head_offpolicyness=2")
    config = grpo_config(root, *options, "actor.optimizer.lr=1.0e-3")
    with pytest.raises(Stop), PPOTrainer(config, *load_datasets(config)) as trainer:
        trainer.train(on_step=stop_after_two)
    run_experiment(grpo_config(root, *options, "actor.optimizer.lr=5.0e-4"))
    return RunPaths.of(config).root


@pytest.fixture(scope="module")
def ppo_run(root) -> Path:
    config = grpo_config(root, *PPO)
    run_experiment(config)
    return RunPaths.of(config).root


@pytest.fixture
def copy(stale_run, tmp_path) -> Path:
    return Path(shutil.copytree(stale_run, tmp_path / "copy"))


def replay(capsys, run: Path, step: int, *options: str) -> tuple[int, str]:
    """Exit code and output; the run's folder must be the same afterwards, byte for byte."""
    before = digest(run)
    code = main(["replay", str(run), "--step", str(step), *options])
    assert digest(run) == before
    captured = capsys.readouterr()
    return code, captured.out if code < 2 else captured.err


def digest(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def write(run: Path, sql: str, *parameters: object) -> None:
    with closing(sqlite3.connect(run / "run.db")) as connection, connection:
        assert connection.execute(sql, parameters).rowcount > 0


def read(run: Path, sql: str) -> list[tuple]:
    with closing(sqlite3.connect(f"file:{run / 'run.db'}?immutable=1", uri=True)) as connection:
        return connection.execute(sql).fetchall()


@pytest.mark.parametrize(("step", "lr"), [(1, 8e-4), (3, 2e-4)])
def test_a_step_is_trained_again_with_the_config_of_its_time(stale_run, capsys, step, lr):
    """0.8 and 0.4 of the rates of their time: the schedule falls to 0.2 in four steps."""
    threads = torch.get_num_threads()
    code, out = replay(capsys, stale_run, step, "--json")
    report = json.loads(out)
    assert code == 0 and report["equal"] and report["world_changed"] == {}
    numbers = {row["name"]: row["replayed"] for row in report["statistics"]}
    assert numbers["actor/lr"] == pytest.approx(lr) and numbers["actor/grad_norm"] > 0
    assert numbers["rollout/staleness_max"] >= 1
    state = {row["name"] for row in report["state"]}
    assert any(name.startswith("actor: weights [") for name in state)
    assert any(name.startswith("actor: moments [") for name in state)
    assert torch.get_num_threads() == threads


def test_critic_reference_model_and_kl_controller_are_part_of_it(ppo_run, capsys):
    code, out = replay(capsys, ppo_run, 3)
    assert code == 0, out
    assert {"critic/loss", "actor/kl_ctl", "actor/kl_ref/avg"} <= set(re.findall(r"\S+", out))
    assert "critic: moments [" in out and "kl_control/" in out and " NO" not in out
    assert out.splitlines()[-1].startswith("equal bit for bit: step 3")


@pytest.mark.slow
def test_models_on_two_ranks_are_replayed_on_two(root, capsys):
    options = ("actor.backend=archon:d2", "actor.weight_update_mode=shm", "trial_name=ranks")
    config = grpo_config(root, *SMALL, *options)
    run_experiment(config)
    code, out = replay(capsys, RunPaths.of(config).root, 2)
    assert code == 0 and "actor: weights [" in out, out


def another_reward(trajectory: dict[str, torch.Tensor]) -> None:
    trajectory["rewards"][0] += 1


def another_token(trajectory: dict[str, torch.Tensor]) -> None:
    trajectory["input_ids"][0, 1] ^= 1


# A reward makes the advantages; a token of the prompt changes what the model says after it.
CHANGES = [(another_reward, "actor/advantages/avg"), (another_token, "actor/[cei][a-z_/]+")]


@pytest.mark.parametrize(("change", "first"), CHANGES)
def test_a_trajectory_that_was_changed_is_found(copy, capsys, change, first):
    (task_id, data), *_ = read(
        copy, "SELECT task_id, data FROM tasks JOIN trajectories USING (task_id) WHERE step = 2"
    )
    trajectory = decode(data)
    change(trajectory)
    write(copy, "UPDATE trajectories SET data = ? WHERE task_id = ?", encode(trajectory), task_id)
    code, out = replay(capsys, copy, 2)
    assert code == 1
    assert re.search(rf"^differs: step 2,.* the first is {first}: recorded", out, re.MULTILINE)
    assert re.search(r"^actor: weights\.\S+ .* NO$", out, re.MULTILINE)


def test_without_a_point_after_the_step_statistics_alone_are_compared(copy, capsys):
    shutil.rmtree(copy / "recover" / "step_2")
    code, out = replay(capsys, copy, 2)
    assert code == 0 and "actor/loss" in out and "actor: weights" not in out
    assert "no weights, because there is no recover point after it" in out.splitlines()[-1]


def test_another_world_is_told(copy, capsys):
    (world,) = read(copy, "SELECT world FROM starts WHERE step = 0")[0]
    older = json.loads(world) | {"torch": "1.0"}
    write(copy, "UPDATE starts SET world = ? WHERE step = 0", json.dumps(older))
    code, out = replay(capsys, copy, 1)
    assert code == 0 and f"changed since: torch was 1.0, is {torch.__version__}" in out


def test_a_damaged_point_is_named(copy, capsys):
    shard = copy / "recover" / "step_1" / "actor" / "rank0.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["replay", str(copy), "--step", "2"]) == 1
    assert re.search(r"step_1/actor is damaged: rank0\.bin", capsys.readouterr().err)


def test_steps_that_cannot_be_replayed_say_which_can(copy, ppo_run, capsys):
    code, err = replay(capsys, ppo_run, 1)
    assert code == 2 and "no recover point" in err and "step_0" in err
    assert "steps that can be: 3." in err
    assert "recover.freq_steps=1" in err and "recover.keep" in err
    code, err = replay(capsys, ppo_run, 0)
    assert code == 2 and "before the first step" in err
    code, err = replay(capsys, ppo_run, 4)
    assert code == 2 and "its steps are 0 to 3" in err
    code, err = replay(capsys, ppo_run, -1)
    assert code == 2 and "has not trained this step" in err
    tasks = "(SELECT max(task_id) FROM tasks WHERE step = 2)"
    write(copy, f"DELETE FROM trajectories WHERE task_id = {tasks}")
    code, err = replay(capsys, copy, 2)
    assert code == 2 and "trajectories of step 2 were deleted" in err


def test_no_run_and_a_run_of_another_kind_are_mistakes(tmp_path, capsys):
    assert main(["replay", str(tmp_path / "absent"), "--step", "1"]) == 2
    assert "no run database" in capsys.readouterr().err
    with RunDatabase(tmp_path / "run.db") as database:
        database.record_step(0, {"loss": 1.0})
    code, err = replay(capsys, tmp_path, 0)
    assert code == 2 and "does not say with which config" in err
    with RunDatabase(tmp_path / "run.db") as database:
        text = dump_yaml(config_of("sft", tmp_path, "sft"))
        database.record_start(Start(0, text, 20, numeric_environment()))
        database.record_step(0, {"loss": 1.0})
    code, err = replay(capsys, tmp_path, 0)
    assert code == 2 and "a run of trainer: sft" in err
