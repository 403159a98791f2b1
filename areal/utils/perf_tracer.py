"""Timeline of every process: spans in Chrome's trace format, and phase timings.

    perf_tracer.start(paths.trace("controller"), process="controller")
    with phase("rollout"):                       # a statistic (timeperf/rollout) and a span
        batch = ...
    with trace_scope("weights", "comm"):         # a span only; in a coroutine also atrace_scope
        ...
    @trace_perf("reward", "compute")             # ... around every call of a function
    perf_tracer.stop()
    merge_traces(paths.traces, "trace.json")     # one file for chrome://tracing or Perfetto

Each process appends to its own file, one JSON event per line, so a kill loses only the unsaved
tail. Spans in threads are shown as threads; spans in asyncio tasks, which interleave on one thread,
as async events. Times are wall-clock microseconds, so files of one machine line up. Before `start`,
spans cost almost nothing and are discarded; phases are still timed.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from areal.utils import logging, stats_tracker, waits
from areal.utils.fs import atomic_write_text, open_private, private_folder

logger = logging.getLogger("PerfTracer")

Function = TypeVar("Function", bound=Callable[..., Any])
Category = Literal["compute", "comm", "io", "sync", "scheduler", "instr", "misc"]

_MAX_BUFFERED = 4096  # events; flushed above this


class PerfTracer:
    """Collects the events of this process and appends them to `path`. Thread-safe."""

    def __init__(self, path: str | Path, process: str) -> None:
        self._path = Path(path)
        private_folder(self._path.parent)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = []
        self._named_threads: set[int] = set()
        self._async_ids = itertools.count(1)
        # One reading of the wall clock, then the monotonic clock, which never jumps.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._add({"ph": "M", "name": "process_name", "args": {"name": process}})

    @contextmanager
    def span(self, name: str, category: Category, args: dict[str, Any]) -> Iterator[None]:
        in_task = _in_asyncio_task()
        event = {"name": name, "cat": category, "args": args}
        start = self._now_us()
        try:
            yield
        finally:
            end = self._now_us()
            if in_task:
                pair = {**event, "id": next(self._async_ids)}
                self._add({**pair, "ph": "b", "ts": start}, {**pair, "ph": "e", "ts": end})
            else:
                self._add({**event, "ph": "X", "ts": start, "dur": end - start})

    def instant(self, name: str, category: Category, args: dict[str, Any]) -> None:
        event = {"name": name, "cat": category, "args": args}
        self._add({**event, "ph": "i", "s": "p", "ts": self._now_us()})

    def add_spans(self, process: str, name: str, intervals: Sequence[tuple[float, float]]) -> None:
        """Work of a process without its own trace; times in seconds since the epoch."""
        lane = zlib.crc32(process.encode())  # an id that no process of this machine has
        place = {"pid": lane, "tid": lane}
        with self._lock:
            if lane not in self._named_threads:
                self._named_threads.add(lane)
                name_of_lane = {"ph": "M", "name": "process_name", "args": {"name": process}}
                self._events.append({**name_of_lane, **place})
            for start, end in intervals:
                span = {"ph": "X", "name": name, "cat": "compute", "args": {}}
                times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
                self._events.append({**span, **times, **place})

    def save(self) -> None:
        """Append the events recorded since the last save."""
        with self._lock:
            self._write()

    def _now_us(self) -> float:
        return (self._epoch_ns + time.perf_counter_ns()) / 1000

    def _add(self, *events: dict[str, Any]) -> None:
        thread = threading.current_thread()
        tid = threading.get_native_id()
        with self._lock:
            if tid not in self._named_threads:
                self._named_threads.add(tid)
                self._stamp({"ph": "M", "name": "thread_name", "args": {"name": thread.name}}, tid)
            for event in events:
                self._stamp(event, tid)
            if len(self._events) >= _MAX_BUFFERED:
                self._write()

    def _stamp(self, event: dict[str, Any], tid: int) -> None:
        self._events.append({**event, "pid": self._pid, "tid": tid})

    def _write(self) -> None:
        lines = "".join(json.dumps(event) + "\n" for event in self._events)
        self._events.clear()
        with open_private(self._path, "a", encoding="utf-8") as file:
            file.write(lines)


_tracer: PerfTracer | None = None


def start(path: str | Path, process: str) -> None:
    """Trace this process, named `process`, to `path` from now on."""
    global _tracer
    stop()
    _tracer = PerfTracer(path, process)


def stop() -> None:
    """Save and end tracing; no-op without a prior `start`."""
    global _tracer
    save()
    _tracer = None


def save() -> None:
    """Append the events recorded so far to the file."""
    if _tracer is not None:
        _tracer.save()


@contextmanager
def phase(name: str, category: Category = "compute", **args: Any) -> Iterator[None]:
    """Time a phase of the step: a statistic under `timeperf/` and, when tracing, a span.

    Its start and end count as progress, and waits inside it are reported as part of it.
    """
    waits.progress()
    with (
        waits.waiting(f"phase {name}"),
        stats_tracker.record_timing(name),
        trace_scope(name, category, **args),
    ):
        yield
    waits.progress()


@contextmanager
def trace_scope(name: str, category: Category = "misc", **args: Any) -> Iterator[None]:
    """A span around the block; `args` (JSON values) are shown with it."""
    tracer = _tracer  # the tracer that sees the start of a span also records its end
    if tracer is None:
        yield
        return
    with tracer.span(name, category, args):
        yield


@asynccontextmanager
async def atrace_scope(name: str, category: Category = "misc", **args: Any) -> AsyncIterator[None]:
    """`trace_scope` for `async with`."""
    with trace_scope(name, category, **args):
        yield


def trace_perf(name: str, category: Category = "misc") -> Callable[[Function], Function]:
    """A decorator: a span around every call of a function, plain or async."""

    def decorate(function: Function) -> Function:
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def traced_async(*args: Any, **kwargs: Any) -> Any:
                with trace_scope(name, category):
                    return await function(*args, **kwargs)

            return cast(Function, traced_async)

        @wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with trace_scope(name, category):
                return function(*args, **kwargs)

        return cast(Function, traced)

    return decorate


def instant(name: str, category: Category = "misc", **args: Any) -> None:
    """An instantaneous event."""
    if _tracer is not None:
        _tracer.instant(name, category, args)


def is_tracing() -> bool:
    return _tracer is not None


def add_spans(process: str, name: str, intervals: Sequence[tuple[float, float]]) -> None:
    """Spans (start, end) of another process; see `PerfTracer.add_spans`."""
    if _tracer is not None:
        _tracer.add_spans(process, name, intervals)


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """The events of one process's file, without the torn last line of a killed process."""
    events = []
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            logger.warning("%s line %d is torn and left out", path, number)
    return events


def merge_traces(folder: str | Path, out: str | Path) -> int:
    """Join all `*.jsonl` traces of `folder` into one Chrome trace; returns the number of events."""
    files = sorted(Path(folder).glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"no traces (*.jsonl) in {folder}; set perf_tracer.enabled=true")
    events = [event for file in files for event in read_trace(file)]
    events.sort(key=lambda event: event.get("ts", 0.0))  # metadata has no time and comes first
    atomic_write_text(out, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return len(events)


def _in_asyncio_task() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:  # no event loop runs in this thread
        return False
