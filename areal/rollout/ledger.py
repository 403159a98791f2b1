"""The durable record of every prompt: one row, one state, from issue to its end.

    issued --> finished --> trained@step
      |  |         `------> stale
      |  `--> rejected: why
      `-----> failed: why

In: state changes from the executor and the trainer. Out: after a crash, `rewind` says which tasks
to issue again and which finished trajectories are still valid. A trajectory is stored in the
transaction that makes its task `finished`, so neither exists without the other.

Invariant: each write names the state it leaves, and fails as a whole if any task is not in it;
nothing can be trained twice or end twice. Many tasks per transaction keep it under 0.1 ms a task.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal.api.redact import hide_secrets
from areal.rollout.buffer import FinishedGroup, Outcome
from areal.rollout.ledger_balance import read_balance
from areal.rollout.trajectory import decode, encode, mean_reward

if TYPE_CHECKING:
    import sqlite3

    from areal.rollout.source import Prompt
    from areal.run.database import RunDatabase


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a prompt stream resumes. The default is a fresh start."""

    version: int = 0
    next_task_id: int = 0  # first prompt never issued
    reissue: list[int] = field(default_factory=list)  # ascending
    finished: list[FinishedGroup] = field(default_factory=list)
    rejected: list[FinishedGroup] = field(default_factory=list)  # not yet in a dynamic batch


class Ledger:
    """Writes the tables `tasks` and `trajectories`; any thread."""

    def __init__(self, db: RunDatabase) -> None:
        self._db = db

    def issue(self, prompts: Sequence[Prompt], version: int) -> None:
        """Prompts about to run; one already `issued` (after a rewind) counts another attempt."""
        now = time.time()
        rows = [(prompt.task_id, prompt.epoch, prompt.row, version, now) for prompt in prompts]
        with self._db.transaction() as connection:
            _write(
                connection,
                """INSERT INTO tasks (task_id, epoch, row, state, issued_version, issued_at)
                   VALUES (?, ?, ?, 'issued', ?, ?)
                   ON CONFLICT (task_id) DO UPDATE SET attempts = attempts + 1,
                       issued_version = excluded.issued_version, issued_at = excluded.issued_at
                   WHERE state = 'issued'""",
                rows,
                "issued or new",
            )

    def settle(self, outcomes: Sequence[Outcome], version: int) -> None:
        """Record ended groups in one transaction. Only finished ones keep a trajectory."""
        now = time.time()
        rows: list[tuple[Any, ...]] = []
        blobs: list[tuple[int, bytes]] = []
        for outcome in outcomes:
            reward = None if outcome.trajectory is None else mean_reward(outcome.trajectory)
            closed = None if outcome.state == "finished" else version
            closed_at = None if outcome.state == "finished" else now
            span = outcome.head_version, outcome.tail_version
            why = hide_secrets(outcome.why) if outcome.why else ""
            rows.append(
                (outcome.state, why, *span, reward, now, closed, closed_at, outcome.task_id)
            )
            if outcome.state == "finished":
                assert outcome.trajectory is not None
                blobs.append((outcome.task_id, encode(outcome.trajectory)))
        with self._db.transaction() as connection:
            _write(
                connection,
                """UPDATE tasks SET state = ?, why = ?, head_version = ?, tail_version = ?,
                       reward = ?, finished_at = ?, closed_version = ?, closed_at = ?
                   WHERE task_id = ? AND state = 'issued'""",
                rows,
                "issued",
            )
            connection.executemany("INSERT INTO trajectories VALUES (?, ?)", blobs)

    def trained(
        self, task_ids: Sequence[int], step: int, version: int, *, dropped: Sequence[int] = ()
    ) -> None:
        """The weights now include the batch of `step`, which was sampled for `version`.

        `dropped` are the rejected groups counted in a dynamic batch.
        """
        now = time.time()
        with self._db.transaction() as connection:
            _write(
                connection,
                """UPDATE tasks SET state = 'trained', step = ?, closed_version = ?, closed_at = ?
                   WHERE task_id = ? AND state = 'finished'""",
                [(step, version, now, task_id) for task_id in task_ids],
                "finished",
            )
            _write(
                connection,
                "UPDATE tasks SET step = ? WHERE task_id = ? AND state = 'rejected'",
                [(step, task_id) for task_id in dropped],
                "rejected",
            )

    def stale(self, task_ids: Sequence[int], version: int) -> None:
        """Finished groups found too old for a step of `version`."""
        now = time.time()
        with self._db.transaction() as connection:
            _write(
                connection,
                """UPDATE tasks SET state = 'stale', closed_version = ?, closed_at = ?
                   WHERE task_id = ? AND state = 'finished'""",
                [(version, now, task_id) for task_id in task_ids],
                "finished",
            )
            connection.executemany(
                "DELETE FROM trajectories WHERE task_id = ?", [(task_id,) for task_id in task_ids]
            )

    def rewind(self, step: int, version: int) -> Resume:
        """Roll the ledger back to the weights saved after `step` as `version`.

        A task that later weights generated or trained on is issued again, unless its trajectory is
        stored and has no token newer than `version`: then it is `finished`. A failure at `version`
        or later is issued again. A run without a recover point calls `rewind(-1, 0)`.
        """
        where = {"step": step, "version": version}
        with self._db.transaction() as connection:
            connection.execute(_REOPEN, where)
            connection.execute(_UNTRAIN, where)
            connection.execute(
                "UPDATE tasks SET step = NULL WHERE state = 'rejected' AND step > :step", where
            )
            _delete_trajectories(connection, "state = 'issued'")
        return self._resume(version)

    def issue_again(self, task_ids: Sequence[int]) -> None:
        """Undo ended groups that exceed the capacity of a resumed run."""
        with self._db.transaction() as connection:
            _write(
                connection,
                f"""UPDATE tasks SET {_ISSUED}
                    WHERE task_id = ? AND state IN ('finished', 'rejected')""",
                [(task_id,) for task_id in task_ids],
                "finished or rejected",
            )
            _delete_trajectories(connection, "state = 'issued'")

    def prune(self, step: int) -> None:
        """Delete trajectories trained at or before `step`: no recover point needs them any more."""
        with self._db.transaction() as connection:
            _delete_trajectories(connection, f"state = 'trained' AND step <= {int(step)}")

    def balance(self) -> dict[str, int]:
        """Tasks per state and in total; RuntimeError if the tables are inconsistent."""
        with self._db.transaction() as connection:
            return read_balance(connection)

    def _resume(self, version: int) -> Resume:
        waiting = self._db.query(
            """SELECT task_id, issued_version, head_version, data
               FROM tasks LEFT JOIN trajectories USING (task_id)
               WHERE state = 'finished' OR (state = 'rejected' AND step IS NULL)
               ORDER BY task_id"""
        )
        results = [
            FinishedGroup(
                row["task_id"],
                row["issued_version"],
                row["head_version"],
                None if row["data"] is None else decode(row["data"]),
            )
            for row in waiting
        ]
        issued = self._db.query("SELECT task_id FROM tasks WHERE state = 'issued' ORDER BY task_id")
        last = self._db.query("SELECT max(task_id) AS task_id FROM tasks")[0]["task_id"]
        return Resume(
            version=version,
            next_task_id=0 if last is None else last + 1,
            reissue=[row["task_id"] for row in issued],
            finished=[result for result in results if result.trajectory is not None],
            rejected=[result for result in results if result.trajectory is None],
        )


