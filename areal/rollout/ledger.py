"""The durable record of every prompt: one row, one state, from issue to its end.

    issued --> finished --> trained@step
      |  |         `------> stale
      |  `--> rejected: why
      `-----> failed: why

In: what the executor and the trainer did. Out: after a crash, `rewind` says what to issue again and
which finished trajectories are still good. A trajectory is stored in the transaction that makes its
task `finished`, so there is no moment at which one exists without the other.

Invariant: each write names the state it leaves, and fails as a whole if any task is not in it;
nothing can be trained twice or end twice. Many tasks per transaction keep it under 0.1 ms a task.

What the ledger's tables add up to: read by the run itself and by anybody beside it.

    counts = balance(read_only_connection)       # raises when the books do not agree

Only reads, and loads no torch: `areal ledger` looks at a run that is going on.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal.api.redact import hide_secrets
from areal.rollout.buffer import Finished, Outcome
from areal.rollout.trajectory import decode, encode, mean_reward

if TYPE_CHECKING:
    import sqlite3

    from areal.rollout.source import Prompt
    from areal.run.database import RunDatabase


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a prompt stream goes on. The default is a fresh start."""

    version: int = 0
    next_task_id: int = 0  # first prompt never issued
    reissue: list[int] = field(default_factory=list)  # ascending
    finished: list[Finished] = field(default_factory=list)
    rejected: list[Finished] = field(default_factory=list)  # not yet counted in a dynamic batch


