"""Whether work on a text grows no faster than its length, as it must where the text is hostile.

Times of one process are compared with each other: of a text and of one 16 times as long. Work that
grows with the square takes 256 times as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LONGER = 16
_MOST = 4 * LONGER  # what a busy machine may make of 16
_LEAST_S = 1e-3  # below it, a clock says little


def assert_linear(work: Callable[[str], object], unit: str, short: int) -> None:
    """`work` on `unit` again and again, `short` characters in the first text."""
    texts = [unit * (size // len(unit)) for size in (short, LONGER * short)]
    ratios = []
    for _ in range(3):
        few, many = (_seconds(work, text) for text in texts)
        ratios.append(many / max(few, _LEAST_S))
        if ratios[-1] <= _MOST:
            return
    raise AssertionError(f"{LONGER} times the text {unit!r} took {ratios} times as long")


def _seconds(work: Callable[[str], object], text: str) -> float:
    start = time.thread_time()
    work(text)
    return time.thread_time() - start
