"""`areal doctor` on the folders of runs: real ones, healthy and with a planted fault."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from doctor.test_faults import SMALL
from tiny_run import grpo_config, query

from areal.cli.main import main
from areal.doctor.stored import known_version
from areal.run.database import RunDatabase
from areal.run.paths import RunPaths
from areal.trainer.experiment import load_datasets
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
    (event,) = events(run)
    assert "version 1: engine and trainer agree" in event


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
    (event,) = events(run)
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
