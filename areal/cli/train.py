"""`areal train config.yaml key=value...`: run the experiment a YAML file describes.

The file's `trainer` key chooses the trainer; its data set, workflow and reward are names or import
paths. A user who needs more writes a script with the same trainers (see examples/).

Training runs in a child process (supervise.py), so that somebody is there whatever becomes of it;
with `recover.mode=on` it is started again when it dies.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

FIRST_CONFIG = """\
trainer: ppo                    # or sft, rw, dpo
experiment_name: mine
trial_name: first
train_dataset: {path: rows.jsonl, prompt: question, answer: answer, batch_size: 32}
reward_fn: gsm8k                # or the import path of a function of yours
gconfig: {n_samples: 8, max_new_tokens: 512}
actor:
  path: path/to/model           # a Hugging Face folder, or a hub name
  reward_norm: {mean_level: group, std_level: group}
  optimizer: {lr: 1.0e-6}
"""
WHAT_IS_NEEDED = f"""\
`areal demo` shows a whole run in minutes and needs no file; examples/ has one for each algorithm.
The shortest of your own, for GRPO on the rows of a file:

{FIRST_CONFIG}
`areal check FILE` says what is missing in it, `areal check --trial FILE` tries an episode.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "train",
        help="run the experiment a YAML file describes",
        description="Runs the experiment of a YAML file. With recover.mode=on it goes on when it "
        "is started again, and starts itself again when its process dies.",
    )
    parser.add_argument(
        "config", nargs="?", help="YAML file, for example examples/math/arithmetic_grpo.yaml"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override config keys")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.config is None:
        print(WHAT_IS_NEEDED, file=sys.stderr)
        raise ValueError("the config is missing: areal train FILE.yaml key=value...")
    config = checked_config([args.config, *args.overrides])
    return train(config, supervised=args.as_program)


def train(config: Any, *, supervised: bool, prepare: Callable[[], None] = lambda: None) -> int:
    """Run the experiment; `supervised`: in a child process.

    `prepare` is called in the process that trains, before torch is loaded.
    """
    code = _supervise(config) if supervised else None
    if code is not None:
        return code
    # A scheduler's SIGTERM ends the run as Ctrl-C does: children stopped, database closed.
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    prepare()
    from areal.utils.startup import stage

    with stage("libraries"):
        from areal.trainer.experiment import run_experiment
    try:
        run_experiment(config)
    except (OSError, RuntimeError) as error:
        tell_parent(error)
        raise
    return 0


def _interrupt(signum: int, frame: object) -> NoReturn:
    from areal.run.restart import heard_a_signal

    heard_a_signal()
    raise KeyboardInterrupt


def tell_parent(error: BaseException) -> None:
    """Whether it is of use to start the run again; nothing where only progress can tell, as with
    faults of a network, which are OSErrors too."""
    from areal.api.scheduler_api import WorkerFailedError
    from areal.rollout.failures import RolloutFailedError
    from areal.run.database import RunDatabaseError
    from areal.run.restart import come_again, stay_down
    from areal.utils.child_process import ProcessKilledError
    from areal.utils.fs import is_disk_fault

    causes: list[BaseException] = [error]  # a fault in another thread comes as the cause
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    if any(
        isinstance(cause, RolloutFailedError | RunDatabaseError)
        or (isinstance(cause, OSError) and is_disk_fault(cause))
        for cause in causes
    ):
        stay_down()
    elif isinstance(error, WorkerFailedError | ProcessKilledError):
        come_again()


def _supervise(config: Any) -> int | None:
    """None in the process that is to train."""
    from areal.cli.supervise import supervise
    from areal.run.paths import RunPaths
    from areal.run.recover import newest_step

    paths = RunPaths.of(config)
    return supervise(
        retries=config.recover.retries if config.recover.mode == "on" else 0,
        newest_point=lambda: newest_step(paths.recover),
        stacks_file=paths.stacks,
    )


def checked_config(argv: list[str]) -> Any:
    """A mistake is answered before the seconds torch takes to load."""
    from areal.cli.check import check_world

    config = load_config(argv)
    check_world(config)
    return config


def load_config(argv: list[str]) -> Any:
    """The typed config of the trainer that the file's `trainer` key names."""
    from areal.api.cli_args import load_experiment

    config, _ = load_experiment(argv)
    return config
