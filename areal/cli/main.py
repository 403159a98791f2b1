"""`areal COMMAND ...`: runs a command, and turns errors into one line and an exit code.

    0  done      2  user error (ValueError, missing file): the line says what to change
    1  a fault of the environment (RuntimeError, OSError)      130  Ctrl-C
  141  nobody reads the output any more

Only the module of the given command is imported, so `areal --help` stays fast. Any other exception
is a bug and keeps its traceback; AREAL_DEBUG=1 shows the traceback of all.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import select
import signal
import sys
import traceback
from typing import Any, NoReturn

from areal import __version__
from areal.api.redact import hide_secrets

# command -> its line in `areal --help`. The command `x` is the module areal.cli.x, which has
# `add_arguments(parser)` and `run(args) -> int`.
COMMANDS = {
    "demo": "train a small model by asynchronous GRPO on this machine, in minutes",
    "train": "run the experiment a YAML file describes",
    "launch": "train on this machine, on a Ray cluster, or as a Slurm job",
    "check": "validate a YAML file and its overrides, without loading torch",
    "plan": "predict memory, speed and duration of a run, without loading torch",
    "convert": "write a config file of AReaL as one that areal loads",
    "ledger": "show the state of every prompt of a run, and verify that none is lost",
    "trace": "join the traces of all processes of a run into one file for Perfetto",
    "runs": "list runs with state, step, reward and time left",
    "show": "tell the story of a prompt, a step or a sample of a run",
    "top": "watch a run in the terminal",
    "dash": "look at runs in a browser, on this machine",
    "clean": "list what can be deleted of runs, and delete it when told to",
    "agents": "list the agent sessions of a run that is alive",
    "doctor": "name the stage that is wrong when training does not learn",
    "replay": "train a recorded step again and compare losses and weights bit for bit",
    "eval": "score models, checkpoints and servers on a suite, with intervals",
    "reverify": "score the stored trajectories of a run again, with another reward",
    "chat": "talk to the model of a run in the terminal",
    "export": "write the episodes of a run's agents as traces, chats for SFT or preference pairs",
    "push": "upload the final model of a run to a hub, with a model card",
    "merge": "make a whole model of a LoRA adapter and its base",
    "serve": "serve a model with the native inference engine",
    "validate": "say what of areal's installation is missing, on this machine and a cluster",
    "env": "make the environment of a stock inference server or of a hub of environments",
}

OVERRIDE = re.compile(r"\+?[A-Za-z_][\w.]*=")


class Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"areal: error: {message} (see {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    as_program = argv is None  # else the caller's process continues, and must not be forked
    argv = sys.argv[1:] if as_program else argv
    sys.excepthook = _show_traceback
    # Import paths may name modules in the working directory; last, so that they hide no package.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        args = _parse(argv)
        args.as_program = as_program
        exit_code = args.run(args)
        if sys.stdout is not None:  # as with >&-
            sys.stdout.flush()  # here, where a closed pipe is an answer
        return exit_code
    except KeyboardInterrupt:
        return 130
    except (ValueError, FileNotFoundError) as error:
        return _fail(error, exit_code=2)
    except (RuntimeError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 128 + signal.SIGPIPE
        return _fail(error, exit_code=1)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="areal",
        description="Asynchronous reinforcement learning of language models.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"areal {__version__}")
    parser.set_defaults(run=lambda args: _show_help(parser))
    subparsers = parser.add_subparsers(metavar="COMMAND", title="commands")
    asked = next((arg for arg in argv if not arg.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = subparsers.add_parser(name, help=summary)
        if name == asked:
            add_command(name, command)
    if asked is not None and asked not in COMMANDS:
        parser.error(_unknown_command(asked))
    args, unread = parser.parse_known_args(argv)
    if hasattr(args, "overrides"):  # argparse reads only those that stand before the options
        args.overrides = [*args.overrides, *filter(OVERRIDE.match, unread)]
        unread = [text for text in unread if not OVERRIDE.match(text)]
    if unread:
        parser.error(f"unknown argument {unread[0]!r}{_override_hint(unread[0])}")
    return args


def add_command(name: str, parser: argparse.ArgumentParser) -> None:
    module = importlib.import_module(f"areal.cli.{name}")
    module.add_arguments(parser)
    parser.set_defaults(run=module.run)


def _override_hint(unread: str) -> str:
    if "=" not in unread:
        return ""
    if unread.startswith("-"):
        return "; overrides have no dashes: key=value"
    return "; overrides are key=value, and not every command takes them"


def _unknown_command(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"commands are {', '.join(COMMANDS)}"
    return f"unknown command {name!r}; {hint}"


def _show_help(parser: Parser) -> int:
    parser.print_help()
    return 0


def _show_traceback(kind: type[BaseException], error: BaseException, where: Any) -> None:
    """Python's traceback with secrets redacted."""
    text = "".join(traceback.format_exception(kind, error, where))
    print(hide_secrets(text), end="", file=sys.stderr)


def _nobody_reads() -> bool:
    """Whether the output is a pipe whose reader has ended (`areal show RUN --step 1 | head`); then
    nothing more is written to it."""
    if sys.stdout is None:
        return False
    output = sys.stdout.fileno()
    look = select.poll()
    look.register(output, 0)
    if not any(events & select.POLLERR for _, events in look.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


def _fail(error: Exception, *, exit_code: int) -> int:
    if os.environ.get("AREAL_DEBUG") == "1":
        raise error
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = " ".join(text.split()) or type(error).__name__
    print(f"areal: error: {hide_secrets(text)}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
