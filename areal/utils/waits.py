"""Registry of waits in this process (who waits for what), and the time of the last progress.

    with waiting("reward gsm8k"):              # a text, or a function that returns it on demand
        value = await reward(...)
    progress()                                 # an episode ended, a micro-batch was trained, ...

    with allowed(300):                         # no progress is expected within 300 s
        start_server(timeout_s=300)

    quiet_s()                                  # seconds since the last progress()
    describe()                                 # one line per chain of waits, the oldest first
    fd = share_clock()                         # from now on another process can read quiet_s too

A wait belongs to its asyncio task, else to its thread; nested waits of one owner form a chain.
Enter and exit cost about a microsecond and take no lock, so that a reader can inspect a process in
which every lock is held.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

Text = str | Callable[[], str]


@dataclass(frozen=True, slots=True)
class _Wait:
    who: str
    for_: Text
    since: float  # time.monotonic()


class Clock:
    """Time of the last progress, and until when none is expected: two doubles in `buffer`.

    Another process may map the same bytes. `time.monotonic()` is shared by a whole machine.
    """

    _MOVED, _ALLOWED = 0, 8  # offsets
    SIZE = 16

    def __init__(self, buffer: bytearray | mmap.mmap) -> None:
        self._buffer = buffer

    def tick(self) -> None:
        struct.pack_into("d", self._buffer, self._MOVED, time.monotonic())

    def allow_until(self, moment: float) -> None:
        struct.pack_into("d", self._buffer, self._ALLOWED, moment)

    @property
    def allowed_until(self) -> float:
        return struct.unpack_from("d", self._buffer, self._ALLOWED)[0]

    def quiet_s(self) -> float:
        """Seconds since the last progress; 0 while none is expected."""
        now = time.monotonic()
        if now < self.allowed_until:
            return 0.0
        return now - struct.unpack_from("d", self._buffer, self._MOVED)[0]


_ids = itertools.count()
_live: dict[int, _Wait] = {}  # in the order of their start
_clock = Clock(bytearray(Clock.SIZE))
_clock.tick()


class waiting:  # noqa: N801 (reads as a statement, like contextlib.suppress)
    """Registers a wait while the block runs."""

    def __init__(self, for_: Text) -> None:
        self._for = for_

    def __enter__(self) -> None:
        self._id = next(_ids)
        _live[self._id] = _Wait(_owner(), self._for, time.monotonic())

    def __exit__(self, *exc_info: object) -> None:
        del _live[self._id]


def progress() -> None:
    """Record progress."""
    _clock.tick()


@contextmanager
def allowed(seconds: float) -> Iterator[None]:
    """The block may take `seconds` without progress: it has its own deadline."""
    before = _clock.allowed_until
    _clock.allow_until(max(before, time.monotonic() + seconds))
    try:
        yield
    finally:
        progress()
        _clock.allow_until(before)


def quiet_s() -> float:
    """Seconds since the last progress; 0 inside `allowed`."""
    return _clock.quiet_s()


def share_clock() -> IO[bytes]:
    """An open file that holds this process's clock from now on; see `open_clock`."""
    global _clock
    file = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as somebody reads it)
    file.truncate(Clock.SIZE)
    shared = open_clock(file.fileno())
    shared.allow_until(_clock.allowed_until)
    shared.tick()
    _clock = shared
    return file


def open_clock(fd: int) -> Clock:
    """The clock in an open file that another process writes."""
    return Clock(mmap.mmap(fd, Clock.SIZE))


def describe() -> list[str]:
    """`OWNER [and N others] waits for A > B since S s`: equal chains of several owners are one."""
    chains: dict[str, list[_Wait]] = {}
    for wait in list(_live.values()):
        chains.setdefault(wait.who, []).append(wait)
    owners: dict[str, list[tuple[float, str]]] = {}
    for who, waits in chains.items():
        text = " > ".join(_text(wait.for_) for wait in waits)
        owners.setdefault(text, []).append((waits[-1].since, who))
    by_age = sorted((min(members), len(members), text) for text, members in owners.items())
    now = time.monotonic()
    return [
        f"{who}{_others(count - 1)} for {text} since {now - since:.0f} s"
        for (since, who), count, text in by_age
    ]


def _others(count: int) -> str:
    if count == 0:
        return " waits"
    return f" and {count} other{'s' if count > 1 else ''} wait"


def _text(for_: Text) -> str:
    return for_ if isinstance(for_, str) else for_()


def _owner() -> str:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    if task is not None:
        return task.get_name()
    thread = threading.current_thread()
    return "the trainer" if thread is threading.main_thread() else thread.name
