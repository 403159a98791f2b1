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
tail. The controller names the folder in the environment, and the processes it starts write there
too (`start_below`). Spans in threads are shown as threads; spans in asyncio tasks, which interleave
on one thread, as async events. Times are wall-clock microseconds, so files of one machine line up.
Before `start`, spans cost almost nothing and are discarded; phases are still timed.

The life of a prompt has lanes of its own, the same ones from every process:

    enter_stage(["prompt 7"], "waiting")         # from here to the next stage, or None
    with episode_scope("reward"):                # in the lane of the episode that runs here
        ...
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import itertools
import json
import os
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from areal.api.workflow_context import Episode, workflow_context
from areal.utils import logging, stats_tracker, waits
from areal.utils.fs import atomic_write_text, open_private, private_folder

logger = logging.getLogger("PerfTracer")

Function = TypeVar("Function", bound=Callable[..., Any])
Category = Literal["compute", "comm", "io", "sync", "scheduler", "instr", "misc"]

FOLDER_VARIABLE = "AREAL_TRACE_FOLDER"  # where the processes of a traced run write
_MAX_BUFFERED = 4096  # events; flushed above this
_MAX_BUFFERED_S = 5.0  # and when an event comes so long after the last write


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
        self._stages: dict[str, tuple[str, float]] = {}  # of each lane: name, start
        self._lane_ends: dict[int, float] = {}  # of `add_spans`: the newest end
        self._written_at = time.monotonic()
        self._has_failed = False
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

    def counter(self, name: str, values: dict[str, float]) -> None:
        self._add({"ph": "C", "name": name, "ts": self._now_us(), "args": values})

    def enter_stage(self, lanes: Iterable[str], name: str | None) -> None:
        now = self._now_us()
        events: list[dict[str, Any]] = []
        for lane in lanes:
            with self._lock:
                last = self._stages.pop(lane, None)
                if name is not None:
                    self._stages[lane] = (name, now)
            if last is not None:
                events += _lane_pair(lane, last[0], last[1], now)
        if events:
            self._add(*events)

    def lane_span(self, lane: str, name: str, start_s: float, end_s: float) -> None:
        """Times of `time.perf_counter`."""
        start, end = (self._epoch_ns / 1000 + seconds * 1e6 for seconds in (start_s, end_s))
        self._add(*_lane_pair(lane, name, start, end))

    def add_spans(self, process: str, name: str, intervals: Sequence[tuple[float, float]]) -> None:
        """Work of a process without its own trace; times in seconds since the epoch. What the
        last call already had is left out: spans of one lane must not overlap."""
        lane = zlib.crc32(process.encode())  # an id that no process of this machine has
        place = {"pid": lane, "tid": lane}
        with self._lock:
            known = self._lane_ends.get(lane, 0.0)
            if lane not in self._named_threads:
                self._named_threads.add(lane)
                names = (("process_name", process), ("thread_name", "engine"))
                self._events += [
                    {"ph": "M", "name": kind, "args": {"name": one}, **place} for kind, one in names
                ]
            for start, end in ((max(start, known), end) for start, end in intervals if end > known):
                span = {"ph": "X", "name": name, "cat": "compute", "args": {}}
                times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
                self._events.append({**span, **times, **place})
            self._lane_ends[lane] = max([known, *(end for _, end in intervals)])

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
            late = time.monotonic() - self._written_at > _MAX_BUFFERED_S
            if late or len(self._events) >= _MAX_BUFFERED:
                self._write()

    def _stamp(self, event: dict[str, Any], tid: int) -> None:
        self._events.append({**event, "pid": self._pid, "tid": tid})

    def _write(self) -> None:
        lines = "".join(json.dumps(event) + "\n" for event in self._events)
        self._events.clear()
        self._written_at = time.monotonic()
        try:
            with open_private(self._path, "a", encoding="utf-8") as file:
                file.write(lines)
        except OSError as error:  # a full disk; what is traced goes on
            if not self._has_failed:
                logger.warning("%s: events are lost: %s", self._path, error)
            self._has_failed = True


