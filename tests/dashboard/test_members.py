"""Servers and rollout workers of a living run, told apart from what a killed one left behind."""

from __future__ import annotations

import json
import os

import pytest
from dashboard_world import WrittenRun

from areal.cli.main import main
from areal.dashboard.members import living_members
from areal.dashboard.reader import RunReader
from areal.run.mailbox import MailboxServer

STATE = {
    "servers": {"127.0.0.1:5001": "serving", "127.0.0.1:5002": "restarting"},
    "loads": {"127.0.0.1:5001": {"version": 3, "running": 7.0, "waiting": 0.0}},
    "workers": [{"name": "rollout worker 0", "state": "running", "pid": 41, "groups": 2}],
}


@pytest.fixture
def run(tmp_path):
    run = WrittenRun(tmp_path)
    yield run
    run.close()


@pytest.fixture
def alive(run):
    mailbox = MailboxServer(run.root / "fleet", lambda op, fields: {}, lambda: STATE)
    mailbox.start()
    yield run.root
    mailbox.close()


def test_each_server_and_worker_with_its_state(alive, capsys):
    with RunReader(alive) as run:
        found = living_members(run)
    assert found["why"] == ""
    assert [(one["name"], one["state"]) for one in found["servers"]] == [*STATE["servers"].items()]
    assert [one["running"] for one in found["servers"]] == [7.0, None]
    assert found["workers"] == STATE["workers"]
    assert main(["show", str(alive), "--servers"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split() == ["127.0.0.1:5001", "serving", "3", "7", "0"]
    assert printed[2].split() == ["127.0.0.1:5002", "restarting", "-", "-", "-"]
    assert printed[4].split() == ["rollout", "worker", "0", "running", "41", "2"]


def test_a_run_that_was_killed_has_none(run, capsys):
    folder = run.root / "fleet"
    folder.mkdir(mode=0o700)
    (folder / "state.json").touch(mode=0o600)
    (folder / "state.json").write_text(json.dumps({"run": "a", "beat": 3, **STATE}))
    os.utime(folder / "state.json", (1.0, 1.0))
    assert main(["show", str(run.root), "--servers"]) == 2
    assert "gave no sign" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"servers": 3, "loads": [], "workers": {"a": 1}}',
        '{"servers": {}, "workers": [1, {}]}',
        '{"servers": {"a": {"b": 1}}, "loads": {"a": {"version": "x", "running": true}}}',
        '{"servers": {"a": "b"}, "loads": {"a": {"version": 1' + "0" * 400 + "}}}",
        '{"servers": {"a": "b"}, "loads": {"a": {"version": NaN}}}',
    ],
)
def test_a_state_that_is_none_ends_nothing(run, text):
    folder = run.root / "fleet"
    folder.mkdir(mode=0o700)
    (folder / "state.json").touch(mode=0o600)
    (folder / "state.json").write_text(text)
    with RunReader(run.root) as reader:
        found = living_members(reader)
    assert all(one["version"] is None for one in found["servers"])
    assert all(one["pid"] is None for one in found["workers"])


def test_a_run_without_servers_says_so(run, capsys):
    assert main(["show", str(run.root), "--servers"]) == 2
    assert "no run listens there" in capsys.readouterr().err
