"""TrainController: an engine whose ranks are other processes, called as if it were here.

    controller = TrainController(scheduler, job, "package.module.Engine", layout, config, seed=1)
    controller.initialize(ft_spec)
    controller.train_batch(batch, loss_fn, weight_fn)     # every rank its rows, one answer
    controller.destroy()

Which calls travel, and how, is said by the marks on the contract (api/engine_api.py), read once:
there is no method here for any of them. A call goes to all ranks at once and has one deadline.

When a rank fails, the others may wait for it in a collective. They get a moment to say what they
know, then the role's workers are ended, and the error that came first is raised: an exception of
the engine itself, as from an engine in this process, or how the process of that rank ended.

A batch over data-parallel places, and what they answer back in its order.

rows = divide_rows(data, num_places=2, rows_per_unit=1)       # [[0, 2], [1]]
parts = [select_rows(data, own) for own in rows]
merge_rows([outputs of each place], rows)                      # rows as in `data`

One rank of an engine, in its worker process: the engine, and what its calls leave behind.

Statistics that a call records travel back with its result. A result that is itself a function (the
writer of a snapshot) stays here: the caller gets a number, starts it by that, and asks until it has
ended. It runs in a thread of its own, so that other calls go on meanwhile.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from areal.api.alloc_mode import ParallelStrategy
from areal.api.engine_api import Mark, TrainEngine, marks_of
from areal.api.scheduler_api import (
    EngineCallError,
    EngineCreationError,
    Job,
    Scheduler,
    WorkerNotFoundError,
    WorkerTimeoutError,
)
from areal.utils import logging, stats_tracker
from areal.utils.data import select_rows
from areal.utils.import_path import load
from areal.utils.in_thread import in_thread
from areal.utils.prefix_tree import pack_trees
from areal.utils.seqpack import pack_sequences
from areal.utils.waits import progress, waiting

logger = logging.getLogger("TrainController")

_RANK = "areal.infra.train_controller.Rank"
_POLL_S = 0.05  # between questions to a function that runs on the ranks beside other calls
_LAST_WORDS_S = 3.0  # for ranks that another one's failure wakes from a collective

Args = tuple[Any, ...]
KwArgs = dict[str, Any]


class TrainController:
    """Owns the workers of one role from the constructor to `destroy`."""

    def __init__(
        self,
        scheduler: Scheduler,
        job: Job,
        engine: str,
        parallel_strategy: ParallelStrategy,
        *args: Any,
        contract: type = TrainEngine,
        shares_prefixes: bool = False,
        setup_timeout_s: float = 3600.0,
        request_timeout_s: float = 3600.0,
        **kwargs: Any,
    ) -> None:
        """`engine` is an import path; `args` and `kwargs` are its constructor's.

        shares_prefixes: the engine computes once what its rows begin with alike, so such rows go
        to one place.
        """
        self._shares_prefixes = shares_prefixes
        self._marks = marks_of(contract)
        self._scheduler = scheduler
        self._role = job.role
        self._target = job.scheduling_strategy.target
        self._timeout_s = setup_timeout_s
        self._workers: list[str] = []
        # Of each rank: which rows it computes, and whether it answers for those that share them.
        self._places: list[int] = []
        self._is_head: list[bool] = []
        try:
            scheduler.create_workers(job)
            self._workers = [w.id for w in scheduler.get_workers(job.role, setup_timeout_s)]
            self._on_workers(self._create, [(engine, args, kwargs)] * len(self._workers))
            self._broadcast("create_process_group", (parallel_strategy,), {})
            places = self._on_workers(self._call, [("place",)] * len(self._workers))
            self._places, self._is_head = map(list, zip(*places, strict=True))
        except BaseException:  # Ctrl-C too: half-started workers must not stay
            self._end_workers()
            raise
        self._timeout_s = request_timeout_s

    def __getattr__(self, name: str) -> Callable[..., Any]:
        mark = self._marks.get(name)
        if mark is None:
            raise AttributeError(
                f"{name} is no call that reaches the ranks of {self._role}: it has no mark "
                "(@split, @broadcast or @head) in the contract"
            )
        return lambda *args, **kwargs: self._dispatch(name, mark, args, kwargs)

    def destroy(self) -> None:
        """End the engine, and the workers that are its own. Calling it twice is fine."""
        if self._workers:
            try:
                # The role whose processes it shares may have failed, and ended them.
                with suppress(WorkerNotFoundError):
                    self._broadcast("destroy", (), {})
            finally:
                self._end_workers()

    def _dispatch(self, method: str, mark: Mark, args: Args, kwargs: KwArgs) -> Any:
        if mark.kind == "split":
            return self._split(method, mark, args, kwargs)
        if mark.kind == "broadcast":
            return self._broadcast(method, args, kwargs)
        return self._run(method, [(args, kwargs)])[0].result

    def _broadcast(self, method: str, args: Args, kwargs: KwArgs) -> Any:
        result = self._run(method, [(args, kwargs)] * len(self._workers))[0].result
        if isinstance(result, Held):
            return lambda *held_args: self._run_held(method, result.number, held_args)
        return result

    def _run_held(self, method: str, number: int, args: Args) -> None:
        """What a call returned as a function, on all ranks; other calls may go on meanwhile."""
        deadline = time.monotonic() + self._timeout_s
        everywhere = len(self._workers)
        self._on_workers(self._call, [("start", number, args)] * everywhere)
        running = set(range(everywhere))
        while running:
            if time.monotonic() > deadline:
                stuck = f"{self._role}/{min(running)}"
                raise WorkerTimeoutError(stuck, f"{method}: no end within {self._timeout_s:g} s")
            time.sleep(_POLL_S)
            asked = sorted(running)
            ended = self._on_workers(
                self._call, [("has_ended", number)] * len(asked), [self._workers[r] for r in asked]
            )
            running = {rank for rank, has_ended in zip(asked, ended, strict=True) if not has_ended}

    def _split(self, method: str, mark: Mark, args: Args, kwargs: KwArgs) -> Any:
        batch, *rest = args
        units = {key: kwargs[key] for key in ("rows_per_unit",) if key in kwargs}
        rows = divide_rows(
            batch,
            num_places=max(self._places) + 1,
            shares_prefixes=self._shares_prefixes,
            **units,
        )
        parts = [select_rows(batch, own) for own in rows]
        outcomes = self._run(method, [((parts[place], *rest), kwargs) for place in self._places])
        if not mark.merges_rows:
            return outcomes[0].result
        ranks = zip(self._places, self._is_head, outcomes, strict=True)
        answers = {place: outcome.result for place, is_head, outcome in ranks if is_head}
        return merge_rows([answers[place] for place in range(len(rows))], rows)

    def _run(self, method: str, calls: Sequence[tuple[Args, KwArgs]]) -> list[Outcome]:
        """The method on the first ranks, as many as there are calls, each with its own arguments.

        What the heads recorded meanwhile becomes part of this process's statistics.
        """
        scope = stats_tracker.scope_path()
        messages = [("call", method, args, kwargs, scope) for args, kwargs in calls]
        try:
            with waiting(f"{method} on {len(calls)} ranks of {self._role}"):
                outcomes = self._on_workers(self._call, messages)
        except WorkerTimeoutError as error:
            raise WorkerTimeoutError(error.worker, f"{method}: {error.reason}") from None
        for outcome, is_head in zip(outcomes, self._is_head, strict=False):
            if is_head:
                stats_tracker.merge(outcome.stats)
        progress()
        return outcomes

    def _create(self, worker: str, *args: Any) -> None:
        self._scheduler.create_engine(worker, _RANK, self._role, *args, timeout_s=self._timeout_s)

    def _call(self, worker: str, method: str, *args: Any) -> Any:
        return self._scheduler.call_engine(
            worker, method, self._role, *args, timeout_s=self._timeout_s
        )

    def _on_workers(
        self,
        act: Callable[..., Any],
        messages: Sequence[Args],
        workers: Sequence[str] | None = None,
    ) -> list[Any]:
        """`act` on the workers (by default the first) at once, with a message for each; all their
        answers."""
        if not self._workers:
            raise RuntimeError(f"the workers of {self._role} have ended: see the first error")
        try:
            futures = [
                in_thread(f"call-{worker}", act, worker, *message)
                for worker, message in zip(workers or self._workers, messages, strict=False)
            ]
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:  # Ctrl-C: the ranks are still at it and would answer nothing else
            self._end_processes()
            raise
        if any(future.done() and future.exception() for future in futures):
            self._fail(futures)
        return [future.result() for future in futures]

    def _fail(self, futures: Sequence[Future]) -> NoReturn:
        """Raise the error that came first."""
        _, pending = wait(futures, timeout=_LAST_WORDS_S)
        ended = [future.exception() for future in futures if future.done()]
        errors = [error for error in ended if error is not None]
        first = min(errors, key=_failure_time)
        for error in errors:
            if error is not first:
                last_line = str(error).strip().rpartition("\n")[2]
                logger.warning("%s failed after the first: %s", self._role, last_line)
        is_of_engine = isinstance(first, EngineCallError | EngineCreationError)
        if pending or not is_of_engine:
            self._end_processes()
        if is_of_engine:
            cause = first.__cause__ or first
            cause.add_note(str(first))  # which rank, and where in it
            raise cause from None
        raise first

    def _end_processes(self) -> None:
        """Those of a shared role too: a rank that is stuck serves neither."""
        self._end_workers()
        if self._target is not None:
            self._scheduler.delete_workers(self._target)

    def _end_workers(self) -> None:
        self._workers = []
        self._scheduler.delete_workers(self._role)


def _failure_time(error: BaseException) -> float:
    """A process that ended, or a rank that does not answer, comes before what it caused."""
    return error.failed_at if isinstance(error, EngineCallError) else 0.0


Rows = list[int]


def divide_rows(
    batch: Mapping[str, Any],
    *,
    num_places: int,
    rows_per_unit: int = 1,
    shares_prefixes: bool = False,
) -> list[Rows]:
    """The rows of each place, ascending, nearly equal in tokens; some have none when there are
    fewer units of `rows_per_unit` neighbours than places.

    With `shares_prefixes` the engines compute once what rows begin with alike: such rows stay
    together, unless there are fewer groups of them than places, and count as their tree does.
    """
    lengths = batch["attention_mask"].sum(dim=1)
    if len(lengths) % rows_per_unit:
        raise ValueError(
            f"the batch has {len(lengths)} rows, which do not make units of {rows_per_unit} rows"
        )
    limits = {"min_bins": num_places, "algorithm": "kk"}
    if not len(lengths):
        parts = []
    elif shares_prefixes:
        ids = batch["input_ids"].numpy(force=True)
        sequences = [row[:length] for row, length in zip(ids, lengths.tolist(), strict=True)]
        parts = pack_trees(sequences, rows_per_unit=rows_per_unit, **limits)
    else:
        units = lengths.view(-1, rows_per_unit).sum(dim=1).tolist()
        parts = pack_sequences(units, **limits)
    rows = [
        [unit * rows_per_unit + row for unit in part for row in range(rows_per_unit)]
        for part in parts
    ]
    return rows + [[]] * (num_places - len(rows))


def merge_rows(parts: Sequence[torch.Tensor], rows: Sequence[Rows]) -> torch.Tensor:
    """Row `rows[i][j]` of the result is row j of `parts[i]`."""
    order = torch.tensor([row for own in rows for row in own])
    joined = torch.cat(list(parts))
    merged = torch.empty_like(joined)
    merged[order] = joined
    return merged


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
