"""`areal agents RUN`: the agent sessions of a live run, oldest first.

RUN is the run's folder, `{fileroot}/{experiment_name}/{trial_name}`. Asks every server for agents
that has an entry there; a run without one that answers is an error (exit code 1).
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from pathlib import Path
from typing import Any

_TIMEOUT_S = 10.0
_COLUMNS = ("id", "task", "state", "age", "completions", "last request")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Lists the agent sessions of a run that is alive."
    parser.add_argument("folder", metavar="RUN", help="folder of the run, with its run.db")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    from areal.agents.registry import read_entries
    from areal.run.paths import RunPaths

    paths = RunPaths(Path(args.folder))
    last_event = _last_event(paths.database)
    entries = read_entries(paths.agents)
    answers = [_ask(entry.url, entry.key) for entry in entries]
    if all(answer is None for answer in answers):
        raise RuntimeError(_no_server(args.folder, last_event, len(entries)))
    sessions: list[dict[str, Any]] = []
    for entry, answer in zip(entries, answers, strict=True):
        where = {"pid": entry.pid, "machine": entry.machine}
        sessions += [{**session, **where} for session in answer or ()]
    sessions.sort(key=lambda session: -session["age_s"])
    silent = [entry.url for entry, answer in zip(entries, answers, strict=True) if answer is None]
    if args.json:
        print(json.dumps({"sessions": sessions, "silent_servers": silent}))
    else:
        print(_table(sessions, silent))
    return 0


def _ask(url: str, key: str) -> list[dict[str, Any]] | None:
    """The live sessions of a server; None if it does not answer."""
    import urllib.request

    headers = {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/rl/sessions", headers=headers)
    # Without the proxies of the environment: they do not reach this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as reply:
            return json.load(reply)["sessions"]
    except (OSError, ValueError, KeyError):  # ended, or the port is another program's now
        return None


def _last_event(database: Path) -> tuple[str, str] | None:
    from areal.run.database import open_read_only

    with closing(open_read_only(database)) as connection:
        return connection.execute(
            "SELECT kind, text FROM events ORDER BY id DESC LIMIT 1"
        ).fetchone()


def _no_server(folder: str, last_event: tuple[str, str] | None, num_entries: int) -> str:
    if last_event is not None and last_event[0] == "finished":
        return f"{folder}: the run has ended: {' '.join(last_event)}"
    if num_entries:
        return f"{folder}: the run has ended, or runs on a machine that this one cannot reach"
    return f"{folder}: the run has ended, has begun no episode, or its workflow is no agent"


def _table(sessions: list[dict[str, Any]], silent: list[str]) -> str:
    rows = [_COLUMNS, *(_row(session) for session in sessions)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.append(f"{len(sessions)} live sessions")
    lines += [f"{url} does not answer" for url in silent]
    return "\n".join(lines)


def _row(session: dict[str, Any]) -> tuple[str, ...]:
    task = "-" if session["task_id"] is None else f"{session['task_id']}/{session['sample']}"
    return (
        session["id"],
        task,
        session["state"],
        f"{session['age_s']:.1f} s",
        str(session["completions"]),
        f"{session['last_request_s']:.1f} s ago",
    )
