"""A run goes on only with the ledger its recover point belongs to; else it names what disagrees.

A ledger that knows less than the weights would hand out prompts again that they were trained on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tiny_run import grpo_config, query
from trainer.test_recovery import open_trainer, sft

from areal.api.cli_args import PPOConfig
from areal.cli.demo import make_model
from areal.cli.main import main
from areal.rollout.ledger import Ledger
from areal.run.database import RunDatabase, RunDatabaseError, open_read_only
from areal.run.paths import RunPaths
from areal.run.recover import RecoverError
from areal.trainer.experiment import load_datasets
from areal.trainer.rl_trainer import PPOTrainer

BATCH, STEPS = 3, 5
LEDGER_FILES = ("run.db", "run.db-wal", "run.db-shm")
OnStep = Callable[[int], None]


class Killed(Exception):
    """What ends a process in the middle."""


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Two trials of one config, ended after step 4 of 5, with points after steps 2 and 4."""
    root = tmp_path_factory.mktemp("runs")
    for trial in ("first", "second"):
        config = config_of(root, f"trial_name={trial}")
        copies = root / f"copies-{trial}"
        with pytest.raises(Killed):
            train(config, partial(keep_and_end, RunPaths.of(config).database, copies))
    return root


def keep_and_end(database: Path, copies: Path, done: int) -> None:
    keep_ledger(database, copies / f"after_{done}.db")
    if done == 4:
        raise Killed


@pytest.fixture
def paths(root, tmp_path) -> RunPaths:
    """A copy of the first trial, under the same name in another place."""
    make_model(tmp_path / "tiny_model")
    shutil.copytree(root / "arithmetic" / "first", tmp_path / "arithmetic" / "first")
    return RunPaths(tmp_path / "arithmetic" / "first")


def config_of(root: Path, *more: str) -> PPOConfig:
    return grpo_config(
        root,
        "actor.weight_update_mode=direct",
        f"train_dataset.batch_size={BATCH}",
        "gconfig.n_samples=2",
        f"total_train_steps={STEPS}",
        "recover.freq_steps=2",
        f"actor.path={root}/tiny_model",
        *more,
    )


def train(config: PPOConfig, on_step: OnStep = lambda done: None) -> None:
    with PPOTrainer(config, *load_datasets(config)) as trainer:
        trainer.train(on_step=lambda done, total, stats: on_step(done))


def go_on(root: Path, paths: RunPaths, *more: str) -> None:
    """The same command again; models of other copies are called alike."""
    config = config_of(root, "trial_name=first", *more)
    config.cluster.fileroot = str(paths.root.parents[1])
    train(config)


def keep_ledger(database: Path, target: Path) -> None:
    """A copy as a backup program would make it."""
    target.parent.mkdir(exist_ok=True)
    with open_read_only(database) as connection:
        connection.execute("VACUUM INTO ?", (str(target),))


def replace_ledger(paths: RunPaths, other: Path) -> None:
    for name in LEDGER_FILES:
        (paths.root / name).unlink(missing_ok=True)
    shutil.copy(other, paths.database)


def is_whole(paths: RunPaths) -> None:
    """All steps were trained, each on its own prompts."""
    with RunDatabase(paths.database) as database:
        balance = Ledger(database).balance()
    assert balance["trained"] == STEPS * BATCH
    assert query(paths.root, "SELECT count(*) FROM steps WHERE step >= 0") == [(STEPS,)]


def refused(root: Path, paths: RunPaths, *says: str, more: tuple[str, ...] = ()) -> str:
    before = {path: path.stat().st_mtime_ns for path in paths.recover.rglob("*")}
    with pytest.raises(RecoverError) as error:
        go_on(root, paths, *more)
    assert all(text in str(error.value) for text in (str(paths.database), *says)), error.value
    assert {path: path.stat().st_mtime_ns for path in paths.recover.rglob("*")} == before
    return str(error.value)


def test_the_ledger_at_hand_is_newer_than_the_point(root, paths):
    go_on(root, paths)
    is_whole(paths)
    assert query(paths.root, "SELECT text FROM events WHERE kind = 'resumed'") == [("step 4",)]


def test_a_lost_ledger(root, paths, capsys):
    for name in LEDGER_FILES:
        (paths.root / name).unlink(missing_ok=True)
    says = ("step_3 does not belong to the run's ledger", "is empty", "train prompts twice")
    refused(root, paths, *says, "Restore its run.db (with run.db-wal", "trial_name")
    assert not paths.database.exists()  # nor is there an empty one that would look balanced
    assert main(["ledger", str(paths.root)]) == 2


