"""`areal train config.yaml key=value...`: run the experiment a YAML file describes.

The file's `trainer` key chooses the trainer; its data set, workflow and reward are names or import
paths. A user who needs more writes a script with the same trainers (see examples/).
"""

from __future__ import annotations

import argparse
import signal
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="run the experiment a YAML file describes",
        description="Runs the experiment of a YAML file; started again, it goes on "
        "(recover.mode=on).",
    )
    parser.add_argument("config", help="YAML file, for example examples/math/arithmetic_grpo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override config keys")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    return train(checked_config([args.config, *args.overrides]))


def train(config: Any) -> int:
    from areal.trainer.experiment import run_experiment

    # A scheduler's SIGTERM ends the run as Ctrl-C does: children stopped, database closed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run_experiment(config)
    return 0


def checked_config(argv: list[str]) -> Any:
    """A mistake is answered before the seconds torch takes to load."""
    from areal.cli.check import check_world

    config = load_config(argv)
    check_world(config)
    return config


def load_config(argv: list[str]) -> Any:
    """The typed config of the trainer that the file's `trainer` key names."""
    from areal.api.cli_args import experiment_class, load_expr_config

    config, _ = load_expr_config(argv, experiment_class(argv))
    return config
