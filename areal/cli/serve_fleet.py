"""`areal serve join RUN [ADDRESS]`, `leave RUN ADDRESS`, `list RUN`: the servers of a living run.

Without an address `join` starts a native server here and stays: it joins again when the run was
restarted, leaves when it is told to end (Ctrl-C, SIGTERM), and ends when the run does. With one it
only asks: that server is somebody else's. Requests go through the run's folder (run/mailbox.py).
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from areal.utils.child_process import ChildProcess

TOKEN_VARIABLE = "AREAL_SERVER_TOKEN"
_LOOK_S = 1.0
_OPTIONS = ("dtype", "page_size", "num_pages", "max_running", "batch_invariant")


def add_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="join|leave|list")
    join = actions.add_parser(
        "join",
        help="let a server join a living run",
        description="Starts a native server here, and lets it serve a living run until one of them "
        "ends; with ADDRESS a server that is running already joins, of the run's kind and model. "
        f"Its token is read from {TOKEN_VARIABLE}.",
    )
    leave = actions.add_parser(
        "leave",
        help="let a server leave a living run",
        description="The server gets no more requests; returns when it has answered its last.",
    )
    listing = actions.add_parser(
        "list",
        help="show the servers of a living run",
        description="Asks each server of a living run for its version, and for the requests that "
        "run and wait there.",
    )
    for action in (join, leave, listing):
        action.add_argument("folder", metavar="RUN", help="folder of the run")
    join.add_argument("address", metavar="ADDRESS", nargs="?", help="host:port of a server")
    leave.add_argument("address", metavar="ADDRESS", help="host:port of a server")
    join.add_argument("--host", default="127.0.0.1", help="where the new server listens")
    join.add_argument("--device", help="of the new server; default: the best one here")
    join.add_argument("--threads", type=int, default=1, help="CPU threads of the new server")
    join.add_argument(
        "--patience",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds that the new server waits for a run that was killed to be started again",
    )
    listing.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    from areal.run.mailbox import ask
    from areal.run.paths import RunPaths

    folder = RunPaths(Path(args.folder)).fleet
    if args.action == "list":
        return _list(ask(folder, "list"), as_json=args.json)
    if args.action == "join" and args.address is None:
        return _serve(args, folder)
    address = _host_and_port(args.address)
    if args.action == "join":
        token = os.environ.get(TOKEN_VARIABLE, "")
        found = ask(folder, "join", address=address, token=token)
        print(f"{address} has joined: {len(found['servers'])} servers")
    else:
        found = ask(folder, "leave", address=address)
        print(f"{address} has left: {len(found['servers'])} servers")
    return 0


def _list(found: dict[str, Any], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(found))
        return 0
    from areal.dashboard.text import table

    rows: list[tuple[str, ...]] = [("server", "state", "version", "running", "waiting")]
    for server in found["servers"]:
        load = (server.get(name) for name in ("version", "running", "waiting"))
        numbers = ("-" if value is None else f"{value:.0f}" for value in load)
        rows.append((server["address"], server["state"], *numbers))
    print(table(rows))
    return 0


def _host_and_port(text: str) -> str:
    """Of "host:port", or of a URL."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or not parts.hostname or port is None:
        raise ValueError(f"ADDRESS: expected host:port or http://host:port, got {text!r:.80}")
    return f"{parts.hostname}:{port}"


def _serve(args: argparse.Namespace, folder: Path) -> int:
    from areal.engine.remote.native_process import launch_native_server
    from areal.run.mailbox import RunSilentError, ask, read_state

    if args.threads < 1:
        raise ValueError(f"--threads must be at least 1, got {args.threads}")
    state = read_state(folder)
    if state["engine"] != "native":
        raise ValueError(
            f"{args.folder}: its servers are of kind {state['engine']}: start one, and give its "
            "address behind the folder"
        )
    token = secrets.token_urlsafe(32)
    options = {name: state["options"][name] for name in _OPTIONS}
    with orderly_end():
        child, address = launch_native_server(
            state["model"],
            token=token,
            host=args.host,
            device=args.device,
            threads=args.threads,
            seed=secrets.randbelow(1 << 31),  # else servers would sample alike
            **options,
        )
        try:
            reason = _Membership(folder, address, token, child, args.patience).keep()
        except BaseException as end:
            if not isinstance(end, SystemExit | KeyboardInterrupt):
                raise
            try:
                print(f"{address} leaves the run", file=sys.stderr, flush=True)
                ask(folder, "leave", address=address, is_wanted=lambda: child.poll() is None)
            except (RunSilentError, ValueError) as error:  # it has ended, or this is the last one
                print(f"areal: {error}", file=sys.stderr)
            raise
        finally:
            child.terminate()
    print(f"{address}: {reason}")
    return 0


class _Membership:
    """Of a server that was started here."""

    def __init__(
        self, folder: Path, address: str, token: str, child: ChildProcess, patience_s: float
    ) -> None:
        self._folder = folder
        self._address = address
        self._token = token
        self._child = child
        self._patience_s = patience_s
        self._last_sign = time.monotonic()  # of a run that has this member

    def keep(self) -> str:
        """Until it has no reason to serve any more, which is returned. RuntimeError if it has died
        or the run is silent for too long."""
        from areal.run.mailbox import RunSilentError, read_state

        self._join()
        beat = None
        while True:
            self._child.raise_if_ended()
            try:
                state = read_state(self._folder)
            except RunSilentError:
                return "the run has ended"
            if self._address in state["left"]:
                return "has left the run"
            if self._address in state["servers"] and (state["run"], state["beat"]) != beat:
                beat, self._last_sign = (state["run"], state["beat"]), time.monotonic()
            elif self._address not in state["servers"]:
                self._join_again()
            if time.monotonic() - self._last_sign > self._patience_s:
                raise RuntimeError(
                    f"{self._folder.parent}: no sign of the run for {self._patience_s:g} s"
                )
            time.sleep(_LOOK_S)

    def _join_again(self) -> None:
        """After a restart of the run, or a broken connection."""
        try:
            self._join()
        except RuntimeError as error:
            self._child.raise_if_ended()
            print(f"areal: {error}; trying again", file=sys.stderr, flush=True)

    def _join(self) -> None:
        from areal.run.mailbox import ask

        found = ask(
            self._folder,
            "join",
            is_wanted=lambda: self._child.poll() is None,
            address=self._address,
            token=self._token,
        )
        self._last_sign = time.monotonic()
        print(f"{self._address} has joined: {len(found['servers'])} servers", flush=True)


@contextmanager
def orderly_end() -> Iterator[None]:
    """Make SIGTERM raise; by default it would skip the cleanup of files and ranks."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
