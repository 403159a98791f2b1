"""`areal train config.yaml key=value...`: run the experiment of a YAML file, in a supervised child.

The file's `trainer` key chooses the trainer; its data set, workflow and reward are names or import
paths. A user who needs more writes a script with the same trainers (see examples/). With
`recover.mode=on` a training process that dies is restarted.

    code = supervise(retries=3, newest_point=..., stacks_file=...)
    if code is not None:       # the parent: the last child has ended
        return code
    ...                        # the child: train

    parent   waits for: the child             unblocked by: its end
             on SIGINT, SIGTERM: forwards them, and restarts nothing any more; kills a child that
             does not react (a call that holds the GIL)
    child    its own session, so that Ctrl-C reaches it once, through the parent; the kernel kills
             it when the parent dies (Linux)

The fork happens before torch is loaded: the parent is small, has one thread and opens no device.

    how the child ended            what follows
    0, 2 (user error), 130         exit
    after `forbid_restart()`       exit with code 1 (run/restart.py)
    1 (a fault of the environment) restart if it has written a new recover point
    a signal (kill -9, segfault),  restart, up to `retries` times without a new recover point
    or 1 after `request_restart()`
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from areal.run import restart
from areal.utils import stacks
from areal.utils.child_process import RestartBudget, describe_exit
from areal.utils.die_with_parent import die_with

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
_FORWARDED = (signal.SIGINT, signal.SIGTERM)
_INTERRUPTED = 130
_REACTION_S = 15.0  # Python handles a signal between two bytecodes, or never
_POLL_S = 0.1
WHAT_IS_NEEDED = f"""\
`areal demo` shows a whole run in minutes and needs no file; examples/ has one for each algorithm.
The shortest of your own, for GRPO on the rows of a file:

{FIRST_CONFIG}
`areal check FILE` says what is missing in it, `areal check --trial FILE` tries an episode.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs the experiment of a YAML file. With recover.mode=on the same command resumes it, and "
        "a training process that dies is restarted."
    )
    parser.add_argument(
        "config", nargs="?", help="YAML file, for example examples/math/arithmetic_grpo.yaml"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override config keys")


def run(args: argparse.Namespace) -> int:
    if args.config is None:
        print(WHAT_IS_NEEDED, file=sys.stderr)
        raise ValueError("the config is missing: areal train FILE.yaml key=value...")
    config = checked_config([args.config, *args.overrides])
    if config.scheduler.type == "slurm":
        from areal.cli.main import main

        return main(["launch", "slurm", args.config, *args.overrides])
    return train(config, supervised=args.as_program)


def train(
    config: Any,
    *,
    supervised: bool,
    prepare: Callable[[], None] = lambda: None,
    script: list[str] | None = None,
) -> int:
    """Run the experiment, or a script with its arguments; `supervised`: in a child process.

    `prepare` is called in the training process, before torch is loaded.
    """
    code = _supervise(config) if supervised else None
    if code is not None:
        return code
    # SIGTERM ends the run like Ctrl-C: children stopped, database closed.
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    prepare()
    try:
        if script is None:
            _run_experiment(config)
        else:
            _run_script(script)
    except (OSError, RuntimeError) as error:
        tell_parent(error)
        raise
    return 0


def _run_experiment(config: Any) -> None:
    from areal.utils.startup import importing, stage

    with stage("libraries"), importing():
        from areal.trainer.experiment import run_experiment
    run_experiment(config)


def _run_script(argv: list[str]) -> None:
    """As `python script.py ...` would, in this process."""
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).absolute().parent))
    runpy.run_path(argv[0], run_name="__main__")


def _interrupt(signum: int, frame: object) -> NoReturn:
    from areal.run.restart import heard_a_signal

    heard_a_signal()
    raise KeyboardInterrupt


def tell_parent(error: BaseException) -> None:
    """Report whether a restart can help. Says nothing if that depends on progress, as for network
    faults, which are OSErrors too."""
    from areal.api.scheduler_api import WorkerFailedError
    from areal.rollout.failures import RolloutFailedError
    from areal.run.database import RunDatabaseError
    from areal.run.restart import forbid_restart, request_restart
    from areal.utils.child_process import ProcessKilledError
    from areal.utils.fs import is_disk_fault

    causes: list[BaseException] = [error]  # an error of another thread is the cause
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    if any(
        isinstance(cause, RolloutFailedError | RunDatabaseError)
        or (isinstance(cause, OSError) and is_disk_fault(cause))
        for cause in causes
    ):
        forbid_restart()
    elif isinstance(error, WorkerFailedError | ProcessKilledError):
        request_restart()


