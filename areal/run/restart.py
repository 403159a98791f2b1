"""What a supervised process says to its parent (cli/train.py), through a pipe.

    stay_down()        what ends it now (a full disk, a hang) would end the next one, too
    come_again()       what ends it now (a killed rank) is as good as a signal to itself
    heard_a_signal()   it ends in order, which may take as long as the writing of a recover point

The first of `stay_down` and `come_again` counts. Without a parent nothing happens.
"""

from __future__ import annotations

import os

STAY_DOWN, COME_AGAIN, HEARD = b"-", b"+", b"!"

_to_parent: int | None = None  # the end of a pipe


def answer_to(pipe: int | None) -> None:
    """In a supervised process, once: its parent reads the other end of `pipe`. None: no parent."""
    global _to_parent
    _to_parent = pipe


def pipe() -> int | None:
    """The end to write to, for a process that speaks for this one; None without a parent."""
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
