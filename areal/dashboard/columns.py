"""What the columns of run.db and eval.db hold, checked in every row that is read.

SQLite keeps a value of any kind in a column of any type. A damaged or foreign file is named here
once, instead of failing wherever a view computes with the value.

    columns = Columns(texts=..., numbers=..., times=..., optional=...)
    fault = columns.find_fault(rows)      # "reward of task_id 7 is b'..', expected a number", or ""
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LAST_SECOND = 253_402_300_799.0  # of the year 9999


@dataclass(frozen=True, slots=True)
class Columns:
    """Names by what they hold. Others may hold anything, like the results of functions."""

    texts: frozenset[str]
    numbers: frozenset[str]
    times: frozenset[str]  # Unix seconds
    optional: frozenset[str]  # of the above: may also be NULL

    def find_fault(self, rows: Sequence[sqlite3.Row]) -> str:
        """What is wrong with the first value of another kind; empty if all fit."""
        names = rows[0].keys() if rows else []
        for number, name in enumerate(names):
            expected = self._expected(name)
            if expected is None:
                continue
            kinds = (str,) if name in self.texts else (int, float)
            if name in self.optional:
                kinds = (*kinds, type(None))
            is_time = name in self.times
            for row in rows:
                value = row[number]
                if not isinstance(value, kinds) or (is_time and not _is_time(value)):
                    where = f" of {names[0]} {row[0]!r:.40}" if number else ""
                    return f"{name}{where} is {value!r:.60}, {expected}"
        return ""

    def _expected(self, name: str) -> str | None:
        if name in self.texts:
            return "expected a text"
        if name in self.times:
            return "expected Unix seconds"
        return "expected a number" if name in self.numbers else None


def _is_time(value: Any) -> bool:
    return value is None or 0 <= value <= _LAST_SECOND


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


RUN_COLUMNS = Columns(
    texts=_names("state why prompt output text stats config world kind"),
    numbers=_names(
        "task_id epoch row attempts issued_version head_version tail_version closed_version step "
        "reward sample episode length is_cut token_id dataset_size id"
    ),
    times=_names("time issued_at finished_at closed_at"),
    optional=_names("head_version tail_version closed_version step reward finished_at closed_at"),
)
EVAL_COLUMNS = Columns(
    texts=_names("id target suite state why completion data"),
    numbers=_names("step row sample reward num_tokens version"),
    times=_names("time"),
    optional=_names("step reward version data"),  # of a sample whose row is not stored
)
