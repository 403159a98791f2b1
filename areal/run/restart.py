"""Messages of a supervised process to its parent (cli/train.py), through a pipe.

    stay_down()        do not restart: the cause (a full disk, a hang) would end the next one too
    come_again()       restart: the cause (a killed rank) counts like a signal to the process
    heard_a_signal()   shutting down, which may take as long as writing a recover point

The first of `stay_down` and `come_again` counts. No-op without a parent.
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


def stay_down() -> None:
    _say(STAY_DOWN)


def come_again() -> None:
    _say(COME_AGAIN)


def heard_a_signal() -> None:
    _say(HEARD)


def _say(word: bytes) -> None:
    if _to_parent is not None:
        os.write(_to_parent, word)
