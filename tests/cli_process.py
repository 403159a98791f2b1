"""The command line in processes of their own, many of them for the price of one import.

A process that imported torch and the trainers once is forked for every command; the child then
runs `areal.cli.main.main` as `python -m areal.cli.main` would. `python_m` starts the real thing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from fork_server import FORKS


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


class Command:
    """One command in a process of its own; `wait` for its end, or `kill` it."""

    def __init__(self, argv: list[str], *, cwd: Path, logs: Path, env: dict[str, str]) -> None:
        self._out, self._err = logs / "stdout", logs / "stderr"
        arguments = (argv, str(cwd), str(self._out), str(self._err), {**os.environ, **env})
        self.process: BaseProcess = FORKS.Process(target=_run, args=arguments)
        self.process.start()

    def wait(self, timeout_s: float = 60) -> Ended:
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise TimeoutError(f"still running after {timeout_s} s:\n{self.err()}")
        return Ended(self.process.exitcode, self._out.read_text(), self.err())

    def err(self) -> str:
        return self._err.read_text(encoding="utf-8") if self._err.exists() else ""


def python_m(*argv: str, cwd: Path, timeout_s: float = 60) -> Ended:
    done = subprocess.run(
        [sys.executable, "-m", "areal.cli.main", *argv],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def _run(argv: list[str], cwd: str, out: str, err: str, env: dict[str, str]) -> None:
    for descriptor, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.update(env)
    os.chdir(cwd)
    from areal.cli.main import main

    sys.exit(main(argv))
