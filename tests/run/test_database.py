"""The run database: durable, one writer, readable by others at any time."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from utils.test_fs import file_size_limit

from areal.run.database import (
    RunDatabase,
    RunDatabaseError,
    Start,
    open_read_only,
    read_start,
    read_steps,
)


def step_stats(db: RunDatabase) -> list[tuple[int, dict[str, float]]]:
    with closing(open_read_only(db.path)) as connection:
        return read_steps(connection)


def test_steps_and_events_survive_closing(tmp_path):
    with RunDatabase(tmp_path / "trial" / "run.db") as db:
        db.record_step(0, {"reward": 0.25})
        db.record_step(1, {"reward": 0.5})
        db.record_step(1, {"reward": 0.75})
        db.record_event("started", "fresh run")
    with RunDatabase(tmp_path / "trial" / "run.db") as db:
        assert step_stats(db) == [(0, {"reward": 0.25}), (1, {"reward": 0.75})]
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


def test_a_start_undoes_what_was_recorded_from_its_step_on(tmp_path):
    with RunDatabase(tmp_path / "run.db") as db:
        for step in (-1, 0, 1, 2, 3):
            db.record_step(step, {"loss": float(step)})
        marks = {step: db.mark_recover_point(step) for step in (1, 3)}
        db.confirm_recover_point(1)
        view = db.ledger_view()
        assert (view.num_steps, view.marks, view.whole) == (4, marks, 1)
        db.record_start(Start(2, "config", 20, {}))
        assert [step for step, _ in step_stats(db)] == [-1, 0, 1]
        assert db.ledger_view().marks == {1: marks[1]}
        again = db.mark_recover_point(1)
        assert again != marks[1] and db.ledger_view().marks == {1: again}
        assert db.ledger_view().whole is None  # until that one is
        db.record_start(Start(0, "config", 20, {}))
        assert [step for step, _ in step_stats(db)] == [-1]
        assert db.ledger_view().marks == {} and not db.ledger_view().is_finished
        db.record_event("finished", "step 4")
        assert db.ledger_view().is_finished


class Syncs:
    """Which files were synced, and how long they were then. Python's own call is made, too."""

    def __init__(self, monkeypatch) -> None:
        self.sizes: dict[int, int] = {}  # by inode
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, descriptor: int) -> None:
        self._fsync(descriptor)
        found = os.fstat(descriptor)
        self.sizes[found.st_ino] = found.st_size

    def cover(self, path: Path) -> bool:
        found = path.stat()
        return self.sizes.get(found.st_ino) == found.st_size


@pytest.mark.parametrize("with_reader", [False, True])
def test_a_flush_syncs_all_that_was_committed(tmp_path, monkeypatch, with_reader):
    """A reader in a transaction keeps SQLite's own checkpoint from syncing anything."""
    with RunDatabase(tmp_path / "run.db") as db, closing(open_read_only(db.path)) as reader:
        db.record_step(0, {"loss": 1.0})
        if with_reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM steps").fetchone()
        db.record_step(1, {"loss": 0.5})
        syncs = Syncs(monkeypatch)
        log = tmp_path / "run.db-wal"
        assert log.stat().st_size > 0 and not syncs.cover(log)
        db.flush()
        assert syncs.cover(log)
        assert tmp_path.stat().st_ino in syncs.sizes  # the log may be new
        db.record_step(2, {"loss": 0.25})
        assert len(step_stats(db)) == 3


def test_a_flush_that_the_disk_refuses_is_a_clear_error(tmp_path):
    with RunDatabase(tmp_path / "run.db") as db:
        db.flush()
        limit = db.path.stat().st_size + 4096
        for step in range(200):
            db.record_step(step, {f"statistic {i}": 0.1 for i in range(20)})
        with (
            file_size_limit(limit),
            pytest.raises(RunDatabaseError, match=r"cannot write .*run\.db: .*free disk space"),
        ):
            db.flush()
        db.flush()
        assert len(step_stats(db)) == 200


def test_a_log_of_writes_that_was_removed_is_named(tmp_path):
    with RunDatabase(tmp_path / "run.db") as db:
        db.record_step(0, {"loss": 1.0})
        (tmp_path / "run.db-wal").unlink()
        with pytest.raises(RunDatabaseError, match=r"run\.db-wal \(the file was deleted"):
            db.flush()


def test_every_file_of_it_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        path = tmp_path / "trial" / "run.db"
        with RunDatabase(path) as db:
            db.record_step(0, {"loss": 1.0})
            modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()}
        assert modes == dict.fromkeys(("run.db", "run.db-wal", "run.db-shm", "run.db.lock"), 0o600)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        for file in path.parent.iterdir():
            file.chmod(0o666)  # as an older areal has left them
        with RunDatabase(path):
            assert {stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()} == {0o600}
    finally:
        os.umask(before)


def test_damage_is_found_when_it_is_opened(tmp_path):
    path = tmp_path / "run.db"
    with RunDatabase(path) as db:
        for step in range(300):
            db.record_step(step, {f"statistic {i}": 0.1 for i in range(20)})
    whole, draw = path.read_bytes(), random.Random(3)
    # The beginning of a page with statistics: the rest of one may be unused.
    page = whole.index(b"statistic", len(whole) // 2) // (1 << 14) * (1 << 14)
    path.write_bytes(whole[:page] + draw.randbytes(4096) + whole[page + 4096 :])
    with pytest.raises(RunDatabaseError, match=r"run\.db.*(restore a copy of it).*trial_name"):
        RunDatabase(path)
    path.write_bytes(whole)
    RunDatabase(path).close()


_LOCK = """
import fcntl, os, struct, sys
first, count = int(sys.argv[2]), int(sys.argv[3])
file = os.open(sys.argv[1], os.O_RDONLY)
order = struct.pack("hhqqi", fcntl.F_RDLCK, os.SEEK_SET, first, count, 0)
fcntl.fcntl(file, fcntl.F_SETLK, order)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="tells who holds a lock")
@pytest.mark.parametrize(("first", "count"), [(120, 1), (0, 0)])
def test_a_foreign_lock_ends_in_an_error_that_names_its_holder(tmp_path, first, count):
    """Whoever may read a file may lock it; this is how a reward function could stop a run."""
    with RunDatabase(tmp_path / "run.db") as db:
        db.record_step(0, {"loss": 1.0})
        db.query("PRAGMA busy_timeout=200")
        where = [str(tmp_path / "run.db-shm"), str(first), str(count)]
        command = [sys.executable, "-c", _LOCK, *where]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as holder:
            assert holder.stdout.readline() == "locked\n"
            with pytest.raises(RunDatabaseError, match=f"locked.*process {holder.pid} .*end it"):
                db.record_step(1, {"loss": 1.0})
            assert step_stats(db) == [(0, {"loss": 1.0})]
            holder.stdin.close()
        db.record_step(1, {"loss": 1.0})


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
        "import sys, time; from areal.run.database import RunDatabase\n"
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
        assert step_stats(db) == [(7, {"a": 1.0})]
