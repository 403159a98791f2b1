"""`areal ledger RUN [--prompt ID]`: the state of every prompt of a run, also of a live one.

RUN is the run's folder, `{fileroot}/{experiment_name}/{trial_name}`. For an inconsistent ledger the
exit code is 1, with the fault on the last line.
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

_TIMES = ("issued_at", "finished_at", "closed_at")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reads a run's ledger, also while the run is alive, and proves its balance."
    )
    parser.add_argument("folder", metavar="RUN", help="folder of the run, with its run.db")
    parser.add_argument("--prompt", type=int, metavar="ID", help="show the record of one prompt")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    from areal.rollout.ledger_balance import read_balance, read_reasons, read_task
    from areal.run.database import open_read_only
    from areal.run.paths import RunPaths

    with closing(open_read_only(RunPaths(Path(args.folder)).database)) as connection:
        connection.execute("BEGIN")  # one snapshot of a live run
        if args.prompt is not None:
            story = read_task(connection, args.prompt)
            if story is None:
                raise ValueError(f"--prompt: no prompt {args.prompt} was issued in {args.folder}")
            print(json.dumps(story) if args.json else _story(story))
            return 0
        counts, reasons = read_balance(connection), read_reasons(connection)
    if args.json:
        lost = [dict(zip(("state", "why", "prompts"), row, strict=True)) for row in reasons]
        print(json.dumps({"counts": counts, "untrained": lost, "balanced": True}))
    else:
        print(_summary(counts, reasons))
    return 0


def _summary(counts: dict[str, int], reasons: list[tuple[str, str, int]]) -> str:
    lines = [f"{state:<10}{count:>10,}" for state, count in counts.items()]
    lines += [f"  {state}: {why or 'too old for its batch'}: {n:,}" for state, why, n in reasons]
    lines.append(
        "balanced: every prompt issued has one state, and no number of a prompt or step is missing"
    )
    return "\n".join(lines)


def _story(story: dict[str, Any]) -> str:
    shown = {name: value for name, value in story.items() if value not in (None, "")}
    for name in _TIMES:
        if name in shown:
            shown[name] = datetime.fromtimestamp(shown[name]).isoformat(" ", "milliseconds")
    shown["trajectory_kept"] = "yes" if shown["trajectory_kept"] else "no"
    return "\n".join(f"{name:<16}{value}" for name, value in shown.items())
