"""Messages of a supervised process to its parent (cli/train.py), through a pipe.

    forbid_restart()   do not restart: the cause (a full disk, a hang) would end the next one too
    request_restart()  restart: the cause (a killed rank) counts like a signal to the process
    heard_a_signal()   shutting down, which may take as long as writing a recover point

The first of `forbid_restart` and `request_restart` counts. No-op without a parent.
"""

from __future__ import annotations

import os

STAY_DOWN, COME_AGAIN, HEARD = b"-", b"+", b"!"

_to_parent: int | None = None  # write end of the pipe


def answer_to(pipe: int | None) -> None:
    """Call once in a supervised process: its parent reads from `pipe`. None: no parent."""
    global _to_parent
    _to_parent = pipe


def pipe() -> int | None:
    """The write end, for a process that reports on behalf of this one; None without a parent."""
    return _to_parent


def forbid_restart() -> None:
    _say(STAY_DOWN)


def request_restart() -> None:
    _say(COME_AGAIN)


def heard_a_signal() -> None:
    _say(HEARD)


def _say(word: bytes) -> None:
    if _to_parent is not None:
        os.write(_to_parent, word)
