"""Stack dumps of a process and all its descendants, in one file.

    with shared(logs / "stacks.txt"):        # in the parent, while it starts children
    listen()                                 # in every process of a run, first: SIGUSR1 writes its
                                             # stacks there
    collect(logs / "stacks.txt", pid)        # from any process: those of `pid` and its descendants
    busy_frames(logs / "stacks.txt", pid)    # the innermost calls of its busiest thread

`kill -USR1 PID` does it for one process by hand; without a shared file it writes to its standard
error. A listening process that crashes (a segmentation fault, an abort) writes its stacks to its
standard error too. A process that does not listen is listed without stacks and not signalled: the
signal would end it. Children are found through /proc, so on other systems than Linux only the
parent is covered.
Works while the interpreter is stuck in a C call or a thread holds the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, TextIO

from areal.utils.fs import open_private, private_folder

VARIABLE = "AREAL_STACKS"  # also read by areal/sandbox/worker.py
_ANSWER_S = 2.0
_SETTLED_S = 0.1
_BUSY_S = 0.25  # how long threads are sampled to find the busy one
_SHOWN_FRAMES = 3
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')

_listening: TextIO | None = None  # a file, kept open: the handler writes to its descriptor


@contextlib.contextmanager
def shared(path: Path) -> Iterator[None]:
    """This process, and children started in this context, write to `path`."""
    private_folder(path.parent)
    open_private(path, "a").close()  # created here: children open it by name
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(path)
    takes_signal = signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL  # else the user has a handler
    if takes_signal:
        listen()
    try:
        yield
    finally:
        if takes_signal:
            _stop_listening()
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def listen() -> None:
    """Write the stacks of all threads of this process when SIGUSR1 comes, and when it crashes."""
    global _listening
    path = os.environ.get(VARIABLE)
    errors = sys.__stderr__ or sys.stderr  # the real one: a replacement may have no descriptor
    file = errors
    if path:
        with contextlib.suppress(FileNotFoundError):  # a run that was refused removes its folder
            file = open(path, "a")  # noqa: SIM115 (see above)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=errors)
    _listening = None if file is errors else file


def _stop_listening() -> None:
    faulthandler.unregister(signal.SIGUSR1)
    if _listening is not None:
        _listening.close()


def collect(path: Path, pid: int, *, leave_out: Collection[int] = ()) -> None:
    """Append the stacks of `pid` and its descendants to `path`, except those in `leave_out`."""
    private_folder(path.parent)
    with open_private(path, "a") as file:
        for found in [pid, *descendants(pid)]:
            if found not in leave_out:
                with contextlib.suppress(OSError):  # it has just exited
                    _collect_one(file, found)


def busy_frames(path: Path, pid: int) -> str:
    """Innermost frames of the busiest thread of `pid` at the last `collect`: `f (file:line) < g`.

    Empty if unknown.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    section = text.rpartition(f"\n== process {pid}")[2].partition("\n== process ")[0]
    lines = section.rpartition("\nCurrent thread ")[2].splitlines()[1:]
    frames = []
    for line in lines:
        frame = _FRAME.fullmatch(line)
        if frame is None or len(frames) == _SHOWN_FRAMES:
            break
        file, number, function = frame.groups()
        frames.append(f"{function} ({'/'.join(Path(file).parts[-2:])}:{number})")
    return " < ".join(frames)


def stopped(pid: int) -> list[str]:
    """Names of `pid` and its descendants that a signal or a debugger has stopped."""
    return [
        f"process {found} ({_command(found)[:80]})"
        for found in [pid, *descendants(pid)]
        if is_stopped(found)
    ]


def is_stopped(pid: int) -> bool:
    return _status(pid).get("State", "")[:1] in ("T", "t")


def _collect_one(file: IO[str], pid: int) -> None:
    note = " (stopped)" if is_stopped(pid) else ""
    _write(file, f"\n== process {pid}{note}: {_command(pid)[:200]}\n")
    if not _catches(pid, signal.SIGUSR1):
        return _write(file, "does not tell its stacks\n")
    before = size = os.fstat(file.fileno()).st_size
    _signal_busiest_thread(pid)
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        time.sleep(_SETTLED_S)
        last, size = size, os.fstat(file.fileno()).st_size
        if size == last > before:
            return None
    if size == before:
        _write(file, "did not answer\n")
    return None


def _signal_busiest_thread(pid: int) -> None:
    """SIGUSR1 to the computing thread: the dump then marks it as the current thread."""
    before = _cpu_ticks(pid)
    time.sleep(_BUSY_S)
    used = {tid: ticks - before.get(tid, ticks) for tid, ticks in _cpu_ticks(pid).items()}
    busiest = max(used, key=lambda tid: (used[tid], tid == pid), default=pid)
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # not in every C library
    if tgkill is None or tgkill(pid, busiest, int(signal.SIGUSR1)) != 0:
        os.kill(pid, signal.SIGUSR1)


def _cpu_ticks(pid: int) -> dict[int, int]:
    """CPU time of each thread so far (Linux)."""
    ticks = {}
    for task in Path(f"/proc/{pid}/task").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just exited
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            ticks[int(task.name)] = int(fields[11]) + int(fields[12])
    return ticks


def _write(file: IO[str], text: str) -> None:
    file.write(text)
    file.flush()


def _command(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
    argv = command.split("\0")
    # child_process.module_argv: after the code and sys.path come the module and its arguments.
    if argv[1:3] == ["-P", "-c"] and len(argv) > 6:
        argv = argv[5:]
    return " ".join(" ".join(argv).split())


def _catches(pid: int, signum: int) -> bool:
    return bool(int(_status(pid).get("SigCgt", "0"), 16) & (1 << (signum - 1)))


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def descendants(pid: int) -> Iterator[int]:
    """All processes started by `pid`, directly or indirectly."""
    pending = [pid]  # no recursion: chains can be long
    while pending:
        for file in Path(f"/proc/{pending.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # it has just exited
                children = [int(child) for child in file.read_text().split()]
                yield from children
                pending += children