def test_an_emptied_ledger(root, paths):
    for name in LEDGER_FILES[1:]:
        (paths.root / name).unlink(missing_ok=True)
    paths.database.write_bytes(b"")
    refused(root, paths, "is empty")


def test_an_older_copy_of_the_ledger(root, paths):
    replace_ledger(paths, root / "copies-first" / "after_3.db")
    refused(root, paths, "ends after step 3, the point was written after step 4")


def test_the_point_before_it_goes_with_an_older_ledger(root, paths):
    """Asked for by name, the run goes on from where both agree, and is whole in the end."""
    replace_ledger(paths, root / "copies-first" / "after_3.db")
    text = refused(root, paths, "recover.on_damage=previous")
    assert str(paths.recover / "step_3") in text
    go_on(root, paths, "recover.on_damage=previous")
    is_whole(paths)
    assert query(paths.root, "SELECT text FROM events WHERE kind = 'resumed'") == [("step 2",)]
    assert sorted(p.name for p in paths.recover.iterdir()) == ["step_3", "step_4"]


def test_a_ledger_older_than_every_point(root, paths):
    replace_ledger(paths, root / "copies-first" / "after_1.db")
    refused(root, paths, "ends after step 1", more=("recover.on_damage=previous",))


def test_the_ledger_of_another_run(root, paths):
    replace_ledger(paths, root / "copies-second" / "after_4.db")
    refused(root, paths, "belongs to another run")


def test_a_point_of_another_run(root, paths):
    shutil.rmtree(paths.recover / "step_3")
    shutil.copytree(root / "arithmetic" / "second" / "recover" / "step_3", paths.recover / "step_3")
    refused(root, paths, "step_3", "belongs to another run")


def test_a_copy_from_a_course_of_events_that_was_undone(root, paths):
    """The point of step 4 was lost, its steps were done again: a copy from before has all numbers,
    and other prompts."""
    undone = root / "copies-first" / "after_4.db"
    shutil.rmtree(paths.recover / "step_3")
    go_on(root, paths)
    is_whole(paths)
    replace_ledger(paths, undone)
    shutil.rmtree(paths.recover / "step_4")
    refused(root, paths, "step_3", "a copy from before the point was written")


def test_a_ledger_without_its_log_of_writes(root, tmp_path):
    """As after a power cut, where a reader has kept the log from being copied to the database."""
    config = config_of(root, "trial_name=read")
    paths, cut = RunPaths.of(config), RunPaths(tmp_path / "arithmetic" / "first")
    readers = []

    def on_step(done: int) -> None:
        if done == 1:
            reader = open_read_only(paths.database)
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM tasks").fetchone()
            readers.append(reader)
        if done == STEPS:
            shutil.copytree(paths.root, cut.root, ignore=shutil.ignore_patterns("run.db-*"))

    train(config, on_step)
    readers[0].close()
    # By then some of its pages may be newer than others.
    with pytest.raises((RecoverError, RunDatabaseError), match=r"run\.db") as error:
        go_on(root, cut)
    assert "restore" in str(error.value).lower() and "trial_name" in str(error.value)


def test_points_that_are_gone(root, paths):
    shutil.rmtree(paths.recover)
    says = ("a run of 4 steps and its recover point after step 4", str(paths.recover))
    refused(root, paths, *says, "trial_name", f"remove {paths.root} to start over")
    assert query(paths.root, "SELECT count(*) FROM tasks WHERE state = 'trained'") == [(12,)]


def test_a_process_that_ended_before_its_first_point_starts_over(root, tmp_path, caplog):
    config = config_of(root, "trial_name=early")
    paths = RunPaths.of(config)

    def end(done: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        train(config, end)
    assert not paths.recover.exists()
    train(config)
    assert "1 steps are repeated: no recover point was written" in caplog.text
    is_whole(paths)


def test_a_run_of_rows_is_held_to_its_ledger_too(root, tmp_path):
    config = sft(root, "rows")
    with open_trainer(config) as trainer:
        trainer.train()
    paths = RunPaths.of(config)
    paths.database.unlink()
    with pytest.raises(RecoverError, match=r"step_7 does not belong.*run\.db is empty"):
        open_trainer(config)


def test_a_finished_run_without_points_is_not_overwritten(root):
    config = sft(root, "off")
    config.recover.mode = "off"
    with open_trainer(config) as trainer:
        trainer.train()
    paths = RunPaths.of(config)
    with pytest.raises(ValueError, match="holds an earlier run: choose another trial_name"):
        open_trainer(config)
    paths.config.unlink()
    with pytest.raises(ValueError, match="holds an earlier run: choose another trial_name"):
        open_trainer(config)
    config.recover.mode = "on"
    with pytest.raises(RecoverError, match="a run of 8 steps and its end, without recover points"):
        open_trainer(config)
