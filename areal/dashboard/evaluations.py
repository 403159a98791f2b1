"""Reads the databases of `areal eval`: every evaluation with its numbers, and its samples.

    find_evaluations(folder)                       # files eval.db, in it and below
    list_evaluations(file)                         # one row per evaluation, newest first
    find_results(file, ResultFilter("3f…", state="failed"))

As in `areal eval`, a sample that failed or was rejected counts as reward 0 in the mean. The mean is
of the samples that are stored so far: `areal eval` gives the metrics with their intervals.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.api.json_text import JsonError, loads
from areal.dashboard.columns import EVAL_COLUMNS
from areal.dashboard.reader import UnreadableRunError, folders_below, has_text
from areal.evaluation.store import SCHEMA_VERSION
from areal.run.database import open_read_only

DATABASE = "eval.db"  # what `areal eval` calls its file unless told otherwise
_SHOWN_CHARS = 4000  # of a text


@dataclass(frozen=True, slots=True)
class ResultFilter:
    """None and "": any."""

    evaluation: str
    state: str = ""
    min_reward: float | None = None
    max_reward: float | None = None
    text: str = ""  # in the problem or the completion, whatever the case
    limit: int = 50
    offset: int = 0


def find_evaluations(root: Path) -> list[Path]:
    """`root` itself if it is such a file, else those in it and at most four levels below."""
    if root.is_file():
        return [root]
    files = (folder / DATABASE for folder in folders_below(root))
    return sorted(file for file in files if file.is_file())


def list_evaluations(file: Path) -> list[dict[str, Any]]:
    with _opened(file) as connection:
        evaluations = connection.execute(
            "SELECT id, time, target, step, suite FROM evaluations ORDER BY time DESC, id"
        ).fetchall()
        sums = connection.execute(
            """SELECT evaluation, state, count(*), total(reward), sum(num_tokens)
               FROM samples GROUP BY evaluation, state"""
        ).fetchall()
        problems = dict(
            connection.execute(
                "SELECT evaluation, count(DISTINCT row) FROM samples GROUP BY evaluation"
            ).fetchall()
        )
    _check(file, evaluations)
    found = []
    for row in evaluations:
        own = [one for one in sums if one[0] == row["id"]]
        count = sum(one[2] for one in own)
        found.append(
            {
                **dict(row),
                "samples": count,
                "problems": problems.get(row["id"], 0),
                "counts": {one[1]: one[2] for one in own},
                "reward": _finite(sum(one[3] for one in own) / count) if count else None,
                "tokens": _finite(sum(one[4] for one in own)),
            }
        )
    return found


def find_results(file: Path, wanted: ResultFilter) -> list[dict[str, Any]]:
    """By problem and sample. `problem` is the row of the suite as text."""
    conditions: dict[str, Any] = {"samples.evaluation = ?": wanted.evaluation}
    if wanted.state:
        conditions["state = ?"] = wanted.state
    if wanted.min_reward is not None:
        conditions["reward >= ?"] = wanted.min_reward
    if wanted.max_reward is not None:
        conditions["reward <= ?"] = wanted.max_reward
    where, values = " AND ".join(conditions), list(conditions.values())
    if wanted.text:
        where += " AND (has_text(data, ?) OR has_text(completion, ?))"
        values += [wanted.text.lower()] * 2
    sql = f"""
        SELECT row, sample, state, reward, why, num_tokens, version,
               substr(completion, 1, {_SHOWN_CHARS}) AS completion, data
        FROM samples LEFT JOIN problems USING (evaluation, row)
        WHERE {where} ORDER BY row, sample LIMIT ? OFFSET ?"""
    with _opened(file) as connection:
        rows = connection.execute(sql, (*values, wanted.limit, wanted.offset)).fetchall()
    _check(file, rows)
    return [_result(row) for row in rows]


def _check(file: Path, rows: list[sqlite3.Row]) -> None:
    fault = EVAL_COLUMNS.find_fault(rows)
    if fault:
        raise UnreadableRunError(f"{file}: {fault}: restore a copy of the file")


def _result(row: sqlite3.Row) -> dict[str, Any]:
    facts = {key: value for key, value in dict(row).items() if key != "data"}
    return {**facts, "reward": _finite(row["reward"]), "problem": _problem(row["data"])}


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None


def _problem(data: str | None) -> str:
    """The last message of a chat, or what else the row has."""
    try:
        row = loads(data or "{}")
    except JsonError:
        return (data or "")[:_SHOWN_CHARS]
    messages = row.get("messages") if isinstance(row, dict) else None
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        content = messages[-1].get("content")
        if isinstance(content, str):
            return content[:_SHOWN_CHARS]
    return json.dumps(row, ensure_ascii=False)[:_SHOWN_CHARS]


@contextmanager
def _opened(file: Path) -> Iterator[sqlite3.Connection]:
    try:
        connection = open_read_only(file)
        try:
            connection.create_function("has_text", 2, has_text, deterministic=True)
            connection.execute("BEGIN")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA_VERSION:
                raise UnreadableRunError(
                    f"{file} has format {version}, this areal reads {SCHEMA_VERSION}: look at it "
                    "with the areal that wrote it"
                )
            yield connection
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise UnreadableRunError(
            f"cannot read {file}: {error}; is it a database of areal eval?"
        ) from error
