"""TrainController: an engine whose ranks are other processes, with the interface of a local one.

    controller = TrainController(scheduler, job, "package.module.Engine", layout, config, seed=1)
    controller.initialize(ft_spec)
    controller.train_batch(batch, loss_fn, weight_fn)     # rows split over the ranks, one result
    controller.destroy()

The marks of the contract (api/engine_api.py) define which methods are remote and how they are
dispatched; none is written out here. A call goes to all ranks at once and has one deadline.

When a rank fails, the others may wait for it in a collective. They get `_LAST_WORDS_S` to report,
then the role's workers are ended, and the first error is raised: an exception of the engine, as
from a local one, or the exit of that rank's process.

`divide_rows` and `merge_rows` split a batch over data-parallel ranks and restore the row order:

    rows = divide_rows(data, num_places=2, rows_per_unit=1)       # [[0, 2], [1]]
    parts = [select_rows(data, own) for own in rows]
    merge_rows([outputs of each part], rows)                       # rows as in `data`

`Rank` holds one rank's engine in its worker process. Statistics recorded by a call return with its
result, and so do values of rows that were asked for. A result that is itself a function (the
writer of a snapshot) stays on the rank: the caller gets its number, starts it, and polls for its
end. It runs in a thread, so other calls continue.
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
from areal.api.engine_api import InferenceEngine, Mark, TrainEngine, marks_of
from areal.api.io_struct import WeightUpdateMeta
from areal.api.scheduler_api import (
    EngineCallError,
    EngineCreationError,
    Job,
    Scheduler,
    WorkerNotFoundError,
    WorkerTimeoutError,
)
from areal.utils import logging, row_values, stats_tracker
from areal.utils.data import select_rows
from areal.utils.import_path import load
from areal.utils.perf_tracer import trace_scope
from areal.utils.prefix_tree import pack_trees
from areal.utils.seqpack import pack_sequences
from areal.utils.startup import importing
from areal.utils.threads import in_thread
from areal.utils.waits import progress, waiting

logger = logging.getLogger("TrainController")

_RANK = "areal.infra.train_controller.Rank"
_POLL_S = 0.05  # interval of `has_ended` for a held function
_LAST_WORDS_S = 3.0  # for ranks in a collective with a failed one

Rows = list[int]
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
        """`engine` is an import path; `args` and `kwargs` are for its constructor.

        shares_prefixes: the engine computes common prefixes of rows once, so such rows go to one
        data-parallel rank.
        """
        self._shares_prefixes = shares_prefixes
        self._marks = marks_of(contract)
        self._scheduler = scheduler
        self._role = job.role
        self._target = job.scheduling_strategy.target
        self._timeout_s = setup_timeout_s
        self._workers: list[str] = []
        self._connected: InferenceEngine | None = None
        # Of each rank: its data-parallel rank, and whether it is the head of those with the same.
        self._places: list[int] = []
        self._is_head: list[bool] = []
        try:
            scheduler.create_workers(job)
            self._workers = [w.id for w in scheduler.get_workers(job.role, setup_timeout_s)]
            self._on_workers(self._create, [(engine, args, kwargs)] * len(self._workers))
            self._broadcast("create_process_group", (parallel_strategy,), {})
            places = self._on_workers(self._call, [("place",)] * len(self._workers))
            self._places, self._is_head = map(list, zip(*places, strict=True))
        except BaseException:  # also Ctrl-C: end workers that have started
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

    # Calls that no rank needs to see.
    train, eval, forward = TrainEngine.train, TrainEngine.eval, TrainEngine.forward
    rollout_batch, prepare_batch = TrainEngine.rollout_batch, TrainEngine.prepare_batch

    def connect_engine(self, engine: InferenceEngine, meta: WeightUpdateMeta) -> None:
        """The ranks get copies, to send weights; episodes run on the engine itself."""
        self._broadcast("connect_engine", (engine, meta), {})
        self._connected = engine

    @property
    def connected_engine(self) -> InferenceEngine:
        if self._connected is None:
            raise RuntimeError("no inference engine is connected: call connect_engine() first")
        return self._connected

    def export_stats(self) -> dict[str, float]:
        """What the heads of all data-parallel ranks recorded since the last call."""
        return stats_tracker.export_all()

    def destroy(self) -> None:
        """End the engine and the workers it owns. Idempotent."""
        if self._workers:
            try:
                # A failed host role may have ended the shared processes.
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
        """Run a held function on all ranks; other calls may run meanwhile."""
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

    def _run(self, method: str, calls: Sequence[tuple[Args, KwArgs]]) -> list[RankResult]:
        """Run the method on the first `len(calls)` ranks, each with its own arguments.

        Statistics recorded by the heads are merged into those of this process.
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
                row_values.add(outcome.row_values)
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
        """Run `act` on the workers (default: the first ones) concurrently, with one message each;
        returns all results."""
        if not self._workers:
            raise RuntimeError(f"the workers of {self._role} have ended: see the first error")
        try:
            futures = [
                in_thread(f"call-{worker}", act, worker, *message)
                for worker, message in zip(workers or self._workers, messages, strict=False)
            ]
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:  # Ctrl-C: the ranks are busy and would answer no other call
            self._end_processes()
            raise
        if any(future.done() and future.exception() for future in futures):
            self._fail(futures)
        return [future.result() for future in futures]

    def _fail(self, futures: Sequence[Future]) -> NoReturn:
        """Raise the first error."""
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
            cause.add_note(str(first))  # rank and remote traceback
            raise cause from None
        raise first

    def _end_processes(self) -> None:
        """End the host role's processes too: a stuck rank can serve neither role."""
        self._end_workers()
        if self._target is not None:
            self._scheduler.delete_workers(self._target)

    def _end_workers(self) -> None:
        self._workers = []
        self._scheduler.delete_workers(self._role)