class Ledger:
    """Writes the tables `tasks` and `trajectories`; any thread."""

    def __init__(self, db: RunDatabase) -> None:
        self._db = db

    def issue(self, prompts: Sequence[Prompt], version: int) -> None:
        """Prompts about to run. One that is `issued` already (after a rewind) counts an attempt."""
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
        """Running groups that ended, in one transaction. Only finished ones keep a trajectory."""
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
        """The batch of `step`, sampled for the weights of `version`, is in the weights now.

        `dropped` are the rejected groups a dynamic batch used up.
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
        """Make the ledger agree with weights saved after `step` as `version`.

        What later weights wrote or trained on did not happen: such a task is issued again, unless
        its trajectory is stored and was written by weights up to `version`, which makes it good as
        it is. A failure at `version` or later gets another chance.
        A run without a recover point calls `rewind(-1, 0)`.
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
        """Groups that ended, but for which a run that resumes has no room; their work is undone."""
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
        """Forget trajectories trained at or before `step`: no recover point needs them any more."""
        with self._db.transaction() as connection:
            _delete_trajectories(connection, f"state = 'trained' AND step <= {int(step)}")

    def balance(self) -> dict[str, int]:
        """Tasks per state and in all; raises RuntimeError if the books do not agree."""
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
            Finished(
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
# Work whose weights are gone goes back to `issued`.
_REOPEN = f"""
UPDATE tasks SET {_ISSUED}
WHERE (state IN ('finished', 'trained', 'rejected') AND tail_version > :version)
   OR (state = 'trained' AND step > :step AND task_id NOT IN (SELECT task_id FROM trajectories))
   OR (state = 'stale' AND closed_version > :version)
   OR (state = 'failed' AND closed_version >= :version)
"""
# What is left of the steps after the recover point: fresh trajectories that wait for a batch again.
_UNTRAIN = """
UPDATE tasks SET state = 'finished', step = NULL, closed_version = NULL, closed_at = NULL
WHERE state = 'trained' AND step > :step
"""


def _write(
    connection: sqlite3.Connection, sql: str, rows: Sequence[tuple[Any, ...]], expected: str
) -> None:
    """One statement for many rows; every row must hit, or the transaction is undone."""
    if not rows:
        return
    changed = connection.executemany(sql, rows).rowcount
    if changed != len(rows):
        raise RuntimeError(
            f"ledger: {len(rows) - changed} of {len(rows)} tasks were not {expected}; "
            "a task would have ended twice"
        )


def _delete_trajectories(connection: sqlite3.Connection, condition: str) -> None:
    # CROSS: from the trajectories, which are few, to their tasks. Left to choose, SQLite would go
    # through all tasks of a state, and those are as many as the run is long.
    connection.execute(
        f"""DELETE FROM trajectories WHERE task_id IN
            (SELECT task_id FROM trajectories CROSS JOIN tasks USING (task_id) WHERE {condition})"""
    )


STATES = ("issued", "finished", "trained", "rejected", "stale", "failed")

_FAULTS = {
    "task ids are missing before": """
        SELECT task_id FROM tasks WHERE task_id > 0
        AND task_id - 1 NOT IN (SELECT task_id FROM tasks)""",
    "finished tasks have no trajectory": """
        SELECT task_id FROM tasks WHERE state = 'finished'
        AND task_id NOT IN (SELECT task_id FROM trajectories)""",
    "trajectories belong to no finished or trained task": """
        SELECT task_id FROM trajectories WHERE task_id NOT IN
        (SELECT task_id FROM tasks WHERE state IN ('finished', 'trained'))""",
    "trained tasks have no step, or untrained ones have": """
        SELECT task_id FROM tasks WHERE (state = 'trained' AND step IS NULL)
        OR (state NOT IN ('trained', 'rejected') AND step IS NOT NULL)""",
    "ended tasks lack the version of their end": """
        SELECT task_id FROM tasks
        WHERE (state IN ('issued', 'finished')) = (closed_version IS NOT NULL)""",
}
# Every step trains on one prompt at least, also a dynamic batch: steps are 0, 1, ... without a
# hole, and the statistics of a step come after its prompts. A run of rows has no prompts.
_STEP_FAULTS = {
    "trained steps come after a step that trained on nothing": """
        SELECT DISTINCT step FROM tasks WHERE state = 'trained' AND step > 0 AND step - 1 NOT IN
        (SELECT step FROM tasks WHERE state = 'trained')""",
    "recorded steps trained on nothing": """
        SELECT step FROM steps WHERE step >= 0 AND EXISTS (SELECT 1 FROM tasks) AND step NOT IN
        (SELECT step FROM tasks WHERE state = 'trained')""",
}


def read_balance(connection: sqlite3.Connection) -> dict[str, int]:
    """Tasks per state and in all; RuntimeError if the books do not agree."""
    counts = dict.fromkeys(STATES, 0)
    for state, count in connection.execute("SELECT state, count(*) FROM tasks GROUP BY state"):
        counts[state] = count
    for kind, faults in (("tasks", _FAULTS), ("steps", _STEP_FAULTS)):
        for fault, sql in faults.items():
            found = sorted(number for (number,) in connection.execute(sql))
            if found:
                raise RuntimeError(
                    f"the ledger does not balance: {len(found)} {fault}, e.g. {kind} {found[:5]}"
                )
    return counts | {"total": sum(counts.values())}


def read_reasons(connection: sqlite3.Connection) -> list[tuple[str, str, int]]:
    """(state, why, number of prompts) of those that ended without being trained on."""
    rows = connection.execute(
        """SELECT state, why, count(*) FROM tasks WHERE state IN ('rejected', 'stale', 'failed')
           GROUP BY state, why ORDER BY count(*) DESC"""
    )
    return [tuple(row) for row in rows]


def read_task(connection: sqlite3.Connection, task_id: int) -> dict[str, object] | None:
    """All that is known of one prompt; None when it was never issued."""
    found = connection.execute(
        """SELECT tasks.*, trajectories.task_id IS NOT NULL AS trajectory_kept
           FROM tasks LEFT JOIN trajectories USING (task_id) WHERE task_id = ?""",
        (task_id,),
    ).fetchone()
    return None if found is None else dict(found)


def read_trained(connection: sqlite3.Connection, step: int) -> list[tuple[int, bytes | None]]:
    """(task id, stored trajectory) of the batch of `step` in its order; None: forgotten since."""
    # A batch is in prompt order (selection.py), so the order need not be stored.
    rows = connection.execute(
        """SELECT task_id, data FROM tasks LEFT JOIN trajectories USING (task_id)
           WHERE state = 'trained' AND step = ? ORDER BY task_id""",
        (step,),
    )
    return [tuple(row) for row in rows]


def steps_with_trajectories(connection: sqlite3.Connection) -> set[int]:
    """The steps whose whole batch is still stored."""
    # From the trajectories, which are few; a trained task without one was forgotten with its step.
    rows = connection.execute(
        """SELECT DISTINCT step FROM trajectories CROSS JOIN tasks USING (task_id)
           WHERE state = 'trained'"""
    )
    return {step for (step,) in rows}
