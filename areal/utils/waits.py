"""Who waits for whom in this process, and when anything last moved.

    with waiting("reward gsm8k"):              # a text, or a function that gives it when asked
        value = await reward(...)
    progress()                                 # an episode ended, a micro-batch was trained, ...

    quiet_s()                                  # seconds since the last progress()
    describe()                                 # one line per chain of waits, the oldest first

A wait is owned by the asyncio task it is in, else by the thread; waits inside a wait of the same
owner make a chain. Enter and leave cost about a microsecond and take no lock, so that a reader
can look at a process in which every lock is held.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

Text = str | Callable[[], str]


@dataclass(frozen=True, slots=True)
class _Wait:
    who: str
    for_: Text
    since: float  # time.monotonic()


_ids = itertools.count()
_live: dict[int, _Wait] = {}  # in the order they began
_moved_at = time.monotonic()


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
    """Something moved."""
    global _moved_at
    _moved_at = time.monotonic()


def quiet_s() -> float:
    """Seconds since something moved."""
    return time.monotonic() - _moved_at


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
