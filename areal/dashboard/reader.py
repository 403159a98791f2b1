"""Reads a run's folder: alive, dead, unfinished, damaged or empty, beside other readers.

    with RunReader(folder) as run:             # one snapshot of run.db
        run.summary()                          # state, step, reward, time left
        run.steps(last=20)                     # [StepRow]
        run.tasks(state="failed", limit=50)    # rows of the ledger, newest first
        run.config()                           # the config of the newest start

    find_runs(folder)                          # the folders below it that hold a run.db

Every query is bounded by an index or a limit, so a run of a million prompts answers like a small
one. `UnreadableRunError` names the file and what to do; SQLite's own errors do not leave here.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api.io_struct import FinetuneSpec
from areal.dashboard.columns import RUN_COLUMNS
from areal.rollout.ledger_balance import READ_TASK, STATES
from areal.run.database import SCHEMA_VERSION, describe_holders, open_read_only
from areal.run.paths import RunPaths

_MAX_DEPTH = 4  # of a run below a folder of runs: {fileroot}/{experiment_name}/{trial_name}
_SPEED_STEPS = 20  # newest ones, from which the time left is estimated
_LIFECYCLE = ("started", "resumed", "finished")


class UnreadableRunError(ValueError):
    """The text names the file, the fault and what to do."""


@dataclass(frozen=True, slots=True)
class StepRow:
    step: int  # -1 is before the first
    time: float  # of its end, in Unix seconds
    stats: dict[str, float]

    @property
    def finite(self) -> dict[str, float]:
        """Those statistics that one can add up."""
        return {key: value for key, value in self.stats.items() if math.isfinite(value)}


@dataclass(frozen=True, slots=True)
class RunSummary:
    name: str
    state: str  # running, stopped, finished, empty
    num_steps: int
    total_steps: int | None  # None: not recorded
    reward: float | None  # of the newest step
    eta_s: float | None  # only of a running one
    updated: float | None  # end of the newest step, or the newest event
    process: str  # that runs it, on this machine


class RunReader:
    """One read-only connection, and one snapshot while it is entered."""

    def __init__(self, folder: str | Path) -> None:
        self.paths = RunPaths(Path(folder))
        self._connection: sqlite3.Connection | None = None

    def __enter__(self) -> RunReader:
        with self._clear_errors():
            self._connection = connection = open_read_only(self.paths.database)
            try:
                # Faster than LIKE and instr of SQLite, which compare byte by byte.
                connection.create_function("has_text", 2, has_text, deterministic=True)
                connection.execute("BEGIN")
                self._check(connection)
            except BaseException:
                connection.close()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        assert self._connection is not None
        self._connection.close()

    @property
    def name(self) -> str:
        """experiment/trial."""
        root = self.paths.root.absolute()
        return f"{root.parent.name}/{root.name}"

    def query(self, sql: str, values: tuple[Any, ...] = ()) -> list[sqlite3.Row]:
        assert self._connection is not None, "use it in a with block"
        with self._clear_errors():
            rows = self._connection.execute(sql, values).fetchall()
        fault = RUN_COLUMNS.find_fault(rows)
        if fault:
            raise self._damaged(fault)
        return rows

    def has_table(self, name: str) -> bool:
        found = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
        return bool(self.query(found, (name,)))

    @property
    def is_empty(self) -> bool:
        """A process began to write it, and ended before the first table."""
        return not self.has_table("starts")

    def summary(self) -> RunSummary:
        holder = describe_holders(self.paths.database.with_name("run.db.lock"))
        if self.is_empty:
            return RunSummary(self.name, "empty", 0, None, None, None, None, holder)
        rows = self.steps(last=_SPEED_STEPS)
        done = rows[-1].step + 1 if rows else 0
        total = self.total_steps()
        state = "running" if holder else "finished" if self._has_finished() else "stopped"
        times = [row.finite["timeperf/step"] for row in rows if "timeperf/step" in row.finite]
        eta_s = None
        if state == "running" and total is not None and times:
            eta_s = (total - done) * sum(times) / len(times)
        reward = rows[-1].finite.get("rollout/reward") if rows else None
        updated = [row.time for row in rows[-1:]] + [event["time"] for event in self.events(last=1)]
        return RunSummary(
            self.name, state, done, total, reward, eta_s, max(updated, default=None), holder
        )

    def steps(
        self, *, last: int | None = None, max_points: int | None = None, first: int = -1
    ) -> list[StepRow]:
        """In order. `max_points`: every n-th, and the newest, so that no more are read."""
        if self.is_empty:
            return []
        condition, values = "step >= ?", [first]
        if max_points is not None:
            # The newest step bounds the number of rows, and costs no scan.
            (newest,) = self.query("SELECT max(step) FROM steps")[0]
            every = -(-((newest or 0) + 1 - max(first, 0)) // max_points)
            if every > 1:
                condition += " AND (step % ? = 0 OR step = ?)"
                values += [every, newest]
        sql = f"SELECT step, time, stats FROM steps WHERE {condition} ORDER BY step DESC"
        if last is not None:
            sql += " LIMIT ?"
            values.append(last)
        rows = self.query(sql, tuple(values))
        return [self._step(row) for row in reversed(rows)]

    def step(self, number: int) -> StepRow | None:
        rows = self.query("SELECT step, time, stats FROM steps WHERE step = ?", (number,))
        return self._step(rows[0]) if rows else None

    def _step(self, row: sqlite3.Row) -> StepRow:
        return StepRow(row["step"], row["time"], self._stats(row))

    def _damaged(self, what: str) -> UnreadableRunError:
        return UnreadableRunError(f"{self.paths.database}: {what}: restore a copy of the file")

    def _stats(self, row: sqlite3.Row) -> dict[str, float]:
        try:
            stats = json.loads(row["stats"])
        except (ValueError, RecursionError) as error:
            stats, found = None, f"are not JSON ({error})"
        else:
            found = f"are a {type(stats).__name__}, expected an object"
        if not isinstance(stats, dict):
            raise self._damaged(f"the statistics of step {row['step']} {found}")
        for name, value in stats.items():
            if not _is_number(value):
                what = f"{name[:60]!r} of step {row['step']} is {value!r:.60}, expected a number"
                raise self._damaged(what)
        return stats

    def counts(self) -> dict[str, int]:
        """Prompts by state."""
        counts: dict[str, int] = dict.fromkeys(STATES, 0)
        if self.is_empty:
            return counts
        # Nearly all prompts are trained. Numbers of prompts have no gaps (ledger_balance.py), so
        # the trained ones need not be counted.
        (newest,) = self.query("SELECT max(task_id) FROM tasks")[0]
        for state in STATES:
            if state != "trained":
                sql = "SELECT count(*) FROM tasks WHERE state = ?"
                (counts[state],) = self.query(sql, (state,))[0]
        total = 0 if newest is None else newest + 1
        return counts | {"trained": max(0, total - sum(counts.values()))}

    def tasks(
        self,
        *,
        state: str | None = None,
        step: int | None = None,
        before: int | None = None,
        limit: int = 50,
    ) -> list[dict[str, Any]]:
        """Rows of the ledger, newest first; `before` is the task id that ended the last page."""
        if self.is_empty:
            return []
        given = {"state = ?": state, "step = ?": step, "task_id < ?": before}
        wanted = {condition: value for condition, value in given.items() if value is not None}
        where = f"WHERE {' AND '.join(wanted)}" if wanted else ""
        sql = f"SELECT * FROM tasks {where} ORDER BY task_id DESC LIMIT ?"
        return [dict(row) for row in self.query(sql, (*wanted.values(), limit))]

    def task(self, task_id: int) -> dict[str, Any] | None:
        """The row of one prompt; None if it was never issued."""
        if self.is_empty:
            return None
        rows = self.query(READ_TASK, (task_id,))
        return dict(rows[0]) if rows else None

    def events(self, *, last: int = 100) -> list[dict[str, Any]]:
        if self.is_empty:
            return []
        rows = self.query("SELECT time, kind, text FROM events ORDER BY id DESC LIMIT ?", (last,))
        return [dict(row) for row in reversed(rows)]

    def config_text(self) -> str:
        """YAML of the newest start; empty before the first."""
        if self.is_empty:
            return ""
        rows = self.query("SELECT config FROM starts ORDER BY id DESC LIMIT 1")
        return rows[0]["config"] if rows else ""

    def config(self) -> dict[str, Any]:
        """Dotted key -> value of the newest start; empty before the first."""
        import yaml

        # The C loader is ten times as fast, where PyYAML was built with it.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            tree = yaml.load(self.config_text(), Loader=loader)
        except yaml.YAMLError as error:
            line = " ".join(str(error).split())
            raise UnreadableRunError(
                f"{self.paths.database}: the config of its start is not YAML ({line})"
            ) from error
        return dict(_flat(tree)) if isinstance(tree, dict) else {}

    def total_steps(self) -> int | None:
        """Of the newest start; None if it is not recorded."""
        if self.is_empty:
            return None
        starts = self.query("SELECT dataset_size FROM starts ORDER BY id DESC LIMIT 1")
        config = self.config() if starts else {}
        batch_size, epochs = (
            config.get("train_dataset.batch_size"),
            config.get("total_train_epochs"),
        )
        if not isinstance(batch_size, int) or not isinstance(epochs, int) or batch_size < 1:
            return None
        bounds = [config.get("total_train_steps")]
        if isinstance(num_seqs := config.get("total_train_n_seqs"), int):
            bounds.append(num_seqs // batch_size)
        bound = min((one for one in bounds if isinstance(one, int)), default=None)
        num_rows = starts[0]["dataset_size"]
        return FinetuneSpec(epochs, num_rows, batch_size, bound).total_train_steps

    def _has_finished(self) -> bool:
        marks = ", ".join("?" * len(_LIFECYCLE))
        rows = self.query(
            f"SELECT kind FROM events WHERE kind IN ({marks}) ORDER BY id DESC LIMIT 1", _LIFECYCLE
        )
        return bool(rows) and rows[0]["kind"] == "finished"

    def _check(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):
            raise UnreadableRunError(
                f"{self.paths.database} has format {version}, this areal reads {SCHEMA_VERSION}: "
                "look at it with the areal that wrote it"
            )

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise UnreadableRunError(
                f"cannot read {self.paths.database}: {error} (restore a copy of it, with its -wal "
                "where there is one)"
            ) from error


def has_text(text: str, lower_part: str) -> bool:
    """For SQL."""
    return lower_part in text.lower()


def find_runs(folder: str | Path) -> list[Path]:
    """Folders with a run.db, `folder` itself or at most four levels below; sorted."""
    root = Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"no folder {root}: give a run's folder, or one that holds runs")
    return sorted(one for one in folders_below(root) if RunPaths(one).database.is_file())


def folders_below(folder: Path, depth: int = _MAX_DEPTH) -> Iterator[Path]:
    """`folder` and those below, but not inside a run, hidden ones or those of another user."""
    yield folder
    if depth == 0 or RunPaths(folder).database.is_file():
        return
    try:
        entries = list(os.scandir(folder))
    except (PermissionError, FileNotFoundError):  # of another user, or just deleted
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            yield from folders_below(Path(entry.path), depth - 1)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_number(value: Any) -> bool:
    """That a float can hold: also NaN and infinity, as a run may have computed them."""
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max and not isinstance(value, bool)
    return isinstance(value, float)
