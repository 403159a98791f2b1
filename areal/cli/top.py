"""`areal top RUN`: one picture of a run in the terminal, drawn again as the run goes on."""

from __future__ import annotations

import argparse
import shutil
import sys
import time

_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_OTHER_SCREEN, _BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Shows numbers, alarms, prompts and newest samples of a run until Ctrl-C, or until the run "
        "ends."
    )
    parser.add_argument("folder", metavar="RUN", help="folder of the run, with its run.db")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument(
        "--every", type=float, default=2.0, metavar="S", help="seconds between two (default: 2)"
    )


def run(args: argparse.Namespace) -> int:
    if not args.every >= 0.1:
        raise ValueError(f"--every must be at least 0.1 seconds, got {args.every}")
    if args.once or not sys.stdout.isatty():
        print(_picture(args.folder)[0])
        return 0
    sys.stdout.write(_OTHER_SCREEN)
    shown = ""
    try:
        while True:
            shown, is_running = _picture(args.folder)
            # What does not fit would scroll the first lines away.
            height = shutil.get_terminal_size((100, 40)).lines
            lines = [line + _CLEAR_LINE for line in shown.splitlines()[:height]]
            sys.stdout.write(_HOME + "\r\n".join(lines) + _CLEAR_BELOW)
            sys.stdout.flush()
            if not is_running:
                return 0
            time.sleep(args.every)
    finally:
        sys.stdout.write(_BACK)
        print(shown)


def _picture(folder: str) -> tuple[str, bool]:
    """The picture, and whether the run goes on."""
    from areal.dashboard.reader import RunReader
    from areal.dashboard.text import picture

    width = shutil.get_terminal_size((100, 40)).columns
    with RunReader(folder) as reader:
        return picture(reader, width), reader.summary().state == "running"
