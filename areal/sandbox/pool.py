"""AsyncRewardWrapper: await a plain reward function that runs in a pool of worker processes.

    await wrapper(...) -> _waiting -> worker 0 [call running | sent | sent]  -> future
                                   -> worker 1 [call running | sent]         -> future

A worker runs its calls in order, one at a time. Calls are sent ahead, fewer the slower the function
is, so that a fast function costs one system call per batch. The caller's event loop watches the
sockets and nothing here blocks it; one thread measures the workers' usage (`watch`) and deletes
their folders.

Invariant: a call ends with the function's own finite number or with a RewardError, even if the pool
itself fails. A call that hangs, crashes, raises or returns anything else is retried up to a bound,
then raises. Only the call that killed a worker is charged; calls queued behind it are resent.
Workers killed from outside are restarted with back-off.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

from areal.api.config.inference import ProcessLimits
from areal.api.scratch import ScratchFolder
from areal.sandbox.output import OutputRelay
from areal.sandbox.process import BadReplyError, RewardProcess, describe_function, frame
from areal.sandbox.restarts import KILLS_PER_RETRY, Restarts, is_from_outside, is_passing
from areal.sandbox.watch import Usage, beyond, measure
from areal.utils.child_process import RestartBudget, describe_exit

logger = logging.getLogger("areal.RewardApi")

START_TIMEOUT_S = 120.0  # importing the module of a reward function may load torch
MAX_SENT_AHEAD = 64
HOPELESS_TIMEOUTS = 8  # without a single call that returned
DEFAULT_LIMITS = ProcessLimits()
CPU_PER_SECOND = 4  # default CPU limit: cores that a call may keep busy
SENT_AHEAD_S = 0.01  # keep about this much work in a worker's socket
FLOOD_PAUSE_S = 0.01  # between two reads of output that is dropped
WATCH_S = 0.5  # between two measurements of the workers
WATCHED_AT_ONCE = 8  # measurements slow down in proportion above this many workers


class RewardError(RuntimeError):
    """The reward function failed: it raised, or what it returned is not a finite number."""


class RewardTimeoutError(RewardError):
    """The reward function did not return in time; its process was killed."""


class RewardCrashError(RewardError):
    """The process of the reward function died."""


class AsyncRewardWrapper:
    """Awaitable form of `fn(prompt, completions, prompt_ids, completion_ids, **data) -> float`.

        wrapper = AsyncRewardWrapper("my_package.rewards.exact_match", timeout_seconds=5)
        reward = await wrapper("2+2=", "4", prompt_ids, completion_ids, answer="4")
        wrapper.close()

    `reward_fn` is an import path or anything that pickles (a module-level function, a partial of
    one). `timeout_seconds` counts from the start of the call in its worker. A failed call is run
    again up to `max_retries` times, unless no call ever returned in time or the arguments do not
    fit the signature. Workers start with the first calls and stay until `close`. `limits` is a
    ProcessLimits or a dict of its fields; by default a worker starts no processes and writes only
    to a folder of its own. None disables confinement. `options` are keywords of every call; a
    column of the row that has the name of one is not passed.
    """

    def __init__(
        self,
        reward_fn: Callable[..., float] | str,
        timeout_seconds: float = 15,
        max_workers: int | None = None,
        max_retries: int = 3,
        limits: ProcessLimits | dict[str, Any] | None = DEFAULT_LIMITS,
        options: dict[str, Any] | None = None,
    ) -> None:
        if max_workers is None:
            max_workers = max((os.cpu_count() or 1) // 2, 1)
        if max_workers < 1:
            raise ValueError(f"max_workers must be at least 1, got {max_workers}")
        if max_retries < 0:
            raise ValueError(f"max_retries must be at least 0, got {max_retries}")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be above 0, got {timeout_seconds}")
        self.timeout_seconds = timeout_seconds
        self.max_workers = max_workers
        self.max_retries = max_retries
        self._limits = _checked_limits(limits, timeout_seconds)
        self._options = _checked_options(options)
        self.counts: Counter[str] = Counter()  # failed attempts: timeout, crash, killed, error
        self.name, self._setup = describe_function(reward_fn)
        self._output = OutputRelay(self.name)
        self._restarts = Restarts(RestartBudget(max_retries))
        self._folder: ScratchFolder | None = None  # parent of the workers' folders
        self._helper: ThreadPoolExecutor | None = None  # for blocking disk work
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers: list[RewardProcess] = []
        self._killed: list[RewardProcess] = []  # not reaped yet
        self._waiting: deque[_Call] = deque()
        self._pump_scheduled = False
        self._start_timer: asyncio.TimerHandle | None = None
        self._watch_timer: asyncio.TimerHandle | None = None
        self._has_warned = False
        self._next_id = 0
        self._mean_call_s: float | None = None

    async def __call__(self, /, *args: Any, **kwargs: Any) -> float:
        return await self.start(*args, **kwargs)

    def start(self, /, *args: Any, **kwargs: Any) -> asyncio.Future[float]:
        """The call as a future, without a task: for many calls at once, on a running loop."""
        loop = asyncio.get_running_loop()
        self._attach(loop)
        self._next_id += 1
        payload = self._pickle_arguments(args, {**kwargs, **self._options})
        call = _Call(self._next_id, payload, loop.create_future())
        self._waiting.append(call)
        self._schedule_pump()
        return call.future

    def close(self) -> None:
        """End the workers; unfinished calls fail. Thread-safe and idempotent."""
        loop = self._loop
        if loop is None or loop.is_closed() or not loop.is_running() or _is_current(loop):
            return self._shut_down()
        done = threading.Event()
        loop.call_soon_threadsafe(lambda: (self._shut_down(), done.set()))
        done.wait(timeout=10)

    # The rest runs on the event loop; its callbacks go through `_run`.

    def _run(self, step: Callable[..., None], *args: Any) -> None:
        """An internal error fails the open calls; otherwise they would wait forever."""
        try:
            step(*args)
        except Exception as error:
            logger.exception("the reward pool of %s failed", self.name)
            self._abandon(RewardError(f"the reward pool of {self.name} failed: {error!r}"))

    def _abandon(self, error: RewardError) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            self._waiting.extend(worker.in_flight)
            worker.in_flight.clear()
        self._fail_all(error)
        for worker in workers:
            try:
                self._dismiss(worker)
            except Exception:  # the calls have failed already; end the other workers
                logger.exception("a reward worker of %s could not be ended", self.name)

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Move to the caller's loop: workers belong to the loop that watches their sockets."""
        if loop is self._loop:
            return
        if self._loop is not None and not self._loop.is_closed() and self._num_unfinished():
            raise RuntimeError(
                f"the reward wrapper of {self.name} still has calls on another event loop; "
                "build one AsyncRewardWrapper per loop"
            )
        self._shut_down()
        self._loop = loop

    @property
    def _own_loop(self) -> asyncio.AbstractEventLoop:
        """The workers' loop; set from the first call until `close`."""
        if self._loop is None:
            raise RuntimeError(f"the reward wrapper of {self.name} has no event loop")
        return self._loop

    def _pickle_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        try:
            return pickle.dumps((args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise TypeError(
                f"an argument of {self.name} does not pickle ({error}); a data row may hold only "
                "values that can be sent to another process"
            ) from error

    def _schedule_pump(self) -> None:
        """Once per tick, so that concurrent calls are sent as one batch."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._own_loop.call_soon(self._run, self._pump)

    def _pump(self) -> None:
        self._pump_scheduled = False
        self._reap()
        self._start_missing()
        sent_ahead = self._sent_ahead()
        ready = [worker for worker in self._workers if worker.ready]
        while self._waiting and ready:
            worker = min(ready, key=lambda w: len(w.in_flight))
            if len(worker.in_flight) >= sent_ahead:
                break
            call = self._waiting.popleft()
            if not call.future.done():  # cancelled while it waited
                self._queue_on(worker, call)
        for worker in list(self._workers):
            self._send(worker)

    def _sent_ahead(self) -> int:
        """Calls a worker may hold: one while the function's cost is unknown or high."""
        if self._mean_call_s is None:
            return 1
        return min(1 + int(SENT_AHEAD_S / max(self._mean_call_s, 1e-6)), MAX_SENT_AHEAD)

    def _start_missing(self) -> None:
        if len(self._workers) >= min(self.max_workers, self._num_unfinished()):
            return
        delay_s = self._restarts.delay_s(self._own_loop.time())
        if delay_s == 0:
            self._start_worker()
            self._schedule_pump()  # one start per tick: each blocks for milliseconds
        elif self._start_timer is None:
            self._start_timer = self._own_loop.call_later(delay_s, self._run, self._on_start_timer)

    def _on_start_timer(self) -> None:
        self._start_timer = None
        self._pump()

    def _start_worker(self) -> None:
        try:
            if self._folder is None:
                self._folder = ScratchFolder("rewards")
            worker = RewardProcess(self._own_loop.time(), self._limits, self._folder.path)
        except OSError as error:  # out of processes or descriptors: go on with those running
            self.max_workers = max(len(self._workers), 1)
            logger.warning("only %d reward workers: %s", len(self._workers), error)
            if not self._workers:
                cause = RewardCrashError(f"cannot start a reward worker: {error}")
                self._on_failed_start(cause, "killed" if is_passing(error) else "crash")
            return
        worker.outgoing += frame(0, self._setup)
        self._workers.append(worker)
        self._own_loop.add_reader(worker.channel, self._run, self._on_readable, worker)
        self._own_loop.add_reader(worker.output, self._run, self._on_output, worker)
        self._arm(worker, START_TIMEOUT_S)
        self._arm_watch()

    def _on_failed_start(self, error: RewardError, kind: str) -> None:
        now = self._own_loop.time()
        self.counts[kind] += 1
        self._restarts.on_death(now)
        is_hopeless = self._restarts.on_failed_start(now, from_outside=kind == "killed")
        if is_hopeless and not any(worker.ready for worker in self._workers):
            self._fail_all(error)

    def _queue_on(self, worker: RewardProcess, call: _Call) -> None:
        worker.in_flight.append(call)
        if len(worker.in_flight) == 1:
            worker.busy_since = self._own_loop.time()
            if worker.timer is None:
                self._arm(worker, self.timeout_seconds)
        worker.outgoing += frame(call.id, call.payload)

    def _send(self, worker: RewardProcess) -> None:
        """Write what the socket takes now; the loop calls again when it is writable."""
        if worker.outgoing:
            try:
                del worker.outgoing[: worker.channel.send(worker.outgoing)]
            except BlockingIOError:
                pass
            except OSError:  # dead: the reader sees the end of its replies and handles it
                worker.outgoing.clear()
        if bool(worker.outgoing) != worker.watching_writes:
            worker.watching_writes = bool(worker.outgoing)
            if worker.watching_writes:
                self._own_loop.add_writer(worker.channel, self._run, self._send, worker)
            else:
                self._own_loop.remove_writer(worker.channel)

    def _on_readable(self, worker: RewardProcess) -> None:
        try:
            data = worker.channel.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._on_death(worker)
        try:
            for message in worker.split_messages(data):
                self._on_message(worker, message)
        except BadReplyError as error:
            self._kill(worker, RewardCrashError(f"the worker of {self.name} {error}"), "crash")
        self._pump()

    def _on_output(self, worker: RewardProcess) -> None:
        is_open = self._output.read(worker.output, self._own_loop.time())
        if not is_open or self._output.is_dropping:
            self._own_loop.remove_reader(worker.output)
        if is_open and self._output.is_dropping:  # dropped output must not keep the loop busy
            self._own_loop.call_later(FLOOD_PAUSE_S, self._run, self._read_on, worker)

    def _read_on(self, worker: RewardProcess) -> None:
        if worker in self._workers:
            self._own_loop.add_reader(worker.output, self._run, self._on_output, worker)

    def _on_message(self, worker: RewardProcess, message: dict[str, Any]) -> None:
        if not worker.ready and "fatal" in message:
            self._fail_all(RewardError(f"cannot load {self.name}: {message['fatal']}"))
        elif not worker.ready and "ready" in message:
            worker.ready = True
            self._restarts.on_ready()
            self._warn_of(message.get("unkept"))
            _disarm(worker)
        else:
            self._on_reply(worker, message)

    def _warn_of(self, unkept: Any) -> None:
        if unkept and not self._has_warned:
            self._has_warned = True
            logger.warning("this system cannot limit %s in the process of %s", unkept, self.name)

    def _on_reply(self, worker: RewardProcess, message: dict[str, Any]) -> None:
        if not worker.in_flight or worker.in_flight[0].id != message.get("id"):
            raise BadReplyError(f"answered a call it was not asked: {message!r:.200}")
        value, seconds = message.get("value"), message.get("s")
        call = worker.in_flight[0]
        if "unfit" in message:
            self._fail(call, RewardError(f"{self.name} {message['unfit']}"), "error")
        elif "error" in message:
            self._retry(call, RewardError(f"{self.name} raised {message['error']}"), "error")
        elif not (isinstance(value, float) and isinstance(seconds, float) and seconds >= 0):
            raise BadReplyError(f"sent a malformed reply: {message!r:.200}")
        elif not math.isfinite(value):
            found = f"{self.name} returned {value}; a reward must be finite"
            self._retry(call, RewardError(found), "error")
        else:
            mean = seconds if self._mean_call_s is None else self._mean_call_s
            self._mean_call_s = 0.8 * mean + 0.2 * seconds
            if not call.future.done():
                call.future.set_result(value)
        self._restarts.on_returned()
        worker.in_flight.popleft()
        worker.busy_since = self._own_loop.time()  # the next call, if any, starts now

    def _arm(self, worker: RewardProcess, seconds: float) -> None:
        worker.timer = self._own_loop.call_later(seconds, self._run, self._on_timer, worker)

    def _on_timer(self, worker: RewardProcess) -> None:
        """One timer per worker, re-armed for the remaining time, so replies need not reset it."""
        worker.timer = None
        if worker.ready and not worker.in_flight:
            return
        limit = self.timeout_seconds if worker.ready else START_TIMEOUT_S
        left = worker.busy_since + limit - self._own_loop.time()
        if left > 0:
            return self._arm(worker, left)
        doing = "did not return" if worker.ready else "was not loaded"
        message = f"{self.name} {doing} within {limit:g} s; its process was killed"
        self._kill(worker, RewardTimeoutError(message), "timeout")
        self._pump()

    def _on_death(self, worker: RewardProcess) -> None:
        """End of replies: all answered calls are settled, so the oldest open one is the cause."""
        code = worker.wait_end()
        kind = "killed" if is_from_outside(code) else "crash"
        ended = _how_it_ended(code)
        if worker.group is not None and worker.group.was_out_of_memory():
            kind, ended = "crash", "took more memory than limits.memory_gb allows"
        doing = "" if worker.ready else " while loading"
        message = f"the process of {self.name} {ended}{doing}"
        self._kill(worker, RewardCrashError(message), kind)
        self._pump()

    def _kill(self, worker: RewardProcess, error: RewardError, kind: str) -> None:
        """End a worker for `error`, charged to its oldest call; the others are resent."""
        if worker not in self._workers:
            return
        culprit = worker.in_flight.popleft() if worker.in_flight else None
        self._workers.remove(worker)
        self._waiting.extendleft(reversed(worker.in_flight))
        if culprit is not None:
            if kind != "timeout":
                self._restarts.on_death(self._own_loop.time())
            self._retry(culprit, error, kind)
        elif not worker.ready and self._waiting:
            self._on_failed_start(error, kind)
        self._dismiss(worker)

    def _dismiss(self, worker: RewardProcess) -> None:
        _disarm(worker)
        if not self._own_loop.is_closed():
            self._own_loop.remove_reader(worker.channel)
            self._own_loop.remove_reader(worker.output)
            self._own_loop.remove_writer(worker.channel)
        worker.channel.close()
        worker.kill()
        self._output.read_last(worker.output, self._own_loop.time())
        worker.printed.close()
        self._killed.append(worker)

    def _reap(self) -> None:
        for worker in [one for one in self._killed if one.process.poll() is not None]:
            self._killed.remove(worker)
            self._helping().submit(worker.clean_up)

    def _helping(self) -> ThreadPoolExecutor:
        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, thread_name_prefix="reward-helper")
        return self._helper

    def _arm_watch(self) -> None:
        if self._limits is not None and self._watch_timer is None and sys.platform == "linux":
            delay_s = WATCH_S * max(1.0, len(self._workers) / WATCHED_AT_ONCE)
            self._watch_timer = self._own_loop.call_later(delay_s, self._run, self._look)

    def _look(self) -> None:
        """Measure the workers' usage in a thread; `_judge` gets the result on the loop."""
        self._reap()
        workers, limits = list(self._workers), self._limits
        if limits is None or (not workers and not self._killed):
            self._watch_timer = None
            return

        def look() -> list[Usage | None]:
            return [measure(one.process.pid, one.folder, limits) for one in workers]

        looked = asyncio.wrap_future(self._helping().submit(look), loop=self._loop)
        looked.add_done_callback(lambda done: self._run(self._judge, workers, limits, done))

    def _judge(
        self,
        workers: list[RewardProcess],
        limits: ProcessLimits,
        looked: asyncio.Future[list[Usage | None]],
    ) -> None:
        if self._loop is None:  # closed while measuring
            return
        for worker, usage in zip(workers, looked.result(), strict=True):
            if usage is None or worker not in self._workers:
                continue
            cpu_s = worker.cpu_of_call(usage.cpu_s)
            if (broken := beyond(usage, limits, cpu_s)) is not None:
                error = RewardCrashError(f"the process of {self.name} {broken}; it was killed")
                self._kill(worker, error, "crash")
        self._watch_timer = None
        self._arm_watch()
        self._pump()

    def _retry(self, call: _Call, error: RewardError, kind: str) -> None:
        # Hundreds of calls may wait, and each would use up the whole timeout for the same result.
        timeouts = self.counts["timeout"] + (kind == "timeout")
        if self._mean_call_s is None and timeouts >= HOPELESS_TIMEOUTS:
            self._fail(call, error, kind)
            return self._fail_all(error)
        allowed = self.max_retries * (KILLS_PER_RETRY if kind == "killed" else 1)
        done = call.kills if kind == "killed" else call.failures
        if call.future.done() or done >= allowed:
            return self._fail(call, error, kind)
        self.counts[kind] += 1
        call.kills += kind == "killed"
        call.failures += kind != "killed"
        count = self.counts[kind]
        if count & (count - 1) == 0:  # 1, 2, 4, 8, ...: reported early, bounded in number
            cause = str(error).partition("\n")[0]
            logger.warning("%s; trying again (failed attempts of kind %s: %d)", cause, kind, count)
        self._waiting.append(call)
        self._schedule_pump()

    def _fail(self, call: _Call, error: RewardError, kind: str) -> None:
        self.counts[kind] += 1
        if not call.future.done():
            call.future.set_exception(error)

    def _fail_all(self, error: RewardError) -> None:
        while self._waiting:
            call = self._waiting.popleft()
            if not call.future.done() and not self._own_loop.is_closed():
                call.future.set_exception(error)

    def _num_unfinished(self) -> int:
        return len(self._waiting) + sum(len(worker.in_flight) for worker in self._workers)

    def _shut_down(self) -> None:
        if self._loop is not None:
            self._abandon(RewardError(f"the reward wrapper of {self.name} was closed"))
        for timer in (self._start_timer, self._watch_timer):
            if timer is not None:
                timer.cancel()
        self._start_timer = self._watch_timer = None
        self._loop, self._pump_scheduled = None, False
        for worker in self._killed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(timeout=5)
        self._reap()
        if self._helper is not None:
            self._helper.shutdown()
            self._helper = None
        if self._folder is not None:
            self._folder.close()
            self._folder = None


@dataclass(slots=True, eq=False)
class _Call:
    id: int
    payload: bytes  # pickled (args, kwargs)
    future: asyncio.Future[float]
    failures: int = 0
    kills: int = 0  # by something outside the worker


def _disarm(worker: RewardProcess) -> None:
    if worker.timer is not None:
        worker.timer.cancel()
        worker.timer = None


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    if is_from_outside(code):
        return f"{describe_exit(code)} from outside (kill, or the system was out of memory)"
    return describe_exit(code)


def _checked_options(options: Any) -> dict[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise ValueError(f"options must be names and values, got {options!r:.200}")
    return options


def _checked_limits(
    given: ProcessLimits | dict[str, Any] | None, timeout_seconds: float
) -> ProcessLimits | None:
    if given is None:
        return None
    if not isinstance(given, ProcessLimits):
        try:
            given = ProcessLimits(**given)
        except TypeError as error:
            known = ", ".join(field.name for field in fields(ProcessLimits))
            raise ValueError(f"limits: expected {known}: {error}") from None
    if given.cpu_seconds is None:
        return replace(given, cpu_seconds=CPU_PER_SECOND * timeout_seconds)
    return given


def _is_current(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
