"""The command line in processes of their own, many of them for the price of one import.

A process that imported torch and the trainers once is forked for every command; the child then
runs `areal.cli.main.main`. A `Program` does so as `python -m areal.cli.main` would: `areal train`
has its second process. `python_file` runs a script in such a child. `python_m` starts the real
thing, for what is read while libraries are imported.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from fork_server import fork, take_environment
from forked_children import fork_children_of_this_process


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


class Command:
    """One command in a process of its own; `wait` for its end, or `kill` it."""

    _kind = "call"

    def __init__(self, argv: list[str], *, cwd: Path, logs: Path, env: dict[str, str]) -> None:
        self._out, self._err = logs / "stdout", logs / "stderr"
        for log in (self._out, self._err):
            log.touch()  # the process may be killed before it writes
        arguments = (argv, str(cwd), str(self._out), str(self._err), {**os.environ, **env})
        self.process: BaseProcess = fork(_run, *arguments, self._kind)
        self.process.start()

    def wait(self, timeout_s: float = 900) -> Ended:
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise TimeoutError(f"still running after {timeout_s} s:\n{self.err()}")
        return Ended(self.process.exitcode, self.out(), self.err())

    def out(self) -> str:
        return self._out.read_text()

    def err(self) -> str:
        return self._err.read_text(encoding="utf-8")


class Program(Command):
    """With the methods of Popen that tests use."""

    _kind = "program"

    def __init__(
        self, *argv: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
    ) -> None:
        self._logs = tempfile.TemporaryDirectory(prefix="areal-program-")
        words = [str(arg) for arg in argv]
        super().__init__(words, cwd=cwd or Path.cwd(), logs=Path(self._logs.name), env=env or {})
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 900) -> tuple[str, str]:
        ended = self.wait(timeout)
        return ended.out, ended.err


class _File(Command):
    _kind = "file"


def python_file(
    file: str | Path,
    *arguments: str | Path,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> Ended:
    """As `python file arguments...` would, but for the time its imports take."""
    with tempfile.TemporaryDirectory(prefix="areal-file-") as logs:
        words = [str(word) for word in (file, *arguments)]
        return _File(words, cwd=cwd or Path.cwd(), logs=Path(logs), env=env or {}).wait()


def python_m(*argv: str, cwd: Path, timeout_s: float = 900) -> Ended:
    done = subprocess.run(
        [sys.executable, "-m", "areal.cli.main", *argv],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def _run(argv: list[str], cwd: str, out: str, err: str, env: dict[str, str], kind: str) -> None:
    for descriptor, path in ((1, out), (2, err)):
        # Appended: several processes of one program write there.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    take_environment(env)
    os.chdir(cwd)
    fork_children_of_this_process()
    if kind == "file":
        sys.argv = argv
        sys.path.insert(0, str(Path(argv[0]).absolute().parent))
        runpy.run_path(argv[0], run_name="__main__")
        return
    from areal.cli.main import main

    sys.argv = ["areal", *argv]
    sys.exit(main(None if kind == "program" else argv))
