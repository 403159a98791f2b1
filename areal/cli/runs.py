"""`areal runs [FOLDER ...]`: the runs below folders, with state, step, reward and time left."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists the runs below folders: alive (on this machine), stopped, finished, empty or "
        "unreadable. The time left is that of the newest 20 steps, repeated."
    )
    parser.add_argument(
        "folders",
        metavar="FOLDER",
        nargs="*",
        help="a run's folder, or one that holds runs, such as cluster.fileroot (default: runs)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    from areal.dashboard.reader import find_runs
    from areal.dashboard.text import runs_table
    from areal.dashboard.views import describe_run

    given = args.folders or ["runs"]
    folders = list({one.resolve(): one for folder in given for one in find_runs(folder)}.values())
    if not folders and not args.json:
        raise ValueError(f"{', '.join(given)}: no run, that is no run.db at most four levels below")
    runs = [describe_run(folder) for folder in folders]
    print(json.dumps({"runs": runs}) if args.json else runs_table(runs))
    return 0
