"""`areal reverify RUN --reward NAME`: score a run's stored trajectories again, and compare.

The run is only read, also while it is alive.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal.evaluation.reverify import Rescored

_MAX_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Scores the trajectories that a run has stored with a reward function, and compares with "
        "the rewards of the run, which is only read."
    )
    parser.add_argument("folder", metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--reward", required=True, metavar="NAME", help="name or import path of the reward function"
    )
    parser.add_argument("--json", metavar="FILE", help="write all samples there, as JSON lines")


def run(args: argparse.Namespace) -> int:
    from areal.run.paths import RunPaths

    folder = Path(args.folder)
    if not RunPaths(folder).config.is_file():
        raise ValueError(f"RUN: {folder} is not the folder of a run: it has no config.yaml")
    from areal.evaluation.reverify import reverify

    samples = reverify(folder, args.reward)
    print(_text(samples))
    if args.json is not None:
        from areal.api.json_text import dumps
        from areal.utils.fs import atomic_write_text

        atomic_write_text(Path(args.json), "".join(f"{dumps(asdict(s))}\n" for s in samples))
    return 0


def _text(samples: list[Rescored]) -> str:
    changed = [sample for sample in samples if sample.has_changed]
    judged = [sample for sample in samples if sample.new is not None]
    failed = Counter(sample.why for sample in samples if sample.new is None)
    lines = [f"{len(samples)} samples of {len({s.task_id for s in samples})} prompts"]
    if judged:
        before = sum(sample.old for sample in judged) / len(judged)
        after = sum(sample.new or 0.0 for sample in judged) / len(judged)
        lines.append(f"mean reward {before:.4f} -> {after:.4f}; {len(changed)} samples changed")
    for sample in sorted(changed, key=_size, reverse=True)[:_MAX_SHOWN]:
        shown = json.dumps(sample.completion[-60:], ensure_ascii=False)
        place = f"prompt {sample.task_id} sample {sample.sample}"
        lines.append(f"  {place}: {sample.old:g} -> {sample.new:g}  ...{shown}")
    for why, count in failed.most_common(_MAX_SHOWN):
        lines.append(f"  {count} samples could not be judged: {why}")
    return "\n".join(lines)


def _size(sample: Rescored) -> float:
    return abs((sample.new or 0.0) - sample.old)
