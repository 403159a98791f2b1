"""`areal clean [FOLDER]`: what can be deleted of the runs there; deletes it with --yes."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists what runs that have ended can do without: temporary folders, published weights, "
        "what killed processes left half-written, and recover points of finished runs. Never "
        "touches a run that is alive or was written to in the last ten minutes, a recover point of "
        "a run that can resume, the newest checkpoint, the final model, run.db or logs."
    )
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        default="runs",
        help="a run's folder, or one that holds runs (default: runs)",
    )
    parser.add_argument(
        "--checkpoints", action="store_true", help="also checkpoints but the newest of each role"
    )
    parser.add_argument("--yes", action="store_true", help="delete what is listed")


def run(args: argparse.Namespace) -> int:
    from areal.dashboard.clean import delete_waste, find_waste
    from areal.dashboard.text import safe

    found = find_waste(args.folder, checkpoints=args.checkpoints)
    for waste in found:
        print(f"{waste.num_bytes / 2**20:>10.1f} MiB  {safe(str(waste.path))}  ({waste.why})")
    total = f"{sum(waste.num_bytes for waste in found) / 2**20:,.1f} MiB in {len(found)} folders"
    if not found:
        print(f"{args.folder}: nothing to delete")
    elif args.yes:
        delete_waste(found)
        print(f"deleted {total}")
    else:
        print(f"{total} can be deleted: areal clean {args.folder} --yes deletes them")
    return 0
