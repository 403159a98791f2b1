"""Reads what the ledger's tables add up to, beside a live run as well.

    counts = read_balance(read_only_connection)       # RuntimeError if the tables are inconsistent

Loads no torch: `areal ledger` answers at once.
"""

from __future__ import annotations

import sqlite3

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
# Every step trains on at least one prompt, also with a dynamic batch: steps are 0, 1, ... without
# gaps, and statistics of a step follow its prompts. An offline run (SFT, ...) has no tasks.
_STEP_FAULTS = {
    "trained steps come after a step that trained on nothing": """
        SELECT DISTINCT step FROM tasks WHERE state = 'trained' AND step > 0 AND step - 1 NOT IN
        (SELECT step FROM tasks WHERE state = 'trained')""",
    "recorded steps trained on nothing": """
        SELECT step FROM steps WHERE step >= 0 AND EXISTS (SELECT 1 FROM tasks) AND step NOT IN
        (SELECT step FROM tasks WHERE state = 'trained')""",
}


def read_balance(connection: sqlite3.Connection) -> dict[str, int]:
    """Tasks per state and in total; RuntimeError if the tables are inconsistent."""
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
    """(state, why, number of prompts) of prompts that ended untrained."""
    rows = connection.execute(
        """SELECT state, why, count(*) FROM tasks WHERE state IN ('rejected', 'stale', 'failed')
           GROUP BY state, why ORDER BY count(*) DESC"""
    )
    return [tuple(row) for row in rows]


READ_TASK = """SELECT tasks.*, trajectories.task_id IS NOT NULL AS trajectory_kept
    FROM tasks LEFT JOIN trajectories USING (task_id) WHERE task_id = ?"""


def read_task(connection: sqlite3.Connection, task_id: int) -> dict[str, object] | None:
    """The row of one prompt; None if it was never issued."""
    found = connection.execute(READ_TASK, (task_id,)).fetchone()
    return None if found is None else dict(found)


def read_trained(connection: sqlite3.Connection, step: int) -> list[tuple[int, bytes | None]]:
    """(task id, stored trajectory or None if pruned) of the batch of `step`, in batch order."""
    # A batch is in prompt order (`select_batch`), so the order need not be stored.
    rows = connection.execute(
        """SELECT task_id, data FROM tasks LEFT JOIN trajectories USING (task_id)
           WHERE state = 'trained' AND step = ? ORDER BY task_id""",
        (step,),
    )
    return [tuple(row) for row in rows]


def read_sampled_by(connection: sqlite3.Connection, version: int, limit: int) -> list[bytes]:
    """Stored trajectories, trained on or not yet, that may have tokens of `version`."""
    rows = connection.execute(
        """SELECT data FROM trajectories CROSS JOIN tasks USING (task_id)
           WHERE ? BETWEEN head_version AND tail_version ORDER BY task_id LIMIT ?""",
        (version, limit),
    )
    return [data for (data,) in rows]


def steps_with_trajectories(connection: sqlite3.Connection) -> set[int]:
    """The steps whose whole batch is still stored."""
    # CROSS: few trajectories first. Pruning removes a step as a whole, so one trajectory is proof.
    rows = connection.execute(
        """SELECT DISTINCT step FROM trajectories CROSS JOIN tasks USING (task_id)
           WHERE state = 'trained'"""
    )
    return {step for (step,) in rows}
