"""When the engine was at work: merged stretches of wall time, for the trace of a run.

The controller asks for them and draws them beside its own phases, which shows from one file that
the server generates while the trainer trains.
"""

from __future__ import annotations

import threading
from collections import deque

_MERGE_GAP_S = 0.005  # steps of one stretch follow each other with gaps far below this
_MAX_INTERVALS = 10_000


class BusyIntervals:
    """Written by the engine's thread, read by any other; forgets the oldest when full."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._intervals: deque[list[float]] = deque(maxlen=_MAX_INTERVALS)  # [start, end]

    def add(self, start: float, end: float) -> None:
        """One step ran from `start` to `end` (`time.time()`), after all steps added before."""
        with self._lock:
            if self._intervals and start - self._intervals[-1][1] < _MERGE_GAP_S:
                self._intervals[-1][1] = max(end, self._intervals[-1][1])
            else:
                self._intervals.append([start, end])

    def since(self, time: float) -> list[tuple[float, float]]:
        """(start, end) of the work after `time`: asking with the last end repeats nothing."""
        with self._lock:
            return [(max(start, time), end) for start, end in self._intervals if end > time]
