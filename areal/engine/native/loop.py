"""The thread that owns a NativeEngine, and delivery of its results.

    any thread --submit/abort/call--> [orders] --> engine thread: orders, step, orders, step, ...
                                                        |
    any thread <------ deliver([Reply, ...]) -----------+   one call per step and receiver

`EngineLoop` consumes orders; produces replies; waits while there is neither an order nor work (or
while paused); unblocked by the next order. Orders run between two steps, so a weight update never
overlaps a step. `deliver` runs on the engine thread and must not block. A step that raises ends the
loop: all pending requests get the cause, later orders are refused with it, and `failure` keeps it.

`Receiver` passes the results of one HTTP request from the engine thread to the event loop:

    async with Receiver(engine_loop, receive) as receiver:
        receiver.submit(requests)
        while receiver.unfinished and (results := await receiver.next()) is not None:
            ...

The engine thread never blocks: results are queued here once per step. On exit, unfinished requests
are discarded; a client disconnect ends the wait.

Its time, computing and not (server_time.py), goes into the statistics and into a run's trace.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from areal.engine.native.engine import NativeEngine
from areal.engine.native.sequence import Finished, GenRequest, Progress
from areal.engine.native.wire import Refusal, Reply
from areal.engine.server_time import BusyIntervals, IdleTime
from areal.utils import logging, perf_tracer
from areal.utils.threads import share_interpreter

logger = logging.getLogger("NativeEngineLoop")

T = TypeVar("T")
Deliver = Callable[[Sequence[Reply | Refusal | Progress]], None]


class EngineEndedError(RuntimeError):
    """The engine has stopped: closed, or failed with the error in the message."""


@dataclass(slots=True, eq=False)
class _Submission:
    requests: Sequence[GenRequest]
    deliver: Deliver
    time: float


@dataclass(slots=True, eq=False)
class _Call:
    function: Callable[[NativeEngine], Any]
    future: Future


@dataclass(slots=True)
class _Waiter:
    deliver: Deliver
    time: float  # time.monotonic() of the submission


class EngineLoop:
    """
    loop = EngineLoop(NativeEngine.from_pretrained(path))
    loop.submit([GenRequest("a", [5, 7], gconfig)], deliver=print)
    loop.call(lambda engine: engine.load_weights(source, 3, recompute_kv=True)).result()
    loop.close()
    """

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self.device = engine.device
        self._wake = threading.Condition()
        self._orders: list[_Submission | _Call] = []
        self._waiters: dict[str, _Waiter] = {}  # by rid; used by the engine thread only
        self._paused = False
        self._closing = False
        self._ended: EngineEndedError | None = None
        self.failure: BaseException | None = None  # the error that ended the loop, if any
        self.busy = BusyIntervals()
        self._idle = IdleTime()
        self._counted_at = 0.0  # requests, for the trace
        self._thread = threading.Thread(target=self._run, name="native-engine", daemon=True)
        share_interpreter()
        self._thread.start()

    @property
    def version(self) -> int:
        """Version of the live weights; does not block, also during a step."""
        return self._engine.version

    @property
    def loads_files(self) -> bool:
        """Whether `load_weights` needs a publication instead of tensors of this process."""
        return self._engine.loads_files

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that requests can name."""
        return self._engine.adapters.names

    @property
    def paused(self) -> bool:
        return self._paused

    def submit(self, requests: Sequence[GenRequest], deliver: Deliver) -> None:
        """Each request ends in exactly one Reply or Refusal passed to `deliver`, after `Progress`
        if it has `progress_tokens`.

        Requests submitted together reach the engine together, so the samples of a group share their
        prompt from the first step.
        """
        self._order(_Submission(requests, deliver, time.monotonic()))

    def call(self, function: Callable[[NativeEngine], T]) -> Future[T]:
        """Runs `function` on the engine thread between two steps, also while paused."""
        future: Future[T] = Future()
        self._order(_Call(function, future))
        return future

    def stats(self) -> dict[str, float]:
        """The engine's counters; does not wait for a running step."""
        return {**self._engine.stats(), "busy_s": self.busy.total_s, **self._idle.stats()}

    def abort(self, rids: Iterable[str] | None = None) -> Future[int]:
        """Ends these requests (None: all) with their tokens so far; the result is their number."""
        wanted = None if rids is None else list(rids)
        return self.call(lambda engine: self._abort(engine, wanted, delivered=True))

    def discard(self, rids: Iterable[str]) -> None:
        """Ends requests without delivering results. No-op on a loop that has ended."""
        wanted = list(rids)
        try:
            self.call(lambda engine: self._abort(engine, wanted, delivered=False))
        except EngineEndedError:
            logger.debug("the engine has ended, nothing to discard")

    def pause(self) -> None:
        """Returns when no step runs; requests are kept and new ones accepted."""
        self.call(lambda engine: self._set_paused(True)).result()

    def resume(self) -> None:
        self.call(lambda engine: self._set_paused(False)).result()

    def close(self) -> None:
        """Ends the thread after the current step; pending requests are refused. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _order(self, order: _Submission | _Call) -> None:
        with self._wake:
            if self._ended is not None:
                raise EngineEndedError(str(self._ended)) from self.failure
            self._orders.append(order)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._carry_out_orders():
                self._step()
        except BaseException as err:  # boundary: all pending requests get the cause
            logger.exception("the native engine ended")
            self.failure = err
        self._end()

    def _carry_out_orders(self) -> bool:
        """Runs orders until a step is due (True) or the loop is closed (False)."""
        while not self._closing:
            with self._wake:
                while not (self._orders or self._closing or self._step_is_due()):
                    with self._idle.spent(self._why_idle()):
                        self._wake.wait()
                orders, self._orders = self._orders, []
            # Popped one by one, so that an order's payload (memory of another process) is released
            # while waiting for the next.
            while orders:
                self._carry_out(orders.pop(0))
            if self._step_is_due():
                return not self._closing
        return False

    def _why_idle(self) -> str:
        """Constant within a wait: only orders, which end it, change the answer."""
        if self._paused:
            return "paused"
        return "offloaded" if self._engine.offloaded else "no_request"

    def _step_is_due(self) -> bool:
        return not self._paused and self._engine.has_work

    def _carry_out(self, order: _Submission | _Call) -> None:
        if isinstance(order, _Submission):
            self._admit(order)
        elif order.future.set_running_or_notify_cancel():
            try:
                with self._idle.spent("control"):
                    result = order.function(self._engine)
                order.future.set_result(result)
            except Exception as err:  # belongs to the caller of `call`
                order.future.set_exception(err)

    def _admit(self, order: _Submission) -> None:
        refusals: list[Refusal] = []
        for request in order.requests:
            if request.rid in self._waiters:
                fault = f"rid: {request.rid} is already running; give each request its own"
                refusals.append(Refusal(request.rid, "request", fault))
                continue
            # Registered first, so that this request also gets the cause if `add` fails.
            self._waiters[request.rid] = _Waiter(order.deliver, order.time)
            try:
                self._engine.add(request)
            except ValueError as err:
                del self._waiters[request.rid]
                refusals.append(Refusal(request.rid, "request", str(err)))
        if refusals:
            _hand_over(order.deliver, refusals)

    def _step(self) -> None:
        start = time.time()
        finished = self._engine.step()
        end = time.time()
        self.busy.add(start, end)
        if perf_tracer.is_tracing() and end - self._counted_at > _COUNT_S:
            self._counted_at, stats = end, self._engine.stats()
            perf_tracer.counter("requests", running=stats["running"], waiting=stats["waiting"])
        if finished:
            self._deliver(finished)

    def _deliver(self, finished: Iterable[Finished | Progress]) -> None:
        """One call per receiver, however many of its requests progressed or ended in this step."""
        now = time.monotonic()
        by_receiver: dict[Deliver, list[Reply | Refusal | Progress]] = {}
        for one in finished:
            if isinstance(one, Progress):
                waiter = self._waiters.get(one.rid)
                if waiter is not None:  # else aborted meanwhile, with all its tokens
                    by_receiver.setdefault(waiter.deliver, []).append(one)
                continue
            waiter = self._waiters.pop(one.rid)
            result = _result_of(one, started=waiter.time, now=now)
            by_receiver.setdefault(waiter.deliver, []).append(result)
        for deliver, replies in by_receiver.items():
            _hand_over(deliver, replies)

    def _abort(self, engine: NativeEngine, rids: list[str] | None, *, delivered: bool) -> int:
        aborted = []
        for rid in list(self._waiters) if rids is None else rids:
            finished = engine.abort(rid) if rid in self._waiters else None
            if finished is not None:
                aborted.append(finished)
        if delivered:
            self._deliver(aborted)
        else:
            for finished in aborted:
                del self._waiters[finished.rid]
        return len(aborted)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    def _end(self) -> None:
        reason = "the native engine was closed"
        if self.failure is not None:
            reason = f"the native engine ended: {type(self.failure).__name__}: {self.failure}"
        with self._wake:
            self._ended = EngineEndedError(reason)
            orders, self._orders = self._orders, []
        for rid, waiter in self._waiters.items():
            _hand_over(waiter.deliver, [Refusal(rid, "engine", reason)])
        self._waiters.clear()
        for order in orders:
            if isinstance(order, _Submission):
                refusals = [Refusal(request.rid, "engine", reason) for request in order.requests]
                _hand_over(order.deliver, refusals)
            elif order.future.set_running_or_notify_cancel():
                order.future.set_exception(EngineEndedError(reason))


def _result_of(finished: Finished, *, started: float, now: float) -> Reply | Refusal:
    if not all(map(math.isfinite, finished.output_logprobs)):
        # An error, never data: weights or logits are broken.
        fault = "a log-probability is not finite; look at the weights the engine was given"
        return Refusal(finished.rid, "engine", fault)
    if finished.fault:
        return Refusal(finished.rid, "request", finished.fault)
    first = finished.first_token_time or now
    return Reply(finished, latency=now - started, ttft=first - started)


def _hand_over(deliver: Deliver, results: Sequence[Reply | Refusal | Progress]) -> None:
    try:
        deliver(results)
    except Exception:  # one receiver's error must not end the engine for all others
        logger.exception("could not hand over %d results", len(results))


Result = Reply | Refusal | Progress


class Receiver:
    def __init__(self, engine: EngineLoop, receive: Any) -> None:
        """`receive` is that of ASGI, after the body was read."""
        self._engine = engine
        self._receive = receive
        self._events = asyncio.get_running_loop()
        # Bounded by the number of tokens, plus one None when the client has disconnected.
        self._results: asyncio.Queue[Sequence[Result] | None] = asyncio.Queue()
        self.unfinished: set[str] = set()  # rids whose Reply or Refusal `next` has not returned

    async def __aenter__(self) -> Receiver:
        self._watcher = asyncio.create_task(self._watch(), name="client-watch")
        return self

    async def __aexit__(self, *error: object) -> None:
        self._watcher.cancel()
        if self.unfinished:
            self._engine.discard(self.unfinished)

    def submit(self, requests: Sequence[GenRequest], refused: Sequence[Refusal] = ()) -> None:
        """`refused` are results known in advance; they are returned first."""
        self.unfinished.update(one.rid for one in (*requests, *refused))
        if refused:
            self._results.put_nowait(refused)
        if requests:
            self._engine.submit(requests, self._deliver)

    async def next(self) -> list[Result] | None:
        """All available results, at least one; None when the client has disconnected."""
        results: list[Result] = []
        while not results or not self._results.empty():
            more = await self._results.get()
            if more is None:
                return None
            results += more
        ended = [one.rid for one in results if not isinstance(one, Progress)]
        self.unfinished.difference_update(ended)
        return results

    def _deliver(self, results: Sequence[Result]) -> None:  # on the engine thread
        self._events.call_soon_threadsafe(self._results.put_nowait, results)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._results.put_nowait(None)


_COUNT_S = 0.1  # between two counts of requests in a trace
