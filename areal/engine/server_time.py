"""Where the seconds of an inference server go: computing, and why not.

    busy         a native server computed; of another kind, requests were in flight
    no_request   nothing to generate
    paused       `pause_generation`
    offloaded    the device is lent to training
    control      commands: loading weights, offloading, aborting

A native server measures itself: `BusyIntervals` and `IdleTime` of its engine thread. Other servers
do not, but their client knows what it sent and ordered. `InFlight` notes in every process when it
had requests at which server; `ServerTimes` of the owning client divides the time of each:

    InFlight of this process --------+
    InFlight of copies -- add_busy --+--> ServerTimes.stats() -> {"busy_s": ..., "paused_s": ...}
    pause, offload, weight updates --+

Every moment has one cause, so the seconds of a server add up to its lifetime.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

Intervals = list[tuple[float, float]]  # (start, end) in `time.time()`

_MERGE_GAP_S = 0.005  # gaps between consecutive steps are far below this
_MAX_INTERVALS = 10_000


class IdleTime:
    """Seconds of the engine thread outside its steps, by cause. Written by that thread, read by any
    other."""

    def __init__(self) -> None:
        causes = ("no_request", "paused", "offloaded", "control")
        # Seconds by cause, and the one that goes on with when it began. Replaced as a whole, so
        # that a reader counts no interval twice or not at all: the sums never go back.
        self._spent: tuple[dict[str, float], tuple[str, float] | None]
        self._spent = dict.fromkeys(causes, 0.0), None

    @contextmanager
    def spent(self, cause: str) -> Iterator[None]:
        totals, began = self._spent[0], time.monotonic()
        self._spent = totals, (cause, began)
        try:
            yield
        finally:
            elapsed = time.monotonic() - began
            self._spent = totals | {cause: totals[cause] + elapsed}, None

    def stats(self) -> dict[str, float]:
        """With the time of a wait that goes on."""
        totals, current = self._spent
        seconds = dict(totals)
        if current is not None:
            seconds[current[0]] += time.monotonic() - current[1]
        return {f"{cause}_s": value for cause, value in seconds.items()}


class BusyIntervals:
    """Written by the engine thread, read by any other; drops the oldest when full."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._intervals: deque[list[float]] = deque(maxlen=_MAX_INTERVALS)  # [start, end]
        self.total_s = 0.0  # of all intervals, also dropped ones

    def add(self, start: float, end: float) -> None:
        """One step ran from `start` to `end` (`time.time()`), after all steps added before."""
        with self._lock:
            if self._intervals and start - self._intervals[-1][1] < _MERGE_GAP_S:
                last = self._intervals[-1][1]
                self._intervals[-1][1] = max(end, last)
                self.total_s += max(0.0, end - last)
            else:
                self._intervals.append([start, end])
                self.total_s += end - start

    def since(self, time: float) -> list[tuple[float, float]]:
        """(start, end) of work after `time`; passing the last end returns no interval twice."""
        with self._lock:
            return [(max(start, time), end) for start, end in self._intervals if end > time]


