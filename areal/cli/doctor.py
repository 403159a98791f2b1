"""`areal doctor RUN|CONFIG`: which stage is wrong when training does not learn.

A file is a config: its training is built in a scratch folder, with a few episodes and one step. A
folder is a run: its newest step is computed again. Exit code 0: healthy; 1: a fault was found; 2:
it could not look.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal.doctor.report import Chart


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Looks at every stage from the tokenizer to the optimizer and names the first that is "
        "wrong, its cause and what to change. Exit code 0: healthy; 1: a fault was found; 2: it "
        "could not look."
    )
    parser.add_argument(
        "subject",
        metavar="RUN|CONFIG",
        help="YAML file, whose training is tried for one step, or the folder of a run, of which "
        "nothing changes",
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="override config keys"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    try:
        chart = _examine(Path(args.subject), args.overrides)
    except (RuntimeError, OSError) as error:
        # Exit code 1 is for a fault of the training.
        raise ValueError(f"could not look: {error}") from error
    print(json.dumps(chart.as_dict()) if args.json else f"{chart.table()}\n{chart.verdict()}")
    sys.stdout.flush()
    return chart.exit_code


def _examine(subject: Path, overrides: list[str]) -> Chart:
    if subject.is_dir():
        if overrides:
            raise ValueError(f"{overrides[0]}: a run has its config; give overrides with a file")
        from areal.doctor.stored import examine_run

        return examine_run(subject)
    from areal.cli.train import checked_config

    config = checked_config([str(subject), *overrides])
    from areal.run.fingerprint import trainer_name

    if trainer_name(config) != "ppo":
        raise ValueError(
            f"trainer: the doctor looks at trainer: ppo, got {trainer_name(config)}, which has no "
            "episodes"
        )
    from areal.doctor.live import examine_config

    return examine_config(config)
