"""The run database: durable, one writer, readable by others at any time."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from areal.utils.run_db import (
    RunDatabase,
    RunDatabaseError,
    Start,
    open_read_only,
    read_start,
    read_steps,
)


def test_steps_and_events_survive_closing(tmp_path):
    with RunDatabase(tmp_path / "trial" / "run.db") as db:
        db.record_step(0, {"reward": 0.25})
        db.record_step(1, {"reward": 0.5})
        db.record_step(1, {"reward": 0.75})
        db.record_event("started", "fresh run")
    with RunDatabase(tmp_path / "trial" / "run.db") as db:
        assert db.step_stats() == [(0, {"reward": 0.25}), (1, {"reward": 0.75})]
        assert [row["kind"] for row in db.query("SELECT kind FROM events")] == ["started"]


def test_reader_sees_commits_of_a_live_writer_and_cannot_write(tmp_path):
    with RunDatabase(tmp_path / "run.db") as db:
        db.record_step(0, {"loss": 1.0})
        reader = open_read_only(tmp_path / "run.db")
        assert reader.execute("SELECT count(*) FROM steps").fetchone()[0] == 1
        db.record_step(1, {"loss": 0.5})
        assert reader.execute("SELECT count(*) FROM steps").fetchone()[0] == 2
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader.execute("DELETE FROM steps")
        reader.close()


def test_reading_a_run_that_is_over_leaves_nothing_behind(tmp_path):
    with RunDatabase(tmp_path / "run.db") as db:
        db.record_step(0, {"loss": 1.0})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with closing(open_read_only(tmp_path / "run.db")) as reader:
        assert read_steps(reader) == [(0, {"loss": 1.0})]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    with RunDatabase(tmp_path / "run.db") as db:
        db.record_step(1, {"loss": 0.5})
        with closing(open_read_only(tmp_path / "run.db")) as reader:
            assert len(read_steps(reader)) == 2


def test_a_step_belongs_to_the_last_start_before_it(tmp_path):
    """Started, killed after step 7, gone on from step 5, and that again from step 5."""
    with RunDatabase(tmp_path / "run.db") as db:
        for step, config in ((0, "a"), (5, "b"), (5, "c"), (9, "d")):
            db.record_start(Start(step, config, 20, {"threads": 2}))
        with closing(open_read_only(tmp_path / "run.db")) as reader:
            found = {step: read_start(reader, step) for step in (-1, 4, 5, 8, 9)}
    assert found.pop(-1) is None
    assert {step: start.config for step, start in found.items()} == {4: "a", 5: "c", 8: "c", 9: "d"}
    assert found[4] == Start(0, "a", 20, {"threads": 2})


def test_reading_a_run_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run database"):
        open_read_only(tmp_path / "run.db")


def test_failed_transaction_leaves_nothing(tmp_path):
    with RunDatabase(tmp_path / "run.db") as db:
        with pytest.raises(KeyError), db.transaction() as connection:
            connection.execute("INSERT INTO events (time, kind, text) VALUES (0, 'a', 'b')")
            raise KeyError("half way")
        assert db.query("SELECT * FROM events") == []


def test_sqlite_fault_becomes_a_clear_error(tmp_path):
    with RunDatabase(tmp_path / "run.db") as db:
        db.query("PRAGMA max_page_count=30")  # stands for a full disk
        with pytest.raises(RunDatabaseError, match=r"cannot write .*run.db.*full"):
            db.record_event("big", "x" * 1_000_000)
        db.query("PRAGMA max_page_count=100000")
        db.record_event("small", "works again")


def test_second_writer_is_refused_and_names_the_first(tmp_path):
    first = RunDatabase(tmp_path / "run.db")
    with pytest.raises(RunDatabaseError, match=f"process {os.getpid()}.*trial_name"):
        RunDatabase(tmp_path / "run.db")
    first.close()
    RunDatabase(tmp_path / "run.db").close()


def test_other_format_is_refused(tmp_path):
    RunDatabase(tmp_path / "run.db").close()
    connection = sqlite3.connect(tmp_path / "run.db")
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(RunDatabaseError, match="format 99"):
        RunDatabase(tmp_path / "run.db")


def test_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "run.db").write_text("not a database" * 100)
    with pytest.raises(RunDatabaseError, match="cannot open run database"):
        RunDatabase(tmp_path / "run.db")


def test_kill_9_keeps_commits_and_frees_the_run(tmp_path):
    script = (
        "import sys, time; from areal.utils.run_db import RunDatabase\n"
        "db = RunDatabase(sys.argv[1]); db.record_step(7, {'a': 1.0})\n"
        "connection = db._connection; connection.execute('BEGIN')\n"
        "connection.execute('DELETE FROM steps'); print('ready', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run.db")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    with RunDatabase(tmp_path / "run.db") as db:
        assert db.step_stats() == [(7, {"a": 1.0})]