def _supervise(config: Any) -> int | None:
    """None in the training process."""
    from areal.run.paths import RunPaths
    from areal.run.recover import newest_step

    paths = RunPaths.of(config)
    return supervise(
        retries=config.recover.retries if config.recover.mode == "on" else 0,
        newest_point=lambda: newest_step(paths.recover),
        stacks_file=paths.stacks,
    )


def checked_config(argv: list[str]) -> Any:
    """Load and check the config before torch, which takes seconds to load."""
    from areal.cli.check import check_environment

    config = load_config(argv)
    check_environment(config)
    return config


def load_config(argv: list[str]) -> Any:
    """The typed config of the file's `trainer`."""
    from areal.api.cli_args import load_experiment

    config, _ = load_experiment(argv)
    return config


def supervise(
    *, retries: int, newest_point: Callable[[], int | None], stacks_file: Path
) -> int | None:
    """None in every child, which does the work; in the parent the exit code of the last one.

    `newest_point` returns the step of the newest recover point, the measure of progress.
    `stacks_file` gets the stacks of a child that does not react to a signal.
    """
    stacks.listen()  # or SIGUSR1, meant for the training process, would end parent and run
    budget = RestartBudget(retries)
    while True:
        before = newest_point()
        child = _Child(stacks_file)
        if child.is_here:
            return None
        code = child.wait()
        point = newest_point()
        got_on = point != before
        if child.signalled_at is not None:
            return _INTERRUPTED
        if code in (0, 2, _INTERRUPTED):
            return code
        if child.wish == restart.STAY_DOWN:
            return 1
        how = describe_exit(code)
        if retries == 0 or (code > 0 and not (got_on or child.wish == restart.COME_AGAIN)):
            if code < 0:
                _say(f"error: the training process {how}")
            return 1
        if got_on:
            budget.renew()
        if not budget.spend():
            count = budget.num_spent
            _say(f"error: the training process {how}, {count} times without a new recover point")
            return 1
        origin = "the start" if point is None else f"the recover point of step {point + 1}"
        which = f"restart {budget.num_spent} of {retries}"
        _say(f"the training process {how}; resuming from {origin} ({which})")


class _Child:
    """A fork of this process; `is_here` is True in the child."""

    def __init__(self, stacks_file: Path) -> None:
        self.signalled_at: float | None = None  # time.monotonic() of the first forwarded signal
        self.wish = b""  # STAY_DOWN or COME_AGAIN, if sent
        self._has_heard = False  # it acknowledged a signal
        self._is_killed = False  # by us
        self._stacks_file = stacks_file
        self._reader, writer = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent_pid = os.getpid()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
        self._pid = os.fork()
        self.is_here = self._pid == 0
        if self.is_here:
            os.close(self._reader)
            restart.answer_to(writer)
            os.setsid()
            die_with(parent_pid)
        else:
            os.close(writer)
            os.set_blocking(self._reader, False)
            self._previous = {signum: signal.signal(signum, self._hand_on) for signum in _FORWARDED}
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def wait(self) -> int:
        """Its exit code, negative for the signal that ended it."""
        status = None
        while status is None:
            time.sleep(_POLL_S)
            pid, found = os.waitpid(self._pid, os.WNOHANG)
            status = found if pid == self._pid else None
            self._listen()
            if status is None:
                self._kill_if_deaf()
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        os.close(self._reader)
        return os.waitstatus_to_exitcode(status)

    def _hand_on(self, signum: int, frame: object) -> None:
        self.signalled_at = self.signalled_at or time.monotonic()
        os.kill(self._pid, signum)

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):  # no message
            for byte in os.read(self._reader, 64):
                word = bytes([byte])
                if word == restart.HEARD:
                    self._has_heard = True
                else:
                    self.wish = self.wish or word

    def _kill_if_deaf(self) -> None:
        """Kill a child that has not acknowledged a signal in time; one that has may take longer."""
        if self.signalled_at is None or self._has_heard or self._is_killed:
            return
        if time.monotonic() - self.signalled_at < _REACTION_S:
            return
        frames = ""
        with contextlib.suppress(OSError):  # a full disk must not prevent the kill
            stacks.collect(self._stacks_file, self._pid)
            frames = stacks.busy_frames(self._stacks_file, self._pid)
        _say(
            f"the training process did not react to a signal for {_REACTION_S:g} s and is killed; "
            f"its busiest thread is in {frames or '?'} (stacks: {self._stacks_file})"
        )
        os.kill(self._pid, signal.SIGKILL)
        self._is_killed = True


def _say(text: str) -> None:
    print(f"areal: {text}", file=sys.stderr, flush=True)
