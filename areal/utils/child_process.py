"""Child processes: none outlives its parent, and how one ended is always reported.

    child = ChildProcess([sys.executable, "-m", "areal.cli.main", "serve", ...], name="server")
    line = child.wait_ready(timeout_s=60)   # its first line on stdout, or RuntimeError with cause
    ...
    child.raise_if_ended()                  # RuntimeError: how it ended, its last lines of stderr
    child.terminate()

`spawn` starts every child of this package. A child leads its own session, so Ctrl-C in the terminal
reaches only the parent, which then ends the child in order; on Linux the kernel kills it when the
parent dies, even by `kill -9`. `module_argv` is the command of one of our own modules.

`ChildProcess` adds output and errors: two threads drain its output, and the last lines of stderr
are kept and shown in every error, with the first that look like its cause. Processes left in the
group of an ended child are killed, so that they hold no memory or port of the next one. With
`is_guarded`, for programs of others, the same holds for all descendants, also in other groups, and
when this process dies (guarded_program.py).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from areal.api.redact import hide_secrets
from areal.utils import die_with_parent, guarded_program
from areal.utils.fs import open_private, private_folder

_KEPT_LINES = 50
_SHOWN_LINES = 5  # if the child has a log; the very last line often says the least
_SHOWN_ERRORS = 3  # the cause stands first; what follows from it, and noise of the exit, later
_MAX_READ = 1 << 20  # characters of a line that are read at once
_MAX_KEPT = 2000  # characters of a line that are shown; the log has all of them
# `ValueError: text` of Python, `CUDA error: text`, `FATAL text`; not `except ValueError:` of a
# traceback.
_LOOKS_LIKE_ERROR = re.compile(
    r"(?:Error|Exception|Interrupt|\berror|\bfatal)\b:\s?\S|\b(?:FATAL|Segmentation fault)\b"
)
_MAX_POLL_S = 0.05  # between two checks whether it has ended
_GUARD_S = guarded_program.GRACE_S + 15.0  # then a guard itself hangs
_IS_LINUX = sys.platform.startswith("linux")
# Imported without the garbage collector: see `startup.importing`.
_RUN_MODULE = """
import gc, importlib, json, sys
sys.path[:] = json.loads(sys.argv[1])
gc.disable()
module = importlib.import_module(sys.argv[2])
gc.freeze()
gc.enable()
module.main(*sys.argv[3:])
"""


class ProcessKilledError(RuntimeError):
    """A process was ended by a signal: not a fault of the work it was given."""


class ChildProcess:
    """Starts `argv` at once. `env` is added to this process's environment.

    With `log_path` everything the child writes to stderr is also appended to that file. The open
    files `pass_fds` keep their numbers in the child. With `is_guarded` no descendant of it outlives
    it, or this process; `pid` is then that of the guard.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        name: str,
        env: Mapping[str, str] | None = None,
        log_path: str | Path | None = None,
        pass_fds: Sequence[int] = (),
        is_guarded: bool = False,
    ) -> None:
        self.name = name
        self._is_guarded = is_guarded and _IS_LINUX
        self._stderr_tail: deque[str] = deque(maxlen=_KEPT_LINES)
        self._errors = ErrorLines()
        self._stdout: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None: stdout closed
        self._is_ready = False
        self._reaping = threading.Lock()
        self._log = _open_log(log_path)
        self._process = spawn(
            argv,
            {**os.environ, **(env or {})},
            is_guarded=is_guarded,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=pass_fds,
        )
        stdout, stderr = self._process.stdout, self._process.stderr
        assert stdout is not None and stderr is not None  # both are pipes
        self._readers = [
            self._start_reader(stdout, self._keep_stdout, "stdout"),
            self._start_reader(stderr, self._keep_stderr, "stderr"),
        ]

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code (negative: the signal that ended it), or None while it runs."""
        with self._reaping:
            if self._process.returncode is None:
                self._kill_orphans()
            return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """`poll`, waiting up to `timeout_s` for the end."""
        deadline, delay_s = time.monotonic() + timeout_s, 0.001
        while (code := self.poll()) is None and (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(delay_s, left_s))
            delay_s = min(2 * delay_s, _MAX_POLL_S)
        return code

    def wait_ready(
        self, *, timeout_s: float, is_ready: Callable[[str], bool] = lambda line: True
    ) -> str:
        """Wait for the first stdout line that `is_ready` accepts and return it.

        RuntimeError if the child ends (ProcessKilledError: by a signal) or the time runs out first.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._stdout.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(
                    f"{self.name} (pid {self.pid}) was not ready within {timeout_s:g} s"
                    f"{self._shown_stderr()}"
                ) from None
            if line is None:
                raise self._end_error()
            if is_ready(line):
                self._is_ready = True
                return line

    def wait_until(
        self, condition: Callable[[], bool], *, timeout_s: float, every_s: float = 0.5
    ) -> None:
        """Wait until `condition()` holds, for a child that prints no line when it is ready.

        RuntimeError if the child ends or the time runs out first.
        """
        self._is_ready = True  # its stdout is not read
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.raise_if_ended()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self.name} (pid {self.pid}) was not ready within {timeout_s:g} s"
                    f"{self._shown_stderr()}"
                )
            time.sleep(every_s)

    def raise_if_ended(self) -> None:
        """RuntimeError with exit code and last output when the child no longer runs."""
        if self.poll() is not None:
            raise self._end_error()

    @property
    def was_killed(self) -> bool:
        """Whether a signal has ended it."""
        return (self.poll() or 0) < 0

    def wait_end(self, *, timeout_s: float = 5.0) -> str:
        """Description of the end of a child that is about to exit; see `describe_end`."""
        self.wait(timeout_s)
        return self.describe_end()

    def describe_end(self) -> str:
        """One sentence on its state, with its last lines of stderr: a few, or all that are kept if
        no log has them."""
        self._finish_reading()
        code = self.poll()
        ended = "closed its output but still runs" if code is None else describe_exit(code)
        return f"{self.name} (pid {self.pid}) {ended}{self._shown_stderr()}"

    def terminate(self, *, grace_s: float = 5.0) -> int:
        """End the whole group: SIGTERM, then SIGKILL after `grace_s`. Returns the exit code.

        A guard, which has a grace period of its own, gets the signal alone."""
        self._signal_group(signal.SIGTERM)
        if self.wait(_GUARD_S if self._is_guarded else grace_s) is None:
            self._signal_group(signal.SIGKILL)
            self._process.wait()
        self._finish_reading()
        return self._process.returncode

    def _end_error(self) -> RuntimeError:
        end = self.describe_end()  # waits briefly for a process that is just exiting
        return ProcessKilledError(end) if self.was_killed else RuntimeError(end)

    def _signal_group(self, signum: int) -> None:
        # Only while the leader is unreaped is its id certain to be that of our group.
        if self.poll() is None:
            alone = self._is_guarded and signum == signal.SIGTERM
            with contextlib.suppress(ProcessLookupError):
                (os.kill if alone else os.killpg)(self.pid, signum)

    def _kill_orphans(self) -> None:
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT  # poll without reaping
        # PermissionError: on some systems, only the dead leader is left.
        with contextlib.suppress(ChildProcessError, ProcessLookupError, PermissionError):
            if os.waitid(os.P_PID, self.pid, ended) is not None:
                os.killpg(self.pid, signal.SIGKILL)

    def _start_reader(self, pipe: IO[str], keep: Callable[[str], None], kind: str):
        def drain() -> None:
            with pipe:
                while line := pipe.readline(_MAX_READ):
                    keep(line.rstrip("\n"))
            if kind == "stdout":
                self._stdout.put(None)

        thread = threading.Thread(target=drain, name=f"{self.name}-{kind}", daemon=True)
        thread.start()
        return thread

    def _keep_stdout(self, line: str) -> None:
        if not self._is_ready:  # later lines are never read
            self._stdout.put(line)

    def _keep_stderr(self, line: str) -> None:
        line = hide_secrets(line)
        self._stderr_tail.append(_cut(line))
        self._errors.add(_cut(line))
        if self._log:
            with contextlib.suppress(OSError):  # a full disk must not stop the reader
                self._log.write(line + "\n")
                self._log.flush()

    def _finish_reading(self) -> None:
        """Let the readers drain the last lines; bounded, as a grandchild may hold the pipes."""
        self.wait(1.0)
        for reader in self._readers:
            reader.join(1.0)
        if self._log and not any(reader.is_alive() for reader in self._readers):
            with contextlib.suppress(OSError):
                self._log.close()

    def _shown_stderr(self) -> str:
        lines = list(self._stderr_tail)
        if not lines:
            return "; it wrote nothing to stderr"
        shown = [line.strip() for line in lines if line.strip()][-_SHOWN_LINES:]
        shown = shown if self._log else [line.strip() for line in lines]
        causes = [line.strip() for line in self._errors.first]
        causes = [line for line in causes if line not in shown]
        first = f"; its first errors: {' | '.join(causes)}" if causes else ""
        if self._log:
            last = " | ".join(shown)
            return f"{first}; its last lines of stderr: {last} (all of it: {self._log.name})"
        return f"{first}; its last {len(lines)} lines of stderr:\n" + "\n".join(lines)


