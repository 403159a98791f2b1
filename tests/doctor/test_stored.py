"""`areal doctor` on the folders of runs: real ones, healthy and with a planted fault."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch
from doctor.test_faults import SMALL
from tiny_run import grpo_config, query

from areal.cli.main import main
from areal.doctor.report import Chart
from areal.doctor.stored import check_looks, known_version
from areal.rollout.ledger_balance import read_trained
from areal.rollout.trajectory import decode, encode
from areal.run.database import Look, RunDatabase
from areal.run.paths import RunPaths
from areal.trainer.experiment import load_datasets
from areal.trainer.probe import is_looked_at
from areal.trainer.rl_trainer import PPOTrainer

RUN = (*SMALL, "total_train_steps=3", "recover={mode: on, freq_steps: 1, keep: 9}")


def train(root: Path, name: str, *overrides: str, plant=None) -> Path:
    """A run of three steps; `plant(trainer)` is called before the first."""
    config = grpo_config(root, *RUN, f"trial_name={name}", *overrides)
    with PPOTrainer(config, load_datasets(config)[0]) as trainer:
        if plant is not None:
            plant(trainer)
        trainer.train()
    return RunPaths.of(config).root


def doctor(capsys, run: Path) -> tuple[int, dict]:
    """Exit code and report; the folder must be the same afterwards, byte for byte."""
    before = digest(run)
    code = main(["doctor", str(run), "--json"])
    assert digest(run) == before
    return code, json.loads(capsys.readouterr().out)


def digest(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def events(run: Path) -> list[str]:
    return [text for (text,) in query(run, "SELECT text FROM events WHERE kind = 'doctor'")]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


def test_a_healthy_run_is_accused_of_nothing(root, capsys):
    run = train(root, "healthy")
    code, report = doctor(capsys, run)
    assert (code, report["healthy"], report["stage"]) == (0, True, None), report["verdict"]
    seen = {one["stage"] for one in report["stages"] if one["state"] == "ok"}
    assert {"tokens", "weights", "logits", "reward", "advantages", "loss_mask", "optimizer"} < seen
    first, second = events(run)
    assert "version 1: engine and trainer agree" in first
    assert "version 2: engine and trainer agree" in second


# What the recipe has: staleness 2, and two recover points.
DEFAULT = ("rollout.max_head_offpolicyness=2", "total_train_steps=6")


def found(report: dict, stage: str) -> tuple[str, str]:
    return next((one["state"], one["found"]) for one in report["stages"] if one["stage"] == stage)


@pytest.mark.parametrize("recover", ["{mode: on, freq_steps: 1}", "{mode: off}"])
def test_a_run_with_default_keys_is_compared(root, capsys, recover):
    name = "kept" if "on" in recover else "nothing_kept"
    run = train(root, f"default_{name}", *DEFAULT, f"recover={recover}")
    code, report = doctor(capsys, run)
    assert (code, report["healthy"]) == (0, True), report["verdict"]
    state, text = found(report, "weights")
    assert (state, "update to version 4: all tensors of 1 server(s)" in text) == ("ok", True), text
    state, text = found(report, "logits")
    assert (state, "log-probabilities of 32 tokens" in text) == ("ok", True), text


def test_tokens_of_a_kept_version_are_found_in_other_steps(root, capsys):
    """The newest batch was sampled by weights that are gone, another by some that are kept."""
    run = train(root, "other_steps", "total_train_steps=4")
    for step in (1, 3):  # versions 2 and 4
        shutil.rmtree(run / "recover" / f"step_{step}")
    with closing(sqlite3.connect(run / "run.db")) as connection, connection:
        for task_id, data in read_trained(connection, 3):
            trajectory = decode(data)
            trajectory["versions"] -= (trajectory["versions"] == 3).int()
            connection.execute(
                "UPDATE trajectories SET data = ? WHERE task_id = ?", (encode(trajectory), task_id)
            )
        connection.execute("DROP TABLE looks")  # as a run of an earlier version
    _, report = doctor(capsys, run)
    assert found(report, "weights") == ("ok", "tokens were sampled by the weights of version 1")
    assert found(report, "logits")[0] == "ok"


def test_a_fault_of_a_run_with_default_keys_is_named(root, capsys):
    def lose_updates_after_the_first(trainer):
        engine, update = trainer.inference, trainer.inference.update_weights

        def keep_old_weights(meta, tensors):
            if meta.version < 2:
                return update(meta, tensors)
            engine._loop.call(lambda native: setattr(native, "version", meta.version)).result()

        engine.update_weights = keep_old_weights

    more = ("recover={mode: on, freq_steps: 1}", "actor.optimizer.lr=1e-2")
    run = train(root, "default_stale", *DEFAULT, *more, plant=lose_updates_after_the_first)
    code, report = doctor(capsys, run)
    assert (code, report["stage"]) == (1, "weights"), report["verdict"]
    assert "update to version 4: " in report["verdict"]
    assert "is not the trainer's tensor" in report["verdict"]


def test_looks_are_often_at_first_and_never_cease():
    assert [n for n in range(1, 260) if is_looked_at(n)] == [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]


def test_the_newest_look_counts():
    looks = [
        Look(1, "weights", "fault", "a tensor differs"),
        Look(2, "weights", "ok", "all tensors are equal"),
        Look(2, "logits", "fault", "they differ by 3"),
    ]
    chart = Chart()
    check_looks(chart, looks[:2])
    assert chart.exit_code == 0
    assert "that to version 1 had a fault" in str(chart.findings)
    check_looks(chart, looks)
    assert chart.first_fault.stage == "logits"
    assert "version 2: they differ by 3" in chart.verdict()


def test_weights_are_those_of_a_version_that_sampled_tokens_name():
    batch = {
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "loss_mask": torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]]),
        "versions": torch.tensor([[-1, -1, 8, 9], [-1, -1, 9, 0]]),  # 0: padding
    }
    assert known_version(batch, {7, 8}) == 9  # a step's recover point has the version after it
    assert known_version(batch, {7}) == 8
    assert known_version(batch, {10, 11}) is None
    batch["versions"][0, 2] = 0
    assert known_version(batch, {10, 11}) == 0


def test_stale_servers_are_named_by_the_run_itself_and_by_its_folder(root, capsys, caplog):
    def keep_old_weights(trainer):
        """The engine takes the number of an update and nothing else."""
        engine = trainer.inference
        engine.update_weights = lambda meta, tensors: engine._loop.call(
            lambda native: setattr(native, "version", meta.version)
        ).result()

    run = train(root, "stale", "actor.optimizer.lr=1e-2", plant=keep_old_weights)
    event, _ = events(run)
    assert "FAULT" in event and "is not the trainer's tensor" in event
    assert any(
        event in record.message for record in caplog.records if record.levelname == "WARNING"
    )
    code, report = doctor(capsys, run)
    assert (code, report["stage"]) == (1, "weights"), report["verdict"]
    assert "stale weights" in report["verdict"]


def test_rewards_of_other_rows_are_found_in_the_folder(root, capsys):
    run = train(root, "late", "workflow=sick_parts.LateGrader")
    code, report = doctor(capsys, run)
    assert (code, report["stage"]) == (1, "reward"), report["verdict"]
    assert "reward of another row" in report["verdict"]


def test_statistics_alone_name_a_run_without_signal(tmp_path, capsys):
    with RunDatabase(tmp_path / "run.db") as database:
        for step in range(12):
            database.record_step(step, {"rollout/groups_with_spread": 0.0, "actor/lr": 1e-3})
    code, report = doctor(capsys, tmp_path)
    assert (code, report["stage"]) == (1, "reward"), report["verdict"]
    assert "no trajectory is stored" in report["stages"][2]["found"]


def test_what_cannot_be_looked_at_is_a_mistake_of_the_user(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 2
    assert "no run database" in capsys.readouterr().err
    with RunDatabase(tmp_path / "run.db"):
        pass
    assert main(["doctor", str(tmp_path)]) == 2
    assert "has not trained a step yet" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path), "seed=2"]) == 2
    assert "seed=2: a run has its config" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path / "absent.yaml")]) == 2
    assert "does not exist" in capsys.readouterr().err
