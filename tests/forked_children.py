"""Children of a run that are forked from a process that has imported torch already.

    pytestmark = pytest.mark.usefixtures("forked_children")    # in a module of tests

Servers, ranks and rollout workers that this process starts, or a `Program` of cli_process.py, are
processes of their own as ever, with the same command, environment and open files, but do not spend
seconds of a core on imports. For tests of what such processes compute. Tests that kill one, or look
at how it starts or ends, start the real thing: here the parent's child is a small client
(docs_client.py) that passes SIGINT and SIGTERM on, and whose end is that of the forked process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_programs import Programs

from areal.utils.die_with_parent import die_with

FORKED = "AREAL_FORKED_CHILDREN"  # that program; the stand-in for SGLang reads it too
WORKER = "areal.infra.worker"  # a rank or a rollout worker: see module_argv of child_process.py
CLIENT = Path(__file__).with_name("docs_client.py")
# Files that a child inherits keep their numbers, which must be free in the forked process.
LEAST_NUMBER = 128


@contextlib.contextmanager
def fork_children() -> Iterator[None]:
    """Until the end, this process starts servers and workers so, other programs as before."""
    with contextlib.ExitStack() as stack:
        programs = Programs(run_python)
        stack.callback(programs.close)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="areal-forked-"))
        program = write_program(Path(folder))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in {**programs.env, FORKED: str(program)}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "executable", str(program))
        for number in _take_numbers():
            stack.callback(os.close, number)
        yield


def write_program(folder: Path) -> Path:
    """A `python` that has servers and workers forked; $AREAL_DOCS_PROGRAMS says by whom."""
    program = folder / "python"
    program.write_text(
        "#!/bin/sh\n"
        f'if [ "$1 $2 $3" = "-m areal.cli.main serve" ] || [ "$5" = {WORKER} ]; then\n'
        f'exec "{sys.executable}" -I -S "{CLIENT}" "$@"\n'
        "fi\n"
        f'exec "{sys.executable}" "$@"\n'
    )
    program.chmod(0o755)
    return program


def fork_children_of_this_process() -> None:
    """Those of a command that was itself forked, if the test wants it."""
    if program := os.environ.get(FORKED):
        sys.executable = program
        _take_numbers()


def _take_numbers() -> list[int]:
    """Files that are opened later have at least LEAST_NUMBER."""
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < LEAST_NUMBER:
        taken.append(os.open(os.devnull, os.O_RDONLY))
    return taken


def run_python(argv: list[str]) -> int:
    """`python` with `-P -c CODE ...`, `-m MODULE ...` or `FILE ...`, in the forked process."""
    die_with(os.getppid())
    try:
        _run_main(argv)
    finally:
        atexit._run_exitfuncs()  # an interpreter does so, the end of a forked process does not
    return 0


def _run_main(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    elif argv[0].endswith(".py"):
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
    else:
        sys.argv = argv[1:2] + argv[3:]
        exec(compile(argv[2], "<string>", "exec"), {"__name__": "__main__"})
