"""The run database: one SQLite file in WAL mode that outlives every process of the run.

In: the controller, its only writer, records tasks, trajectories, step statistics and events. Out:
any process may read it during the run or after a crash (`open_read_only`).

Invariants: one live writer (an flock on `<file>.lock`, which the kernel releases even on kill -9);
every write is one transaction; a committed one survives the death of the process, and after a
`flush` also a power cut. Every fault of SQLite or the disk is a RunDatabaseError.

Each recover point records a random mark here before it is written, and carries the same mark. So a
database with the mark of a point has all records before it; an older copy, an emptied file or the
database of another run does not (run/recover.py).

`describe_holders` names the processes that hold a lock, for error messages. It reads /proc/locks
(Linux only), because opening and closing the file itself would drop this process's locks.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from areal.api.redact import hide_secrets
from areal.utils.fs import flush_to_disk, open_private, private_folder, set_private
from areal.utils.waits import waiting

SCHEMA_VERSION = 2
_PAGE_BYTES = 1 << 14  # a trajectory has tens of thousands of bytes: fewer, larger writes
_LOCK_TIMEOUT_S = 60.0  # long enough for the transaction of a careless reader
_WRITERS_BYTES = (120, 122)  # of the -shm file: locked to write, to checkpoint and to recover

# `tasks` and `trajectories` are written by rollout/ledger.py only.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS tasks (
    task_id        INTEGER PRIMARY KEY,  -- position in the prompt stream
    epoch          INTEGER NOT NULL,
    row            INTEGER NOT NULL,     -- row of the data set
    state          TEXT NOT NULL
        CHECK (state IN ('issued', 'finished', 'trained', 'rejected', 'stale', 'failed')),
    why            TEXT NOT NULL DEFAULT '',
    attempts       INTEGER NOT NULL DEFAULT 1,  -- times it was issued
    issued_version INTEGER NOT NULL,     -- policy version at admission
    head_version   INTEGER,              -- oldest token version
    tail_version   INTEGER,              -- newest token version, or a bound of it
    closed_version INTEGER,              -- policy version when the terminal state was reached
    step           INTEGER,              -- training step that consumed it
    reward         REAL,                 -- mean over the group
    issued_at      REAL NOT NULL,
    finished_at    REAL,
    closed_at      REAL
);
CREATE INDEX IF NOT EXISTS tasks_by_state ON tasks (state);
CREATE INDEX IF NOT EXISTS tasks_by_step ON tasks (step);
CREATE TABLE IF NOT EXISTS trajectories (
    task_id INTEGER PRIMARY KEY,
    data    BLOB NOT NULL                -- safetensors
);
CREATE TABLE IF NOT EXISTS samples (   -- some of each step's samples, kept to be looked at
    task_id INTEGER NOT NULL,
    sample  INTEGER NOT NULL,            -- row of its group
    episode INTEGER NOT NULL,            -- an agent's episode may have several rows
    step    INTEGER NOT NULL,            -- that trained on it
    reward  REAL,
    length  INTEGER NOT NULL,            -- tokens trained on
    is_cut  INTEGER NOT NULL,            -- ended by a limit
    prompt  TEXT NOT NULL,
    output  TEXT NOT NULL,
    data    BLOB NOT NULL,               -- safetensors: a value per token
    PRIMARY KEY (task_id, sample)
);
CREATE INDEX IF NOT EXISTS samples_by_step ON samples (step);
CREATE TABLE IF NOT EXISTS pieces (      -- text of every token in `samples`
    token_id INTEGER PRIMARY KEY,
    text     TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS steps (
    step  INTEGER PRIMARY KEY,
    time  REAL NOT NULL,
    stats TEXT NOT NULL                  -- JSON object
);
CREATE TABLE IF NOT EXISTS starts (
    id           INTEGER PRIMARY KEY,
    time         REAL NOT NULL,
    step         INTEGER NOT NULL,       -- first step of this process; later ones were undone
    config       TEXT NOT NULL,          -- YAML, all values filled in
    dataset_size INTEGER NOT NULL,
    world        TEXT NOT NULL           -- JSON object: what else the bits of a step depend on
);
CREATE TABLE IF NOT EXISTS recover_points (
    step     INTEGER PRIMARY KEY,        -- the last one in its weights
    mark     TEXT NOT NULL,              -- random; the point has the same
    is_whole INTEGER NOT NULL DEFAULT 0  -- it was seen whole on the disk
);
CREATE TABLE IF NOT EXISTS events (
    id   INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    kind TEXT NOT NULL,
    text TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS looks (       -- at servers and trainer, after some weight updates
    id      INTEGER PRIMARY KEY,
    version INTEGER NOT NULL,            -- that was just published
    stage   TEXT NOT NULL,               -- weights, logits
    state   TEXT NOT NULL CHECK (state IN ('ok', 'fault', 'unseen')),
    found   TEXT NOT NULL
);
"""


