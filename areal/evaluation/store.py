"""Results of evaluations: one SQLite file, in which a sample appears when it has been scored.

An evaluation is identified by all that its samples depend on (`Evaluation.identity`): weights,
rows, workflow, reward and their source code, sampling options, seed. The number of samples is not
among them. So the same command continues where a killed one was, a larger `--n` adds samples, and
any change begins a new evaluation; nothing is deleted.

Invariant: a sample is there once, whole, or not at all. Each is a transaction of its own, which
survives the death of the process. Several processes may write one file.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from areal.utils.fs import open_private

SCHEMA_VERSION = 1
_BUSY_S = 60.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS evaluations (
    id       TEXT PRIMARY KEY,
    time     REAL NOT NULL,     -- when it began
    target   TEXT NOT NULL,
    step     INTEGER,           -- steps trained, of a checkpoint
    suite    TEXT NOT NULL,
    identity TEXT NOT NULL      -- JSON: all that a sample depends on
);
CREATE TABLE IF NOT EXISTS problems (
    evaluation TEXT NOT NULL,
    row        INTEGER NOT NULL,
    data       TEXT NOT NULL,   -- JSON: the row of the suite
    PRIMARY KEY (evaluation, row)
);
CREATE TABLE IF NOT EXISTS samples (
    evaluation TEXT NOT NULL,
    row        INTEGER NOT NULL,
    sample     INTEGER NOT NULL,
    state      TEXT NOT NULL CHECK (state IN ('scored', 'truncated', 'rejected', 'failed')),
    reward     REAL,            -- NULL if rejected or failed
    why        TEXT NOT NULL,   -- of a failure
    completion TEXT NOT NULL,
    num_tokens INTEGER NOT NULL,
    version    INTEGER,         -- of the weights of every token; NULL if the server does not say
    time       REAL NOT NULL,
    PRIMARY KEY (evaluation, row, sample)
);
"""

State = Literal["scored", "truncated", "rejected", "failed"]
STATES: tuple[State, ...] = ("scored", "truncated", "rejected", "failed")


@dataclass(frozen=True, slots=True)
class SampleResult:
    row: int
    sample: int
    state: State
    reward: float | None
    why: str = ""
    completion: str = ""
    num_tokens: int = 0
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    id: str
    target: str
    step: int | None
    suite: str
    identity: dict[str, Any]


class ResultStore:
    """with ResultStore("eval.db") as store:
    store.begin(evaluation, rows)
    store.add(evaluation.id, result)
    store.results(evaluation.id)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"--out: folder {self.path.parent} does not exist")
        if not self.path.exists():
            open_private(self.path, "ab").close()
        try:
            self._connection = self._open()
        except sqlite3.Error as error:
            raise ValueError(
                f"--out: {self.path} is not a database of areal eval ({error}); name another file"
            ) from error

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None)
        connection.row_factory = sqlite3.Row
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if found != SCHEMA_VERSION and (found or tables):
            raise sqlite3.DatabaseError(f"format {found}, expected {SCHEMA_VERSION}")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(
            "PRAGMA synchronous=NORMAL"
        )  # a kill loses nothing, a power cut a little
        connection.executescript(_SCHEMA)
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        return connection

    def begin(self, evaluation: Evaluation, rows: Sequence[dict[str, Any]]) -> None:
        """Idempotent."""
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(
                "INSERT OR IGNORE INTO evaluations VALUES (?, ?, ?, ?, ?, ?)",
                (
                    evaluation.id,
                    time.time(),
                    evaluation.target,
                    evaluation.step,
                    evaluation.suite,
                    json.dumps(evaluation.identity, default=str),
                ),
            )
            connection.executemany(
                "INSERT OR IGNORE INTO problems VALUES (?, ?, ?)",
                ((evaluation.id, i, json.dumps(row, default=str)) for i, row in enumerate(rows)),
            )

    def add(self, evaluation: str, result: SampleResult) -> None:
        """A failed sample may be replaced, a scored one stays as it was first seen."""
        self._connection.execute(
            """INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
               ON CONFLICT DO UPDATE SET state = excluded.state, reward = excluded.reward,
                   why = excluded.why, completion = excluded.completion,
                   num_tokens = excluded.num_tokens, version = excluded.version,
                   time = excluded.time
               WHERE samples.state = 'failed'""",
            (
                evaluation,
                result.row,
                result.sample,
                result.state,
                result.reward,
                result.why,
                result.completion.encode("utf-8", "replace").decode(),
                result.num_tokens,
                result.version,
                time.time(),
            ),
        )

    def results(self, evaluation: str) -> list[SampleResult]:
        """By row and sample."""
        rows = self._connection.execute(
            """SELECT row, sample, state, reward, why, completion, num_tokens, version
               FROM samples WHERE evaluation = ? ORDER BY row, sample""",
            (evaluation,),
        )
        return [SampleResult(*row) for row in rows]

    def missing(self, evaluation: str, num_rows: int, num_samples: int) -> list[tuple[int, int]]:
        """(row, sample) that have no result, or failed."""
        done = {(r.row, r.sample) for r in self.results(evaluation) if r.state != "failed"}
        wanted = ((row, sample) for row in range(num_rows) for sample in range(num_samples))
        return [place for place in wanted if place not in done]

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> ResultStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
