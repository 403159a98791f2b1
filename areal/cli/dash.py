"""`areal dash [RUN ...]`: runs in a browser on this machine, or in one file to share."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal.dashboard.routes import Routes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serves a page about runs on this machine: numbers, time by cause, samples token by token, "
        "prompts, curves, configs, evaluations, alarms. Reads only. Open the link it prints; from "
        "another machine, forward the port: ssh -L PORT:127.0.0.1:PORT HOST."
    )
    parser.add_argument(
        "folders",
        metavar="RUN",
        nargs="*",
        default=["runs"],
        help="folders of runs, folders that hold runs, files of areal eval (default: runs)",
    )
    parser.add_argument("--port", type=int, default=0, help="default: any that is free")
    parser.add_argument("--export", metavar="FILE", help="write one HTML file instead, and end")


def run(args: argparse.Namespace) -> int:
    from areal.dashboard.routes import Routes

    if not 0 <= args.port < 65536:
        raise ValueError(f"--port must lie between 0 and 65535, got {args.port}")
    routes = Routes([Path(folder) for folder in args.folders])
    if not routes.num_runs and not routes.num_eval_files:
        raise ValueError(
            f"no run in {', '.join(args.folders)}: give a folder with a run.db, or the eval.db of "
            "areal eval"
        )
    if args.export:
        _export(routes, Path(args.export))
    else:
        _serve(routes, args.port)
    return 0


def _export(routes: Routes, file: Path) -> None:
    from areal.dashboard.export import export_page
    from areal.utils.fs import atomic_write_text

    atomic_write_text(file, export_page(routes))
    print(f"wrote {file} ({file.stat().st_size / 2**20:.1f} MiB)")


def _serve(routes: Routes, port: int) -> None:
    from areal.dashboard.server import create_app
    from areal.utils.addresses import bind
    from areal.utils.http_server import serve

    token = secrets.token_urlsafe(24)
    with bind("127.0.0.1", port) as listener:
        port = listener.getsockname()[1]
        link = f"http://127.0.0.1:{port}/?token={token}"
        app = create_app(routes, token, port)
        serve(app, listener, on_ready=lambda: print(link, flush=True))
