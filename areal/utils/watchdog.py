"""Ends a run in which nothing moves any more, and says who waits for whom.

    watchdog = Watchdog(300, stacks=logs / "stacks.txt")
    watchdog.observe("server", engine.stats)      # a change of what it returns is a movement too
    watchdog.start()
    ...
    watchdog.close()

A movement is whatever calls `waits.progress()`: an episode ended, a phase began, a micro-batch was
computed. After `seconds` without one the waits of this process go to the log, the stacks of all its
processes to a file, the cause to the last line of standard error; then the process ends with exit
code 1 at once, whatever its threads are stuck in, and is not started again: somebody has to look.
Its children end with it (child_process.py), and what it wrote is as whole as after `kill -9`.

    watchdog thread   waits for: its own clock       unblocked by: close()
    observer threads  wait for: what they observe; one that hangs is no movement, and nothing worse
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from areal.utils import logging, restart, stacks, waits

logger = logging.getLogger("Watchdog")

_MAX_POLL_S = 5.0
_MAX_NAMED = 4  # waits on the last line; the log has all


class Watchdog:
    """`seconds` None never ends anything."""

    def __init__(self, seconds: float | None, *, stacks: Path) -> None:
        self._seconds = seconds
        self._stacks = stacks
        self._closing = threading.Event()
        self._observed: dict[str, Callable[[], object]] = {}

    def observe(self, name: str, look: Callable[[], object]) -> None:
        """Before `start`: from then on `look` is called every few seconds in a thread."""
        self._observed[name] = look

    def start(self) -> None:
        """Calling it twice is fine."""
        if self._seconds is None or self._closing.is_set():
            return
        seconds, self._seconds = self._seconds, None
        waits.progress()
        poll_s = min(_MAX_POLL_S, seconds / 10)
        self._run("watchdog", self._watch, seconds, poll_s)
        for name, look in self._observed.items():
            self._run(f"watchdog-{name}", self._look, look, poll_s)

    def close(self) -> None:
        self._closing.set()

    def _run(self, name: str, function: Callable[..., None], *args: object) -> None:
        threading.Thread(target=function, args=args, name=name, daemon=True).start()

    def _watch(self, seconds: float, poll_s: float) -> None:
        asleep = time.monotonic()
        while not self._closing.wait(poll_s):
            woke = time.monotonic()
            if woke - asleep > seconds / 2:
                waits.progress()  # the whole process was stopped (SIGSTOP, a sleeping laptop)
            elif waits.quiet_s() >= seconds:
                self._end(seconds)
            asleep = time.monotonic()

    def _look(self, look: Callable[[], object], poll_s: float) -> None:
        seen: object = None
        while not self._closing.wait(poll_s):
            try:
                now = look()
            except Exception as error:  # its owner meets it too, and decides what it means
                logger.debug("nothing to see: %s", error)
                continue
            if now != seen:
                seen = now
                waits.progress()

    def _end(self, seconds: float) -> NoReturn:
        quiet = f"nothing has moved for {waits.quiet_s():.0f} s (watchdog.seconds={seconds:g})"
        found = waits.describe() or ["nobody waits: a computation hangs"]
        logger.error("%s:\n%s", quiet, "\n".join(found))
        where = f"stacks of all processes: {self._stacks}"
        try:
            stacks.collect(self._stacks)
        except OSError as error:
            where = f"no stacks: {error}"
        named = "; ".join(found[:_MAX_NAMED])
        with contextlib.suppress(Exception):  # nothing may keep the process from ending
            restart.stay_down()
            sys.stdout.flush()
            sys.stderr.write(f"areal: error: {quiet}: {named}. {where}\n")
            sys.stderr.flush()
        os._exit(1)
