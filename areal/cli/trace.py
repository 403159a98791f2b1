"""`areal trace RUN [--out FILE]`: the traces of all processes of a run in one file for Perfetto."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Joins what the processes of a run with perf_tracer.enabled have written, also while it is "
        "alive, into one Chrome trace: the phases of controller and ranks, when servers computed, "
        "and the life of every prompt as a lane. Open it with Perfetto or chrome://tracing."
    )
    parser.add_argument("folder", metavar="RUN", help="folder of the run, with traces/")
    parser.add_argument("--out", metavar="FILE", help="default: trace.json in the run's folder")


def run(args: argparse.Namespace) -> int:
    from areal.run.paths import RunPaths
    from areal.utils.perf_tracer import merge_traces

    paths = RunPaths(Path(args.folder))
    if not paths.root.is_dir():
        raise FileNotFoundError(f"{paths.root} is not there: expected the folder of a run")
    out = Path(args.out) if args.out else paths.root / "trace.json"
    merged = merge_traces(paths.traces, out)
    for process in merged.processes:
        print(process)
    print(f"{out}: {merged.num_events:,} events of {len(merged.processes)} processes")
    return 0