class ErrorLines:
    """The first lines of the last burst of errors, at most `_SHOWN_ERRORS`.

    A burst ends with `_KEPT_LINES` lines of which none looks like an error: what was reported
    before these is not why a child ended now.
    """

    def __init__(self) -> None:
        self.first: list[str] = []
        self._num_others = 0  # since the last that looked like one

    def add(self, line: str) -> None:
        if _LOOKS_LIKE_ERROR.search(line) is None:
            self._num_others += 1
            return
        if self._num_others >= _KEPT_LINES:
            self.first = []
        self._num_others = 0
        if len(self.first) < _SHOWN_ERRORS and line not in self.first:
            self.first = [*self.first, line]  # read by other threads


def _cut(line: str) -> str:
    """Both ends of a long line."""
    if len(line) <= _MAX_KEPT:
        return line
    half = _MAX_KEPT // 2
    return f"{line[:half]} ... {line[-half:]}"


def describe_exit(code: int) -> str:
    """`code` is negative for the signal that ended the process."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = str(-code)
    return f"was ended by signal {name}"


@dataclass(slots=True)
class RestartBudget:
    """Restarts in a row; progress renews them."""

    max_restarts: int
    num_spent: int = 0

    def spend(self) -> bool:
        """Whether one more is allowed."""
        self.num_spent += 1
        return self.num_spent <= self.max_restarts

    def renew(self) -> None:
        self.num_spent = 0


def module_argv(module: str, *args: str) -> list[str]:
    """`module.main(*args)` in an interpreter with the `sys.path` of this one."""
    sys_path = json.dumps([os.path.abspath(entry) for entry in sys.path])
    return [sys.executable, "-P", "-c", _RUN_MODULE, sys_path, module, *args]


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    is_guarded: bool = False,
    is_wrapped: bool = True,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Start `argv` with exactly `env`, in its own session, to die with this process, with
    `is_guarded` with all its descendants; `options` are those of Popen. FileNotFoundError if there
    is no such program. Without `is_wrapped` the program sees to that end itself: it asks the kernel
    (PR_SET_PDEATHSIG) first of all, and saves the start of one interpreter."""
    if shutil.which(argv[0], path=env.get("PATH")) is None:
        raise FileNotFoundError(errno.ENOENT, "no such program", argv[0])
    if _IS_LINUX and is_wrapped:
        script = guarded_program if is_guarded else die_with_parent
        command = [json.dumps(list(argv))] if is_guarded else argv
        argv = [sys.executable, "-I", "-S", script.__file__, str(os.getpid()), *command]
    options = {"stdin": subprocess.DEVNULL, "start_new_session": True, "env": env, **options}
    return _SPAWNER.spawn(argv, options)


class _Spawner:
    """One thread that starts all children and lives as long as the process.

    The kernel's death signal is tied to the *thread* that forked: a child started from a pool
    thread would be killed when that thread ends. A daemon, so it never delays process exit.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._owner_pid = 0

    def spawn(self, argv: Sequence[str], options: dict[str, Any]) -> subprocess.Popen[Any]:
        with self._lock:
            if self._owner_pid != os.getpid():  # first use, or this process was forked
                threading.Thread(target=self._serve, name="child-spawner", daemon=True).start()
                self._owner_pid = os.getpid()
        reply: queue.SimpleQueue = queue.SimpleQueue()
        self._orders.put((argv, options, reply))
        result = reply.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def _serve(self) -> None:
        while True:
            argv, options, reply = self._orders.get()
            try:
                reply.put(subprocess.Popen(argv, **options))
            except Exception as err:  # raised in the caller
                reply.put(err)


def _open_log(path: str | Path | None) -> IO[str] | None:
    if path is None:
        return None
    private_folder(Path(path).parent)
    return open_private(path, "a", encoding="utf-8", errors="replace")


_SPAWNER = _Spawner()