def _failure_time(error: BaseException) -> float:
    """A dead process or unresponsive rank sorts before the errors it caused."""
    return error.failed_at if isinstance(error, EngineCallError) else 0.0


def divide_rows(
    batch: Mapping[str, Any],
    *,
    num_places: int,
    rows_per_unit: int = 1,
    shares_prefixes: bool = False,
) -> list[Rows]:
    """The rows of each data-parallel rank, ascending, nearly equal in tokens. Some are empty if
    there are fewer units of `rows_per_unit` neighbouring rows than ranks.

    With `shares_prefixes` rows with a common prefix stay together, unless there are fewer such
    groups than ranks, and count as their prefix tree.
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
class RankResult:
    result: Any
    stats: dict[str, stats_tracker.Partial]
    row_values: row_values.RowValues  # of rows that the caller has numbered


@dataclass(frozen=True, slots=True)
class Held:
    """A function held on the ranks, with the same number on all of them."""

    number: int


class Rank:
    """One rank: built by a scheduler, called only by `TrainController`."""

    def __init__(self, engine: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """`engine` is an import path."""
        with importing():
            engine_class = load(engine, key="engine")
        self._engine = engine_class(*args, **kwargs)
        self._numbers = itertools.count()
        self._held: dict[int, Callable[..., Any]] = {}
        self._running: dict[int, Future] = {}

    def place(self) -> tuple[int, bool]:
        """(data-parallel rank, whether it is the head of the ranks with the same rows)."""
        return self._engine.data_parallel_rank, self._engine.is_data_parallel_head()

    def call(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], scope: str
    ) -> RankResult:
        """Run the method in the caller's statistics scope."""
        in_scope = stats_tracker.scope(scope) if scope else nullcontext()
        with in_scope, trace_scope(method, "compute"):
            result = getattr(self._engine, method)(*args, **kwargs)
        if callable(result):
            held = Held(next(self._numbers))
            self._held[held.number] = result
            result = held
        return RankResult(result, stats_tracker.take(), row_values.take())

    def start(self, number: int, args: Sequence[Any]) -> None:
        """Run a held function in a thread, once."""
        self._running[number] = in_thread(f"held-{number}", self._held.pop(number), *args)

    def has_ended(self, number: int) -> bool:
        """Whether a started function has returned; raises its exception."""
        if not self._running[number].done():
            return False
        self._running.pop(number).result()
        return True