class RunDatabaseError(RuntimeError):
    """The database cannot be opened or written."""


@dataclass(frozen=True, slots=True)
class Start:
    """How one process of the run was started."""

    step: int  # its first step
    config: str  # YAML
    dataset_size: int
    world: dict[str, Any]


class Look(NamedTuple):
    """What a run found of one stage after a weight update. Fields as the columns of `looks`."""

    version: int
    stage: str
    state: Literal["ok", "fault", "unseen"]
    found: str


class StoredSample(NamedTuple):
    """One sample of a step, kept to be looked at. Fields as the columns of `samples`."""

    task_id: int
    sample: int
    episode: int
    step: int
    reward: float | None
    length: int
    is_cut: bool
    prompt: str
    output: str
    data: bytes


@dataclass(frozen=True, slots=True)
class LedgerView:
    """The records of a run's database about its recover points."""

    path: Path  # of the database
    num_steps: int  # recorded
    marks: dict[int, str]  # by the step of the point
    whole: int | None  # step of the newest point known to be complete
    is_finished: bool  # the run has completed


class RunDatabase:
    """The writer's connection; safe to use from several threads.

    db = RunDatabase(run_dir / "run.db")
    db.record_step(0, {"reward": 0.25})
    with db.transaction() as connection:
        connection.execute(...)
    db.close()
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        private_folder(self.path.parent)
        self._lock = threading.RLock()
        self._lock_file = lock_run(self.path)
        try:
            with self._clear_errors("open"):
                self._connection = _open_writer(self.path)
        except RunDatabaseError:
            self._lock_file.close()
            raise

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commits all statements inside, or none if an exception is raised."""
        with self._locked(), self._clear_errors("write"):
            try:
                with waiting(f"the lock of {self.path}"):
                    self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    with suppress(sqlite3.Error):  # the first error is the one that matters
                        self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with waiting(f"another thread that writes {self.path}"):
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _clear_errors(self, act: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            text = f"cannot {act} run database {self.path}: {error} ({_advice(error, self.path)})"
            raise RunDatabaseError(text) from error

    def query(
        self, sql: str, parameters: tuple[Any, ...] | Mapping[str, Any] = ()
    ) -> list[sqlite3.Row]:
        with self._lock, self._clear_errors("read"):
            return self._connection.execute(sql, parameters).fetchall()

    def record_step(self, step: int, stats: Mapping[str, float]) -> None:
        """Statistics of a finished step; a step run again after recovery replaces the old row."""
        with self.transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO steps (step, time, stats) VALUES (?, ?, ?)",
                (step, time.time(), json.dumps(dict(stats))),
            )

    def record_samples(self, samples: Sequence[StoredSample], pieces: Mapping[int, str]) -> None:
        """Samples of a step, and the texts of tokens that no sample before had."""
        with self.transaction() as connection:
            connection.executemany(
                f"INSERT OR REPLACE INTO samples VALUES ({', '.join('?' * 10)})",
                samples,
            )
            if pieces:
                rows = pieces.items()
                connection.executemany("INSERT OR REPLACE INTO pieces VALUES (?, ?)", rows)

    def record_start(self, start: Start) -> None:
        """A process begins at `start.step`: deletes earlier records from that step on."""
        with self.transaction() as connection:
            connection.execute("DELETE FROM steps WHERE step >= ?", (start.step,))
            connection.execute("DELETE FROM samples WHERE step >= ?", (start.step,))
            connection.execute("DELETE FROM recover_points WHERE step >= ?", (start.step,))
            connection.execute("DELETE FROM looks WHERE version > ?", (start.step,))
            connection.execute(
                "INSERT INTO starts (time, step, config, dataset_size, world)"
                " VALUES (?, ?, ?, ?, ?)",
                (
                    time.time(),
                    start.step,
                    start.config,
                    start.dataset_size,
                    json.dumps(start.world),
                ),
            )

    def record_event(self, kind: str, text: str) -> None:
        """A lifecycle event: started, resumed, finished, ..."""
        with self.transaction() as connection:
            connection.execute(
                "INSERT INTO events (time, kind, text) VALUES (?, ?, ?)",
                (time.time(), kind, hide_secrets(text)),
            )

    def record_looks(self, looks: Iterable[Look]) -> None:
        with self.transaction() as connection:
            connection.executemany(
                "INSERT INTO looks (version, stage, state, found) VALUES (?, ?, ?, ?)",
                [one._replace(found=hide_secrets(one.found)) for one in looks],
            )

    def mark_recover_point(self, step: int) -> str:
        """Record and return the mark of the point after `step`, before it is written."""
        mark = secrets.token_hex(16)
        with self.transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO recover_points (step, mark) VALUES (?, ?)", (step, mark)
            )
        return mark

    def confirm_recover_point(self, step: int) -> None:
        """The point after `step` is complete on disk: from now on it must exist."""
        with self.transaction() as connection:
            connection.execute("UPDATE recover_points SET is_whole = 1 WHERE step = ?", (step,))

    def ledger_view(self) -> LedgerView:
        with self._lock, self._clear_errors("read"):
            return read_ledger_view(self._connection, self.path)

    def flush(self) -> None:
        """Sync committed transactions to disk, so that they survive a power cut."""
        with self._lock, self._clear_errors("write"):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        # A reader can block the checkpoint, so the WAL is synced too. Never the database file:
        # closing a descriptor of it would drop SQLite's locks.
        log = self.path.with_name(self.path.name + "-wal")
        try:
            flush_to_disk(log)
            flush_to_disk(self.path.parent)
        except OSError as error:
            cause = f"{error.strerror or error}: {log}"
            raise RunDatabaseError(
                f"cannot write run database {self.path}: {cause} ({_disk_advice(error)})"
            ) from error

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._connection.close()
            self._lock_file.close()

    def __enter__(self) -> RunDatabase:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_read_only(path: str | Path) -> sqlite3.Connection:
    """A reader's connection: sees every committed transaction, also of a live run.

    For a stopped run it leaves no file behind and works on a read-only disk; if that run resumes
    meanwhile, open it again.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no run database at {path}: give the folder of a started run")
    # The WAL exists while a process has the database open, and after a kill.
    is_at_rest = not path.with_name(path.name + "-wal").exists()
    options = "mode=ro&immutable=1" if is_at_rest else "mode=ro"
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?{options}", uri=True)
    connection.row_factory = sqlite3.Row
    return connection


def read_steps(connection: sqlite3.Connection) -> list[tuple[int, dict[str, float]]]:
    """(step, statistics) in order; step -1 is before the first."""
    rows = connection.execute("SELECT step, stats FROM steps ORDER BY step")
    return [(row["step"], json.loads(row["stats"])) for row in rows]


def read_looks(connection: sqlite3.Connection) -> list[Look]:
    """In the order they were recorded; empty if an older version of areal wrote the database."""
    has_table = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'looks'"
    if connection.execute(has_table).fetchone() is None:
        return []
    rows = connection.execute("SELECT version, stage, state, found FROM looks ORDER BY id")
    return [Look(*row) for row in rows]


def read_start(connection: sqlite3.Connection, step: int) -> Start | None:
    """How the process that trained `step` was started; None if not recorded."""
    row = connection.execute(
        "SELECT * FROM starts WHERE step <= ? ORDER BY id DESC LIMIT 1", (step,)
    ).fetchone()
    if row is None:
        return None
    return Start(row["step"], row["config"], row["dataset_size"], json.loads(row["world"]))


def read_ledger_view(connection: sqlite3.Connection, path: Path) -> LedgerView:
    if connection.execute("PRAGMA user_version").fetchone()[0] != SCHEMA_VERSION:
        raise ValueError(f"{path} was written by another version of areal: read it with that one")
    points = connection.execute("SELECT step, mark, is_whole FROM recover_points").fetchall()
    (num_steps,) = connection.execute("SELECT count(*) FROM steps WHERE step >= 0").fetchone()
    finished = connection.execute("SELECT 1 FROM events WHERE kind = 'finished'").fetchone()
    return LedgerView(
        path=path,
        num_steps=num_steps,
        marks={row["step"]: row["mark"] for row in points},
        whole=max((row["step"] for row in points if row["is_whole"]), default=None),
        is_finished=finished is not None,
    )


_DAMAGED = "restore a copy of it (with its -wal, where there is one), or choose another trial_name"


def _advice(error: sqlite3.Error, path: Path) -> str:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # errors raised by Python have none
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_PROTOCOL):
        shared = path.with_name(path.name + "-shm")
        holders = describe_holders(shared, *_WRITERS_BYTES) or "another program"
        return (
            f"{holders} has held a lock on it for too long: end it, then resume the run; "
            "readers open it with mode=ro"
        )
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return _DAMAGED
    return "the last good transaction is kept; free disk space, then resume the run"


def _disk_advice(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "the file was deleted, so the run cannot record its state; choose another trial_name"
    return "the last good transaction is kept; free disk space, then resume the run"


def lock_run(path: Path) -> IO[str]:
    """Lock the run for this process; the lock file holds its pid for the error message."""
    lock_path = path.with_name(path.name + ".lock")
    lock_file = open_private(lock_path, "a+")
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock_file.seek(0)
        named = f"process {lock_file.read().strip() or 'unknown'}"
        lock_file.close()
        raise RunDatabaseError(
            f"run database {path} is in use by another live run "
            f"({describe_holders(lock_path) or named}): stop it, or choose another trial_name"
        ) from None
    lock_file.truncate(0)
    lock_file.write(str(os.getpid()))
    lock_file.flush()
    return lock_file


def _open_writer(path: Path) -> sqlite3.Connection:
    if not path.exists():
        open_private(path, "xb").close()
    for suffix in ("", "-wal", "-shm"):  # SQLite creates the others with the mode of the first
        set_private(path.with_name(path.name + suffix))
    connection = sqlite3.connect(
        path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    connection.row_factory = sqlite3.Row
    connection.execute(f"PRAGMA page_size={_PAGE_BYTES}")  # of a new file
    connection.execute("PRAGMA journal_mode=WAL")
    # NORMAL: a commit costs no fsync. A killed process loses nothing; a power cut may lose the
    # last transactions, which recovery treats like any work after the recover point.
    connection.execute("PRAGMA synchronous=NORMAL")
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found not in (0, SCHEMA_VERSION):
        connection.close()
        raise RunDatabaseError(
            f"run database {path} has format {found}, this areal writes {SCHEMA_VERSION}: "
            "choose another trial_name, or resume with the areal that wrote it"
        )
    # Finds a copy made without its WAL, and disk corruption.
    if found and (fault := connection.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
        connection.close()
        text = " ".join(fault.split())
        raise RunDatabaseError(f"run database {path} is damaged: {text} ({_DAMAGED})")
    connection.executescript(_SCHEMA)
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    return connection


def describe_holders(path: Path, first: int = 0, last: int = 0) -> str:
    """`process 4711 (python train.py) and ...` that hold a lock on one of the bytes from `first`
    to `last`; empty if none is known."""
    try:
        inode = path.stat().st_ino
        table = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return ""
    pids = set()
    for line in table:  # 1: POSIX  ADVISORY  READ 4711 fe:01:1234567 120 120
        pid, place, begin, end = line.split()[-4:]
        is_held = "->" not in line  # else the process waits for the lock
        covers = int(begin) <= last and (end == "EOF" or first <= int(end))
        if is_held and covers and int(place.rpartition(":")[2]) == inode:
            pids.add(int(pid))
    pids.discard(os.getpid())
    return " and ".join(f"process {pid}{_command(pid)}" for pid in sorted(pids) if pid > 0)


def _command(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return ""
    text = " ".join(line.decode(errors="replace").split())
    return f" ({text[:80]})" if text else ""
