"""One rank of an engine, in its worker process: the engine, and what its calls leave behind.

Statistics that a call records travel back with its result. A result that is itself a function (the
writer of a snapshot) stays here: the caller gets a number, starts it by that, and asks until it has
ended. It runs in a thread of its own, so that other calls go on meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from areal.utils import stats_tracker
from areal.utils.import_path import load
from areal.utils.in_thread import in_thread


@dataclass(frozen=True, slots=True)
class Outcome:
    result: Any
    stats: dict[str, stats_tracker.Partial]


@dataclass(frozen=True, slots=True)
class Held:
    """A function that stayed on the ranks; the same number on all of them."""

    number: int


class Rank:
    """Built by a scheduler; called by `TrainController` alone."""

    def __init__(self, engine: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """`engine` is an import path."""
        self._engine = load(engine, key="engine")(*args, **kwargs)
        self._numbers = itertools.count()
        self._held: dict[int, Callable[..., Any]] = {}
        self._running: dict[int, Future] = {}

    def place(self) -> tuple[int, bool]:
        """(which rows it computes, whether it answers for the ranks that compute the same)."""
        return self._engine.data_parallel_rank, self._engine.is_data_parallel_head()

    def call(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], scope: str
    ) -> Outcome:
        """The method under the caller's scope of statistics."""
        with stats_tracker.scope(scope) if scope else nullcontext():
            result = getattr(self._engine, method)(*args, **kwargs)
        if callable(result):
            held = Held(next(self._numbers))
            self._held[held.number] = result
            result = held
        return Outcome(result, stats_tracker.take())

    def start(self, number: int, args: Sequence[Any]) -> None:
        """Let a held function run, once."""
        self._running[number] = in_thread(f"held-{number}", self._held.pop(number), *args)

    def has_ended(self, number: int) -> bool:
        """Whether a started function has returned; what it raised is raised here."""
        if not self._running[number].done():
            return False
        self._running.pop(number).result()
        return True