class InFlight:
    """Per server, when requests of this process were in flight. Written by the event loop, read by
    any thread; drops the oldest intervals when nobody takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, tuple[int, float]] = {}  # requests, and since when there are any
        self._ended: dict[str, BusyIntervals] = {}

    @contextmanager
    def request(self, address: str) -> Iterator[None]:
        with self._lock:
            count, since = self._open.get(address, (0, time.time()))
            self._open[address] = (count + 1, since)
        try:
            yield
        finally:
            with self._lock:
                count, since = self._open.pop(address)
                if count > 1:
                    self._open[address] = (count - 1, since)
                else:
                    self._ended.setdefault(address, BusyIntervals()).add(since, time.time())

    def take(self) -> dict[str, Intervals]:
        """Intervals by address since the last call; of requests that run on, the part until now."""
        with self._lock:
            now, ended, self._ended = time.time(), self._ended, {}
            for address, (count, since) in self._open.items():
                ended.setdefault(address, BusyIntervals()).add(since, now)
                self._open[address] = (count, now)
        return {address: intervals.since(0.0) for address, intervals in ended.items()}


class IntervalUnion:
    """Seconds that intervals cover together. They may come in any order and overlap."""

    def __init__(self) -> None:
        self._starts: list[float] = []  # of disjoint intervals, ascending
        self._ends: list[float] = []
        self._horizon = float("-inf")  # what lies before it is counted, and forgotten
        self.total_s = 0.0

    def add(self, start: float, end: float) -> None:
        start = max(start, self._horizon)
        if end <= start:
            return
        first, after = bisect_left(self._ends, start), bisect_right(self._starts, end)
        merged = list(zip(self._starts[first:after], self._ends[first:after], strict=True))
        if merged:
            start, end = min(start, merged[0][0]), max(end, merged[-1][1])
        self._starts[first:after], self._ends[first:after] = [start], [end]
        self.total_s += end - start - sum(one - other for other, one in merged)
        if len(self._starts) > _MAX_INTERVALS:
            self._horizon = self._ends[0]
            del self._starts[0], self._ends[0]

    def since(self, time: float) -> Intervals:
        first = bisect_right(self._ends, time)
        pairs = zip(self._starts[first:], self._ends[first:], strict=True)
        return [(max(start, time), end) for start, end in pairs]


_CAUSES: tuple[str, ...] = (
    "offloaded",
    "control",
    "paused",
    "busy",
)  # of two at once the first counts


class _ServerTime:
    """The seconds of one server since `since`."""

    def __init__(self, since: float) -> None:
        self._since = since
        self.busy = IntervalUnion()
        # Of each cause and those before it: their differences are what each adds.
        self._nested = [IntervalUnion() for _ in _CAUSES]

    def add(self, cause: str, start: float, end: float) -> None:
        start = max(start, self._since)
        if cause == "busy":
            self.busy.add(start, end)
        for union in self._nested[_CAUSES.index(cause) :]:
            union.add(start, end)

    def seconds(self, now: float) -> dict[str, float]:
        found, before = {}, 0.0
        for cause, union in zip(_CAUSES, self._nested, strict=True):
            found[cause] = max(0.0, union.total_s - before)
            before = union.total_s
        return found | {"no_request": max(0.0, now - self._since - before)}


class ServerTimes:
    """Of the servers of one client, from its own requests, those of its copies, and its orders.

    Busy seconds of a copy are known when it has sent them, and count as `no_request` until then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[str, _ServerTime] = {}
        self._states: dict[str, float] = {}  # cause that goes on -> booked until when
        self.in_flight = InFlight()

    def follow(self, addresses: Sequence[str]) -> None:
        """These are the servers from now on; the time of a new one begins."""
        with self._lock:
            known, now = self._servers, time.time()
            self._servers = {one: known.get(one) or _ServerTime(now) for one in addresses}

    def begin(self, cause: str) -> None:
        """Of all servers, until `end`."""
        with self._lock:
            self._states.setdefault(cause, time.time())

    def end(self, cause: str) -> None:
        with self._lock:
            self._book_states(time.time())
            self._states.pop(cause, None)

    def add(self, cause: str, start: float, end: float) -> None:
        """Of all servers."""
        with self._lock:
            self._add(cause, start, end)

    def add_busy(self, intervals: Mapping[str, Intervals]) -> None:
        """What `InFlight.take` of a copy has returned."""
        with self._lock:
            for address in intervals.keys() & self._servers.keys():
                for start, end in intervals[address]:
                    self._servers[address].add("busy", start, end)

    def stats(self) -> dict[str, float]:
        """Summed over the servers."""
        self.add_busy(self.in_flight.take())
        totals = dict.fromkeys((*_CAUSES, "no_request"), 0.0)
        with self._lock:
            now = time.time()
            self._book_states(now)
            for server in self._servers.values():
                for cause, seconds in server.seconds(now).items():
                    totals[cause] += seconds
        return {f"{cause}_s": seconds for cause, seconds in totals.items()}

    def busy_since(self, since: float) -> dict[str, Intervals]:
        """By address, when requests were in flight after `since`."""
        self.add_busy(self.in_flight.take())
        with self._lock:
            return {one: server.busy.since(since) for one, server in self._servers.items()}

    def _book_states(self, now: float) -> None:
        for cause, start in self._states.items():
            self._add(cause, start, now)
            self._states[cause] = now

    def _add(self, cause: str, start: float, end: float) -> None:
        for server in self._servers.values():
            server.add(cause, start, end)
