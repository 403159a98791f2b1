"""`areal convert old.yaml key=value...`: a config file of AReaL as one that areal loads."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes a config file of AReaL as one that areal loads, and lists each key that was added, "
        "changed or dropped, with the reason. Comments are not kept."
    )
    parser.add_argument(
        "--out", metavar="FILE", help="the new file, which must not exist; default: print it"
    )
    parser.add_argument("config", metavar="old.yaml", help="the file of AReaL")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="what AReaL's script passes, such as workflow=my_package.agent.MyAgent",
    )


def run(args: argparse.Namespace) -> int:
    from areal.api.config.convert import convert
    from areal.utils.fs import atomic_write_text

    out = None if args.out is None else Path(args.out)
    if out is not None and out.exists():
        raise ValueError(f"--out: {args.out} exists; choose another name, or remove it")
    text, changes = convert([args.config, *args.overrides])
    if out is None:
        print(text, end="")
    else:
        atomic_write_text(out, text)
    for change in changes:
        print(change, file=sys.stderr if out is None else sys.stdout)
    if out is not None:
        print(f"{out}: {len(changes)} changes; areal check {out} looks at paths and names too")
    return 0