_ISSUED = """state = 'issued', why = '', head_version = NULL, tail_version = NULL,
    closed_version = NULL, step = NULL, reward = NULL, finished_at = NULL, closed_at = NULL"""
# Tasks done with weights after the recover point go back to `issued`.
_REOPEN = f"""
UPDATE tasks SET {_ISSUED}
WHERE (state IN ('finished', 'trained', 'rejected') AND tail_version > :version)
   OR (state = 'trained' AND step > :step AND task_id NOT IN (SELECT task_id FROM trajectories))
   OR (state = 'stale' AND closed_version > :version)
   OR (state = 'failed' AND closed_version >= :version)
"""
# The remaining tasks of steps after the recover point: valid trajectories, to be batched again.
_UNTRAIN = """
UPDATE tasks SET state = 'finished', step = NULL, closed_version = NULL, closed_at = NULL
WHERE state = 'trained' AND step > :step
"""


def _write(
    connection: sqlite3.Connection, sql: str, rows: Sequence[tuple[Any, ...]], expected: str
) -> None:
    """One statement for many rows; each must update a row, or the transaction rolls back."""
    if not rows:
        return
    changed = connection.executemany(sql, rows).rowcount
    if changed != len(rows):
        raise RuntimeError(
            f"ledger: {len(rows) - changed} of {len(rows)} tasks were not {expected}; "
            "a task would have ended twice"
        )


def _delete_trajectories(connection: sqlite3.Connection, condition: str) -> None:
    # CROSS fixes the join order: few trajectories first, then their tasks. SQLite's planner would
    # scan all tasks of a state, whose number grows with the run.
    connection.execute(
        f"""DELETE FROM trajectories WHERE task_id IN
            (SELECT task_id FROM trajectories CROSS JOIN tasks USING (task_id) WHERE {condition})"""
    )
