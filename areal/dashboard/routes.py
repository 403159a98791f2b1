"""The JSON routes of the dashboard: a path and a query in, a JSON value out. No HTTP here, so that
the server, the exported page and the benchmark ask the same thing.

    routes = Routes([Path("runs")])
    routes.answer("runs", {})
    routes.answer("run/0/samples", {"min_reward": "1", "text": "boxed"})
    routes.answer("evals", {})

ValueError: a query that cannot be answered (HTTP 400). LookupError: nothing is there (404).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from areal.dashboard import views
from areal.dashboard.evaluations import (
    ResultFilter,
    find_evaluations,
    find_results,
    list_evaluations,
)
from areal.dashboard.reader import RunReader, UnreadableRunError, find_runs
from areal.dashboard.samples import SampleFilter
from areal.evaluation.store import STATES as RESULT_STATES
from areal.rollout.ledger_balance import STATES

Query = Mapping[str, str]
_MAX_LIMIT = 500
_MAX_STEPS = 10_000


class Routes:
    """Runs and files of evaluations are numbered as they are found; a number stays.

    `roots`: folders, or files of `areal eval`.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = list(roots)
        self._folders: list[Path] = []
        self._eval_files: list[Path] = []
        self.find()

    @property
    def num_runs(self) -> int:
        return len(self._folders)

    @property
    def num_eval_files(self) -> int:
        return len(self._eval_files)

    def find(self) -> None:
        """Also what was started since the last call."""
        for root in self._roots:
            runs = [] if root.is_file() else find_runs(root)
            self._folders += [one for one in runs if one not in self._folders]
            files = find_evaluations(root)
            self._eval_files += [one for one in files if one not in self._eval_files]

    def answer(self, path: str, query: Query) -> Any:
        match path.split("/"):
            case ["runs"]:
                self.find()
                runs = enumerate(self._folders)
                return [{"id": number, **views.describe_run(one)} for number, one in runs]
            case ["diff"]:
                with (
                    self._run(query.get("first", "")) as one,
                    self._run(query.get("second", "")) as other,
                ):
                    return views.diff(one, other)
            case ["evals"]:
                return [_evaluations(number, file) for number, file in enumerate(self._eval_files)]
            case ["eval", number, "results"]:
                if not number.isdecimal() or int(number) >= self.num_eval_files:
                    raise LookupError(f"no file {number[:20]!r}: /api/evals lists the numbers")
                return _results(self._eval_files[int(number)], query)
            case ["run", number, view, *rest] if view in _VIEWS:
                with self._run(number) as run:
                    value = _VIEWS[view](run, rest, query)
                if value is None and view in _ITEMS:
                    raise LookupError(f"{path}: not recorded")
                return value
        raise LookupError(f"{path}: no such view")

    def _run(self, number: str) -> RunReader:
        if not number.isdecimal() or int(number) >= self.num_runs:
            raise LookupError(f"no run {number[:20]!r}: /api/runs lists the numbers")
        return RunReader(self._folders[int(number)])


def _evaluations(number: int, file: Path) -> dict[str, Any]:
    """One unreadable file must not hide the others."""
    try:
        found, fault = list_evaluations(file), ""
    except (UnreadableRunError, FileNotFoundError) as error:
        found, fault = [], str(error)
    return {"id": number, "file": str(file), "fault": fault, "evaluations": found}


def _results(file: Path, query: Query) -> Any:
    state = query.get("state", "")
    if state and state not in RESULT_STATES:
        expected = ", ".join(RESULT_STATES)
        raise ValueError(f"state: expected one of {expected}, got {state[:40]!r}")
    limit = _whole(query, "limit")
    wanted = ResultFilter(
        evaluation=query.get("evaluation", ""),
        state=state,
        min_reward=_number(query, "min_reward"),
        max_reward=_number(query, "max_reward"),
        text=query.get("text", ""),
        limit=min(_MAX_LIMIT, 50 if limit is None else limit),
        offset=_whole(query, "offset") or 0,
    )
    return {"results": find_results(file, wanted), "limit": wanted.limit}


def _prompts(run: RunReader, rest: list[str], query: Query) -> Any:
    state = query.get("state") or None
    if state is not None and state not in STATES:
        raise ValueError(f"state: expected one of {', '.join(STATES)}, got {state[:40]!r}")
    return views.prompts(run, state, _whole(query, "step"), _whole(query, "before"))


def _samples(run: RunReader, rest: list[str], query: Query) -> Any:
    given: dict[str, Any] = {}
    for field in fields(SampleFilter):
        if field.name in ("text", "state"):
            given[field.name] = query.get(field.name, "")
        elif field.name.endswith("reward"):
            given[field.name] = _number(query, field.name)
        else:
            given[field.name] = _whole(query, field.name)
    given["state"] = given["state"] or "trained"
    if given["state"] not in ("trained", "finished"):
        raise ValueError(f"state: expected trained or finished, got {given['state'][:40]!r}")
    given["limit"] = min(_MAX_LIMIT, 50 if given["limit"] is None else given["limit"])
    given["offset"] = given["offset"] or 0
    return views.samples(run, SampleFilter(**given))


def _seconds(run: RunReader, rest: list[str], query: Query) -> Any:
    last = _whole(query, "last")
    return views.seconds(run, min(_MAX_STEPS, max(1, 50 if last is None else last)))


def _sample(run: RunReader, rest: list[str], query: Query) -> Any:
    task_id, number = _numbers(rest, 2)
    return views.sample(run, task_id, number)


_VIEWS: dict[str, Callable[[RunReader, list[str], Query], Any]] = {
    "now": lambda run, rest, query: views.now(run),
    "seconds": _seconds,
    "samples": _samples,
    "prompts": _prompts,
    "prompt": lambda run, rest, query: views.prompt(run, *_numbers(rest, 1)),
    "step": lambda run, rest, query: views.step(run, *_numbers(rest, 1)),
    "sample": _sample,
    "keys": lambda run, rest, query: views.keys(run),
    "curves": lambda run, rest, query: views.curves(run, _names(query)),
    "config": lambda run, rest, query: views.config(run),
    "alarms": lambda run, rest, query: views.alarms(run),
}
_ITEMS = ("prompt", "step", "sample")  # that may not be there


def _names(query: Query) -> list[str]:
    return [query["key"]] if query.get("key") else []


def _numbers(rest: list[str], count: int) -> list[int]:
    if len(rest) != count or not all(_is_whole(one) for one in rest):
        raise LookupError(f"expected {count} numbers after the view's name")
    return [int(one) for one in rest]


def _is_whole(text: str) -> bool:
    return text.isdecimal() and len(text) < 19  # SQLite's integers


def _whole(query: Query, name: str) -> int | None:
    text = query.get(name, "")
    if text and not _is_whole(text):
        raise ValueError(f"{name}: expected a whole number, got {text[:40]!r}")
    return int(text) if text else None


def _number(query: Query, name: str) -> float | None:
    text = query.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a number, got {text[:40]!r}")
    return value
