"""What a supervised process says about being started again, before it ends with exit code 1.

    stay_down()     what ends it now (a full disk, a hang) would end the next one, too
    come_again()    what ends it now (a killed rank) is as good as a signal to itself

The parent (cli/supervise.py) reads the first word from a pipe. Without a parent nothing happens.
"""

from __future__ import annotations

import os

STAY_DOWN, COME_AGAIN = b"-", b"+"

_to_parent: int | None = None  # the end of a pipe


def answer_to(pipe: int | None) -> None:
    """In a supervised process, once: its parent reads the other end of `pipe`. None: no parent."""
    global _to_parent
    _to_parent = pipe


def stay_down() -> None:
    _say(STAY_DOWN)


def come_again() -> None:
    _say(COME_AGAIN)


def _say(wish: bytes) -> None:
    if _to_parent is not None:
        os.write(_to_parent, wish)
