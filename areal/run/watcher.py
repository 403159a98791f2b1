"""Watcher process of `run/watchdog.py`: detects a hang from outside the run.

It needs no live thread of the run, nor its interpreter:

    run      the clock of utils/waits.py in shared memory  ->  watcher: any progress?
    watcher  {"ask": "waits"}                       ->  run: {"waits": [...]}, within `_ANSWER_S`
    watcher  {"ask": "end", "line": why}            ->  run: prints the line, exits with code 1

A run that does not answer (a call that holds the GIL, a process stuck in the kernel) is killed: the
watcher then names the innermost calls of its busiest thread, and prints the line itself.

Imports no torch; exits when the run's end of the channel closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from areal.run import restart
from areal.utils import stacks, waits
from areal.utils.channel import Channel

_ANSWER_S = 5.0
_ENDING_S = 5.0
_MAX_POLL_S = 5.0
_MAX_NAMED = 4  # waits on the last line; the log has all


@dataclass(frozen=True, slots=True)
class Watched:
    """The run, as described to its watcher."""

    pid: int
    seconds: float  # longest time without progress
    stacks: str  # file
    clock_fd: int
    channel_fd: int
    restart_fd: int | None  # the pipe of run/restart.py, if there is a supervisor

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main(text: str) -> None:
    """Entry point of the watcher; `text` is a Watched as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run
    stacks.listen()
    run = Watched(**json.loads(text))
    channel = Channel(socket.socket(fileno=run.channel_fd))
    if run.restart_fd is not None:
        restart.answer_to(run.restart_fd)
    for quiet_s in _quiet_moments(run, channel):
        if _end(run, channel, quiet_s):
            return


def _quiet_moments(run: Watched, channel: Channel) -> Iterator[float]:
    """Yields the seconds without progress whenever they reach the limit. Ends with the run."""
    clock = waits.open_clock(run.clock_fd)
    poll_s = min(_MAX_POLL_S, run.seconds / 10)
    counts_from = asleep = time.monotonic()
    while not _has_ended(channel, poll_s):
        woke = time.monotonic()
        if woke - asleep > poll_s + run.seconds / 2 or stacks.is_stopped(run.pid):
            # The watcher, the run or the machine was suspended: restart the count.
            counts_from = woke
        elif (quiet_s := min(clock.quiet_s(), woke - counts_from)) >= run.seconds:
            yield quiet_s
            counts_from = time.monotonic()
        asleep = time.monotonic()


def _has_ended(channel: Channel, wait_s: float) -> bool:
    """Whether the run has closed its end within `wait_s`."""
    deadline = time.monotonic() + wait_s
    with contextlib.suppress(TimeoutError):
        while True:  # discard late answers
            try:
                channel.receive(max(deadline - time.monotonic(), 0.001))
            except (EOFError, ConnectionError):
                return True
    return False


def _end(run: Watched, channel: Channel, quiet_s: float) -> bool:
    """Report the hang and end the run; False if it has made progress meanwhile."""
    answer = _ask(channel, {"ask": "waits"})
    if answer is not None and answer["quiet_s"] < run.seconds:
        return False
    path = Path(run.stacks)
    where = f"stacks of all processes: {path}"
    try:
        stacks.collect(path, run.pid, leave_out=[os.getpid()])
    except OSError as error:
        where = f"no stacks: {error}"
    found = answer["waits"] if answer is not None else [_who_holds_it(path, run.pid)]
    found = [*found[:_MAX_NAMED], *(f"stopped: {name}" for name in stacks.stopped(run.pid))]
    quiet = f"no progress for {quiet_s:.0f} s (watchdog.seconds={run.seconds:g})"
    line = f"areal: error: {quiet}: {'; '.join(found)}. {where}"
    if answer is None or not _ends_itself(channel, line):
        _kill(run.pid, line)
    return True


def _who_holds_it(path: Path, pid: int) -> str:
    try:
        frames = stacks.busy_frames(path, pid)
    except OSError:
        frames = ""
    place = f"; its busiest thread is in {frames}" if frames else ""
    return f"process {pid} does not respond: one of its calls holds the GIL{place}"


def _ask(channel: Channel, question: dict[str, Any]) -> dict[str, Any] | None:
    """The run's answer, or None if none comes in time."""
    try:
        channel.send(json.dumps(question).encode(), timeout_s=_ANSWER_S)
        (answer,) = channel.receive(_ANSWER_S)
        return json.loads(answer)
    except (OSError, EOFError):
        return None


def _ends_itself(channel: Channel, line: str) -> bool:
    """Ask the run to print the line and exit; whether it does."""
    with contextlib.suppress(OSError):
        question = json.dumps({"ask": "end", "line": line}).encode()
        channel.send(question, timeout_s=_ENDING_S)
    return _has_ended(channel, _ENDING_S)


def _kill(pid: int, line: str) -> None:
    with contextlib.suppress(OSError):  # the supervisor has ended
        restart.forbid_restart()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # so that nothing is printed after the line
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
        os.kill(pid, signal.SIGKILL)