def _lane_pair(lane: str, name: str, start: float, end: float) -> list[dict[str, Any]]:
    event = {"name": name, "cat": "episode", "id2": {"global": lane}, "args": {"lane": lane}}
    return [{**event, "ph": "b", "ts": start}, {**event, "ph": "e", "ts": end}]


_tracer: PerfTracer | None = None


def start(path: str | Path, process: str) -> None:
    """Trace this process, named `process`, to `path` from now on."""
    global _tracer
    stop()
    _tracer = PerfTracer(path, process)


def start_below(process: str) -> None:
    """Trace this process of a run, if its controller says so in the environment."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        name = "".join(char if char.isalnum() else "_" for char in process)
        start(Path(folder) / f"{name}-{os.getpid()}.jsonl", process)
        atexit.register(stop)


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


def counter(name: str, **values: float) -> None:
    """A graph of these values over time."""
    if _tracer is not None:
        _tracer.counter(name, values)


def prompt_lane(task_id: int, *, is_eval: bool = False, sample: int | None = None) -> str:
    """Of a prompt's group, or of one of its samples."""
    lane = f"{'eval' if is_eval else 'prompt'} {task_id}"
    return lane if sample is None else f"{lane}.{sample}"


def enter_stage(lanes: Iterable[str], name: str | None) -> None:
    """These lanes end the stage they are in and begin another; None: no other."""
    if _tracer is not None:
        _tracer.enter_stage(lanes, name)


def episode_span(name: str, start: float, end: float) -> None:
    """A span that has passed, in times of `time.perf_counter`, of the episode that runs here."""
    current = workflow_context.get()
    if current is None:
        return
    current.spans.append((name, start, end))
    if _tracer is not None:
        _tracer.lane_span(_lane_of(current), name, start, end)


@contextmanager
def episode_scope(name: str) -> Iterator[None]:
    """A span around the block, of the episode that runs here."""
    began = time.perf_counter()
    try:
        yield
    finally:
        episode_span(name, began, time.perf_counter())


def trace_generation(started: float, ended: float, ttft: float) -> None:
    """The request of an episode: until its first token (0: unknown), and from there."""
    first = min(started + ttft, ended)
    if ttft > 0:
        episode_span("prompt", started, first)
    episode_span("tokens", first, ended)


def _lane_of(current: Episode) -> str:
    sample = None if current.is_group else current.sample
    return prompt_lane(current.task_id, is_eval=current.is_eval, sample=sample)


def is_tracing() -> bool:
    return _tracer is not None


def add_spans(process: str, name: str, intervals: Sequence[tuple[float, float]]) -> None:
    """Spans (start, end) of another process; see `PerfTracer.add_spans`."""
    if _tracer is not None:
        _tracer.add_spans(process, name, intervals)


def read_trace(path: str | Path) -> list[dict[str, Any]]:
    """The events of one process's file, without the torn last line of a killed process."""
    events: list[dict[str, Any]] = []
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict) and isinstance(event.get("ts", 0.0), (int, float)):
            events.append(cast(dict[str, Any], event))
        else:
            logger.warning("%s line %d is torn and left out", path, number)
    return events


@dataclass(frozen=True, slots=True)
class MergedTrace:
    num_events: int
    processes: list[str]  # their names, in the order of the files


def merge_traces(folder: str | Path, out: str | Path) -> MergedTrace:
    """Join all `*.jsonl` traces of `folder` into one Chrome trace."""
    files = sorted(Path(folder).glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"no traces (*.jsonl) in {folder}; set perf_tracer.enabled=true")
    events = [event for file in files for event in read_trace(file)]
    processes = [
        str(event.get("args", {}).get("name")) for event in events if _names_a_process(event)
    ]
    events.sort(key=lambda event: event.get("ts", 0.0))  # metadata has no time and comes first
    atomic_write_text(out, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return MergedTrace(len(events), list(dict.fromkeys(processes)))


def _names_a_process(event: dict[str, Any]) -> bool:
    return event.get("ph") == "M" and event.get("name") == "process_name"


def _in_asyncio_task() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:  # no event loop runs in this thread
        return False
