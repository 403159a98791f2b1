"""`areal replay RUN --step K`: train a recorded step again and compare losses and weights.

RUN is the run's folder, which is only read. Exit code 0: all bits are equal; 1: the last line names
the first difference.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.trainer.replay import Compared, Replay

_DIGEST_CHARS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains a step of a run again, from the recover point before it and the "
        "recorded trajectories, and compares statistics, weights and optimizer state bit for bit. "
        "Exit code 0: all are equal; 1: the last line names the first difference."
    )
    parser.add_argument("folder", metavar="RUN", help="folder of the run; nothing in it changes")
    parser.add_argument(
        "--step",
        type=int,
        required=True,
        metavar="K",
        help="counted from 0, as in the run's database and the names of its recover points",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    from areal.trainer.recording import read_recording

    recording = read_recording(args.folder, args.step)
    from areal.trainer.replay import replay

    result = replay(recording)
    print(json.dumps(_as_dict(result)) if args.json else _text(result))
    return 1 if result.differing else 0


def _as_dict(replay: Replay) -> dict[str, Any]:
    def listed(compared: list[Compared]) -> list[dict[str, Any]]:
        return [
            {"name": c.name, "recorded": c.recorded, "replayed": c.replayed, "equal": c.equal}
            for c in compared
        ]

    return {
        "step": replay.step,
        "equal": not replay.differing,
        "statistics": listed(replay.statistics),
        "state": None if replay.state is None else listed(replay.state),
        "world_changed": replay.world,
    }


def _text(replay: Replay) -> str:
    rows = [("name", "recorded", "replayed", "equal")]
    rows += [
        (c.name, _shown(c.recorded), _shown(c.replayed), "yes" if c.equal else "NO")
        for c in replay.compared
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        f"{name:<{widths[0]}}  {recorded:>{widths[1]}}  {replayed:>{widths[2]}}  {equal}"
        for name, recorded, replayed, equal in rows
    ]
    lines += [
        f"changed since: {name} was {then}, is {now}" for name, (then, now) in replay.world.items()
    ]
    return "\n".join([*lines, _verdict(replay)])


def _verdict(replay: Replay) -> str:
    state = "weights and optimizer state"
    if replay.state is None:
        state = "no weights, because there is no recover point after it"
    what = f"step {replay.step}, {len(replay.statistics)} statistics, {state}"
    if not replay.differing:
        return f"equal bit for bit: {what}"
    first = replay.differing[0]
    return (
        f"differs: {what}; {len(replay.differing)} of {len(replay.compared)} rows differ, the "
        f"first is {first.name}: recorded {_shown(first.recorded)}, replayed "
        f"{_shown(first.replayed)}"
    )


def _shown(value: float | str | None) -> str:
    if value is None:
        return "absent"
    return value[:_DIGEST_CHARS] if isinstance(value, str) else repr(value)
