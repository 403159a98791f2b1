"""The stacks of a process and of all it started, in one file: where does everybody stand?

    with shared(logs / "stacks.txt"):   # in the parent, while it starts children
    listen()                            # in a child, first: SIGUSR1 writes its stacks there
    collect(logs / "stacks.txt")        # in the parent: its own, then one child after another

`kill -USR1 PID` does it for one process by hand; a child whose parent shares no file writes to its
standard error. A process that does not listen is listed without stacks, and is not signalled: the
signal would end it. Children are found through /proc, so elsewhere than on Linux there is only
the parent. Works while the interpreter is stuck in a call of C.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from areal.utils.fs import open_private, private_folder

VARIABLE = "AREAL_STACKS"  # areal/api/reward_worker.py reads it too
_ANSWER_S = 2.0
_SETTLED_S = 0.1

_listening: TextIO | None = None  # kept open: the handler writes to its descriptor


@contextlib.contextmanager
def shared(path: Path) -> Iterator[None]:
    """Children that are started meanwhile write to `path`."""
    private_folder(path.parent)
    open_private(path, "a").close()  # made here: children open it by its name
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(path)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def listen() -> None:
    """Write the stacks of all threads of this process when SIGUSR1 comes."""
    global _listening
    path = os.environ.get(VARIABLE)
    # The real standard error: what a caller put in its place may have no descriptor.
    _listening = open(path, "a") if path else sys.__stderr__  # noqa: SIM115 (see above)
    faulthandler.register(signal.SIGUSR1, file=_listening, all_threads=True)


def collect(path: Path) -> None:
    """Append the stacks of this process and its descendants to `path`."""
    with open(path, "a", encoding="utf-8") as file:
        _write(file, _headline(os.getpid()))
        faulthandler.dump_traceback(file, all_threads=True)
        for pid in descendants(os.getpid()):
            with contextlib.suppress(OSError):  # it has just ended
                _collect_child(file, pid)


def _collect_child(file: TextIO, pid: int) -> None:
    _write(file, _headline(pid))
    if not _catches(pid, signal.SIGUSR1):
        return _write(file, "does not tell its stacks\n")
    before = size = os.fstat(file.fileno()).st_size
    os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        time.sleep(_SETTLED_S)
        last, size = size, os.fstat(file.fileno()).st_size
        if size == last > before:
            return None
    if size == before:
        _write(file, "did not answer\n")
    return None


def _write(file: TextIO, text: str) -> None:
    file.write(text)
    file.flush()


def _headline(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline")
    words = command.read_bytes().split(b"\0") if command.exists() else []
    text = b" ".join(words).decode(errors="replace").strip()
    stopped = " (stopped)" if _status(pid).get("State", "")[:1] == "T" else ""
    return f"\n== process {pid}{stopped}: {text[:200]}\n"


def descendants(pid: int) -> Iterator[int]:
    """The processes that `pid` and those it started have started (Linux)."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                yield int(child)
                yield from descendants(int(child))


def _catches(pid: int, signum: int) -> bool:
    return bool(int(_status(pid).get("SigCgt", "0"), 16) & (1 << (signum - 1)))


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
