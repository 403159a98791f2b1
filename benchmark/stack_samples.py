"""Where a thread spends its time, by samples of its stack: little disturbance, honest shares.

    with StackSampler(thread_id, parts) as sampler:
        ...
    sampler.shares()          # {part: share of the samples that were not idle}, and "idle" of all

`parts` names the files of a part by the end of their path; the innermost frame that is in one
decides. A deterministic profiler would charge Python calls many times what they cost.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from types import FrameType
from typing import Any

INTERVAL_S = 0.004


class StackSampler:
    def __init__(self, thread_id: int, parts: Mapping[str, tuple[str, ...]]) -> None:
        self._thread_id = thread_id
        self._places = [(place, part) for part, places in parts.items() for place in places]
        self._known: dict[Any, str | None] = {}  # code object -> part
        self._counts: Counter[str] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="stack-sampler", daemon=True)

    def __enter__(self) -> StackSampler:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def shares(self) -> dict[str, float]:
        """Of the busy time by part; `idle` is a share of the whole."""
        busy = Counter({part: n for part, n in self._counts.items() if part != "idle"})
        shares = {part: count / max(1, busy.total()) for part, count in busy.most_common()}
        return shares | {"idle": self._counts["idle"] / max(1, self._counts.total())}

    def _sample(self) -> None:
        while not self._stop.is_set():
            time.sleep(INTERVAL_S)
            frame = sys._current_frames().get(self._thread_id)
            if frame is not None:
                self._counts[self._part(frame)] += 1

    def _part(self, frame: FrameType | None) -> str:
        while frame is not None:
            part = self._part_of(frame.f_code)
            if part is not None:
                return part
            frame = frame.f_back
        return "other"

    def _part_of(self, code: Any) -> str | None:
        if code not in self._known:
            name = f"{code.co_filename}:{code.co_name}"
            found = (part for place, part in self._places if place in name)
            self._known[code] = next(found, None)
        return self._known[code]
