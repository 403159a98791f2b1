"""`areal ledger`: the balance and one prompt's story, beside a writer that goes on."""

from __future__ import annotations

import json

import pytest
from rollout_world import trajectory

from areal.cli.main import main
from areal.rollout.buffer import Outcome
from areal.rollout.ledger import Ledger
from areal.rollout.source import Prompt
from areal.run.database import RunDatabase


@pytest.fixture
def database(tmp_path):
    with RunDatabase(tmp_path / "run.db") as database:
        ledger = Ledger(database)
        ledger.issue([Prompt(i, epoch=0, row=i + 7, data={}) for i in range(4)], version=0)
        outcomes = [
            Outcome(i, "finished", 0, 0, 1, trajectory=trajectory([0, 1], task_id=i))
            for i in range(2)
        ]
        failed = Outcome(2, "failed", 0, 0, 0, why="TimeoutError: 3 s", error=TimeoutError("3 s"))
        ledger.settle([*outcomes, failed], version=1)
        ledger.trained([0], step=0, version=1)
        yield database


def test_a_run_that_is_alive_adds_up(database, tmp_path, capsys):
    assert main(["ledger", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "failed: TimeoutError: 3 s: 1" in printed and "balanced" in printed
    assert main(["ledger", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    counts = {"issued": 1, "finished": 1, "trained": 1, "rejected": 0, "stale": 0, "failed": 1}
    assert report["counts"] == counts | {"total": 4}
    assert report["untrained"] == [{"state": "failed", "why": "TimeoutError: 3 s", "prompts": 1}]


def test_the_story_of_a_prompt(database, tmp_path, capsys):
    assert main(["ledger", str(tmp_path), "--prompt", "0", "--json"]) == 0
    story = json.loads(capsys.readouterr().out)
    assert (story["state"], story["row"], story["step"], story["tail_version"]) == (
        "trained",
        7,
        0,
        1,
    )
    assert story["trajectory_kept"] == 1
    assert main(["ledger", str(tmp_path), "--prompt", "1"]) == 0
    assert "finished" in capsys.readouterr().out
    assert main(["ledger", str(tmp_path), "--prompt", "99"]) == 2
    assert "no prompt 99 was issued" in capsys.readouterr().err


def test_a_ledger_that_does_not_add_up_is_an_error(database, tmp_path, capsys):
    with database.transaction() as connection:
        connection.execute("DELETE FROM tasks WHERE task_id = 1")
    assert main(["ledger", str(tmp_path)]) == 1
    assert "does not balance" in capsys.readouterr().err


def test_a_folder_without_a_run_is_named(tmp_path, capsys):
    assert main(["ledger", str(tmp_path / "absent")]) == 2
    assert "no run database" in capsys.readouterr().err
