"""Child processes that handle hostile input under resource limits, a few at a time, reused.

    pool = LimitedProcesses("areal.utils.image_worker", "the decoder of images", cpu_s=10)
    with pool.one() as child:
        parts = child.ask(head, data)        # LimitExceededError: which limit it has exceeded

The child's module has `main(fd)`: it opens the channel, calls `limit_resources`, sends an empty
frame and then answers frames until its parent closes the channel; a call runs under `cpu_time`,
whose end is the end of the process: what is being computed cannot catch the kernel's timer. The
child's environment holds only paths; it can write no file, start no process and ends with ours.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

from areal.utils.channel import Channel
from areal.utils.child_process import describe_exit, module_argv, spawn
from areal.utils.waits import waiting

CALL_S = 120.0  # a child takes seconds to start on a busy machine
_MAX_REPLY = 1 << 30  # bytes
_ENDING_S = 1.0  # for a child to exit after it closed its channel
_MAX_CHILDREN = 4
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ", "LANG", "HOME", "VIRTUAL_ENV")


class LimitExceededError(RuntimeError):
    """The text is the limit, as in "takes more than 5 s of CPU time"."""


class LimitedProcess:
    """Used by one thread at a time."""

    def __init__(self, module: str, what: str, *, cpu_s: float) -> None:
        env = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        env |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        ours, theirs = socket.socketpair()
        with theirs:
            argv = module_argv(module, str(theirs.fileno()))
            self._process = spawn(argv, env, cwd="/", pass_fds=[theirs.fileno()])
        self._channel = Channel(ours, max_bytes=_MAX_REPLY)
        self._what, self._cpu_s = what, cpu_s
        self._is_ready = False
        self.known: dict[str, int] = {}  # texts the caller has sent this child, and their numbers

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, *parts: bytes) -> list[bytearray]:
        deadline = time.monotonic() + CALL_S
        try:
            with waiting(self._what):
                self.wait_until_ready(deadline)
                self._channel.send(*parts, timeout_s=deadline - time.monotonic())
                return self._channel.receive(deadline - time.monotonic())
        except TimeoutError:
            self.close()
            raise LimitExceededError(f"{CALL_S:g} s") from None
        except (EOFError, OSError):
            code = self.close(_ENDING_S)
            is_late = code == -signal.SIGPROF
            raise LimitExceededError(
                f"{self._cpu_s:g} s of CPU time"
                if is_late
                else f"it may (it {describe_exit(code)})"
            ) from None
        except BaseException:  # also Ctrl-C: the pending reply would be read by the next call
            self.close()
            raise

    def wait_until_ready(self, deadline: float) -> None:
        if not self._is_ready:
            try:
                self._channel.receive(deadline - time.monotonic())
            except EOFError:
                raise RuntimeError(
                    f"{self._what} {describe_exit(self.close(_ENDING_S))} before it was ready; its "
                    "last words are on the standard error of this process"
                ) from None
            self._is_ready = True

    def close(self, ending_s: float = 0.0) -> int:
        """The exit code of a child that gets `ending_s` to exit by itself."""
        self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ending_s)
        self._process.kill()
        return self._process.wait()


class LimitedProcesses:
    """At most `_MAX_CHILDREN`, each with one call at a time; the most recently used goes first."""

    def __init__(self, module: str, what: str, *, cpu_s: float) -> None:
        self._module, self._what, self._cpu_s = module, what, cpu_s
        self._begin()
        _POOLS.add(self)

    @contextlib.contextmanager
    def one(self) -> Iterator[LimitedProcess]:
        if not self._room.acquire(timeout=CALL_S):
            raise LimitExceededError(f"{CALL_S:g} s (all processes of {self._what} are busy)")
        try:
            child = self._take()
            try:
                yield child
            finally:
                if child.is_alive:
                    self._free.append(child)
        finally:
            self._room.release()

    def warm_up(self) -> None:
        """Start a child in the background, ahead of the first call."""
        if not self._free:
            self._free.append(self._start())

    def wait_until_warm(self) -> None:
        with self.one() as child:
            child.wait_until_ready(time.monotonic() + CALL_S)

    def close(self) -> None:
        while self._free:
            self._free.pop().close()

    def _begin(self) -> None:
        self._free: list[LimitedProcess] = []
        self._room = threading.Semaphore(_MAX_CHILDREN)

    def _start(self) -> LimitedProcess:
        return LimitedProcess(self._module, self._what, cpu_s=self._cpu_s)

    def _take(self) -> LimitedProcess:
        while True:
            try:
                child = self._free.pop()
            except IndexError:
                return self._start()
            if child.is_alive:
                return child
            child.close()


@contextlib.contextmanager
def cpu_time(limit_s: float) -> Iterator[None]:
    """In a child: the kernel ends the process after so much CPU time within."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def limit_resources(memory_bytes: int) -> None:
    """In a child: limits on what is allocated from here on; its modules are already loaded."""
    _lower(resource.RLIMIT_DATA, _private_bytes() + memory_bytes)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, 0)
    if sys.platform == "linux":
        _lower(resource.RLIMIT_NPROC, 0)


def _lower(kind: int, wanted: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(kind, (wanted, wanted))


def _private_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:  # not Linux
        return 0


_POOLS: weakref.WeakSet[LimitedProcesses] = weakref.WeakSet()


def _close_children() -> None:
    for pool in list(_POOLS):
        pool.close()


def _forget_children() -> None:
    """A forked process must not write to the pipes of its parent's children."""
    for pool in list(_POOLS):
        pool._begin()


atexit.register(_close_children)
os.register_at_fork(after_in_child=_forget_children)
