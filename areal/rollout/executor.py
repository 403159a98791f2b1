"""Asynchronous rollout: generation runs ahead of training within a staleness bound.

    trainer thread                              loop thread (event_loop.py)
    --------------                              ---------------------------
    prepare_batch() <----- group buffer <------ settle: ledger, then buffer <-- group ends
        |  (waits on `changed`)                   |                             ^
    train, publish weights                        v                             |
        |                                       admit: gate -> source -> ledger -> GroupRunner
    mark_trained(batch) -> ledger                 ^                                 (workflow,
    set_version(v + 1) ---------------------------'                                  engine, reward)

    admit          consumes: capacity of the gate, prompts (re-issued ones first)
                   produces: running groups, each `issued` in the ledger before it starts
                   waits for: nothing; no capacity means no admission
                   unblocked by: a new version, a released slot of the gate, resume()
    group          consumes: one prompt       produces: an outcome (finished, rejected or failed)
                   waits for: engine, reward  unblocked by: them, or cancelled by close()
    settle         consumes: the outcomes of some milliseconds, in one transaction
                   produces: the finished groups of the buffer, at most (eta + 1) * B
    prepare_batch  consumes: B groups of the buffer (buffer.py)
                   waits for: `changed`, at most `timeout_s` without a new result
                   unblocked by: settle, a failure of the loop, too many failed groups, close()

`take_batch` is `prepare_batch` without the wait. `submit` / `wait` and `rollout_batch` run single
rows through the same GroupRunner, without gate and ledger (tasks.py). A workflow given as a
WorkflowRecipe runs in worker processes (workers.py) instead of on the loop; all else is the same.

Invariants: a group older than the gate's bound is never returned (checked again when a batch is
taken); a group is durable before the trainer can see it; a prompt has exactly one state.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.api.engine_api import EngineLostError
from areal.rollout.buffer import GroupBuffer, Outcome, Running, failed, judge
from areal.rollout.failures import FailureLimits, FailureMeter, RejectionStreak
from areal.rollout.group import GroupRunner
from areal.rollout.ledger import Resume
from areal.rollout.tasks import SubmittedTasks, run_rows
from areal.rollout.trajectory import version_span
from areal.rollout.worker import WorkflowRecipe
from areal.utils import import_path, logging
from areal.utils.perf_tracer import enter_stage, prompt_lane
from areal.utils.waits import waiting
from areal.workflow.resolve import build_workflow, find_workflow

if TYPE_CHECKING:
    import torch

    from areal.api.engine_api import InferenceEngine
    from areal.api.workflow_api import RolloutWorkflow, WorkflowLike
    from areal.rollout.event_loop import TaskRunner
    from areal.rollout.group import Groups
    from areal.rollout.ledger import Ledger
    from areal.rollout.source import Prompts
    from areal.rollout.staleness import StalenessManager
    from areal.rollout.tasks import Task
    from areal.rollout.workers import RolloutWorkers

    Trajectory = dict[str, torch.Tensor]

logger = logging.getLogger("RolloutExecutor")

_REJECTED_BATCHES = 10  # in a row, before a warning
# A transaction costs about as much as the outcomes in it, so a busy loop collects them: the next
# one begins this many times as long after the last as that took, or when the trainer needs it.
_PAUSE = 19
_MAX_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Batch:
    """The training batch of one step, in prompt order: one trajectory `[G, S]` per prompt."""

    version: int  # of the weights it was prepared for
    task_ids: list[int]
    trajectories: list[Trajectory]
    dropped: list[int]  # rejected groups counted towards this batch (`dynamic_bs` only)


class WorkflowExecutor:
    """Runs one endless prompt stream ahead of a trainer, and evaluations beside it.

    executor = WorkflowExecutor(runner, engine, ledger, gate, run_seed=1, limits=FailureLimits())
    executor.start(source, workflow, group_size=8, resume=ledger.rewind(step, version))
    while training:
        batch = executor.prepare_batch()
        ...                                # train on batch.trajectories, publish the weights
        executor.mark_trained(batch, step)
        executor.set_version(step + 1)     # admits the groups that the new version allows
    executor.close()                       # before engine.destroy() and runner.close()
    """

    def __init__(
        self,
        runner: TaskRunner,
        engine: InferenceEngine,
        ledger: Ledger,
        gate: StalenessManager,
        *,
        run_seed: int,
        limits: FailureLimits,
        on_trajectory: Callable[[int, Trajectory, int, bool], object] | None = None,
        workers: RolloutWorkers | None = None,
    ) -> None:
        """`on_trajectory(task_id, trajectory, version, is_eval)` is called for every trajectory.

        `workers` run the workflows that are given as recipes.
        """
        self._runner = runner
        self._engine = engine
        self._ledger = ledger
        self._gate = gate
        self._run_seed = run_seed
        self._limits = limits
        self._on_trajectory = on_trajectory
        self._workers = workers
        self._failures = FailureMeter(limits.max_failure_ratio)
        self._rejections = RejectionStreak(_REJECTED_BATCHES * gate.consumer_batch_size)
        self._submitted = self._new_tasks()

        # Shared by both threads, under `changed`.
        self._changed = threading.Condition()
        self._buffer = GroupBuffer(gate)
        self._dropped: list[int] = []  # rejected groups that the next batch counts
        self._version = 0
        self._paused = self._closed = False
        self._is_awaited = False  # the trainer waits for a batch

        # Touched by the loop thread only, once started.
        self._source: Prompts | None = None
        self._outcomes: list[Outcome] = []  # not settled yet
        self._next_settle = 0.0  # time.monotonic()
        self._reissue: deque[int] = deque()
        self._next_task_id = 0
        runner.on_failure(self._wake)

    # Trainer thread.

    def start(
        self,
        source: Prompts,
        workflow: RolloutWorkflow | WorkflowRecipe,
        *,
        group_size: int = 1,
        reward_normalization: bool = False,
        drop_incomplete_group: bool = False,
        should_accept_fn: Callable[[Trajectory], bool] | None = None,
        dynamic_bs: bool = False,
        resume: Resume | None = None,
    ) -> None:
        """Start generation. Once per executor.

        `should_accept_fn` gets a whole group with the unnormalized rewards. A rejected group is
        replaced by another prompt; with `dynamic_bs` it counts towards its batch instead, which
        is then smaller.
        """
        resume = resume or Resume()
        self._source = source
        self._should_accept = should_accept_fn
        self._groups = self._group_runner(
            workflow,
            self._failures,
            is_eval=False,
            group_size=group_size,
            reward_normalization=reward_normalization,
            drop_incomplete_group=drop_incomplete_group,
        )
        self._version = resume.version
        self._next_task_id = resume.next_task_id
        waiting = [*resume.finished, *(resume.rejected if dynamic_bs else ())]
        no_room = self._buffer.restore(resume.version, waiting, keep_rejected=dynamic_bs)
        self._ledger.issue_again(no_room)
        self._reissue.extend(sorted([*resume.reissue, *no_room]))
        self._runner.call(self._admit)

    def prepare_batch(self) -> Batch:
        """Block until the next B groups are ready; raises the error that stopped the rollout."""
        wait_began = time.monotonic()
        with waiting(lambda: self._buffer.describe_wait(self._version)), self._changed:
            if (batch := self._take()) is not None:
                return batch
            self._is_awaited = True
            self._runner.call(self._settle)
            try:
                while batch is None:
                    self._wait(wait_began)
                    batch = self._take()
                return batch
            finally:
                self._is_awaited = False

    def take_batch(self) -> Batch | None:
        """The next batch if it is ready; None where `prepare_batch` would wait."""
        with self._changed:
            return self._take()

    def mark_trained(self, batch: Batch, step: int) -> None:
        """Record that the weights include `batch`. Call it before the recover point of `step` is
        saved: a point without the mark would train the batch again."""
        self._ledger.trained(batch.task_ids, step, batch.version, dropped=batch.dropped)
        enter_stage(map(prompt_lane, batch.task_ids), None)

    def set_version(self, version: int) -> None:
        """The engine serves `version` now: admit the groups it allows."""
        with self._changed:
            if version < self._version:
                raise ValueError(f"version must not go back: {self._version} to {version}")
            self._version = version
        self._runner.call(self._admit)

    def get_version(self) -> int:
        return self._version

    def pause(self) -> None:
        """Stop admission of the stream and of submitted rows; running groups continue."""
        self._paused = True
        self._submitted.pause()

    def resume(self) -> None:
        self._paused = False
        self._submitted.resume()
        self._runner.call(self._admit)

    def submit(
        self,
        data: dict[str, Any],
        workflow: WorkflowLike,
        workflow_kwargs: dict[str, Any] | None = None,
        should_accept_fn: Callable[[Trajectory], bool] | str | None = None,
        group_size: int = 1,
        task_id: int | None = None,
        is_eval: bool = False,
        reward_normalization: bool = False,
        drop_incomplete_group: bool = False,
    ) -> int:
        """Queue one row beside the prompt stream; returns the task id for `wait_for_task`.

        No gate and no ledger: a caller that trains on the result checks its `versions`. A workflow
        given by its class is built for this row and closed after it; an object is shared.
        """
        should_accept: Callable[[Trajectory], bool] | None = (
            import_path.load(should_accept_fn, key="should_accept_fn")
            if isinstance(should_accept_fn, str)
            else should_accept_fn
        )
        found = find_workflow(workflow)
        built = build_workflow(found, workflow_kwargs)
        groups = self._group_runner(
            built,
            self._failures,
            is_eval=is_eval,
            group_size=group_size,
            reward_normalization=reward_normalization,
            drop_incomplete_group=drop_incomplete_group,
        )
        return self._submitted.submit(
            groups,
            data,
            task_id=task_id,
            should_accept=should_accept,
            on_end=None if built is found else built.close,
        )

    def wait(
        self, count: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> list[Trajectory | None]:
        """Results of `count` submitted rows, in submission order; each is returned once.

        None is a rejection. A failed row raises TaskFailedError; the others stay for the next
        call. After `timeout` seconds (default: rollout.request_timeout without a result) it
        raises TimeoutError, or returns [] with `raise_timeout=False`; no result is lost.
        """
        try:
            return [self._result(task) for task in self._submitted.wait(count, timeout)]
        except TimeoutError:
            if raise_timeout:
                raise
            return []

    def wait_for_task(
        self, task_id: int, timeout: float | None = None, raise_timeout: bool = True
    ) -> Trajectory | None:
        """As `wait`, for one row. With `raise_timeout=False` None also means "not yet": a second
        call raises ValueError for a row that was rejected, but not for one still running."""
        try:
            return self._result(self._submitted.wait_for_task(task_id, timeout))
        except TimeoutError:
            if raise_timeout:
                raise
            return None

    def rollout_batch(
        self,
        rows: Sequence[dict[str, Any]],
        workflow: RolloutWorkflow | WorkflowRecipe,
        *,
        group_size: int = 1,
        is_eval: bool = True,
        batch_size: int = 1,
    ) -> list[Trajectory | None]:
        """Run these rows now, beside the prompt stream: no gate, no ledger. For evaluation.

        At most max(batch_size, 2 * max_concurrent_rollouts) rows are in flight.

        One entry per row: None if the workflow rejected it, or if it failed and the failure ratio
        stays within its bound (logged). An evaluation scores the episodes of a row that did not
        fail. Rewards are not normalized. Ignores pause().
        """
        failures = FailureMeter(self._limits.max_failure_ratio)
        results = run_rows(
            self._new_tasks(),
            self._group_runner(workflow, failures, is_eval=is_eval, group_size=group_size),
            rows,
            failures,
            # Twice the concurrency, so that the next row is queued when one ends.
            max_ahead=max(batch_size, 2 * self._gate.max_concurrent_rollouts),
        )
        if is_eval:
            failures.check_episodes(ended=len(rows) * group_size)
        for index, trajectory in enumerate(results):
            self._show(index, trajectory, self._version, is_eval)
        return results

    def stats(self) -> dict[str, float]:
        """Groups by state, and retried episodes by kind of error."""
        with self._changed:
            counts = self._buffer.counts() | self._failures.counts()
            counts["idle_s"] = self._buffer.idle_s
        if self._workers is not None:
            counts["workers_replaced"] = self._workers.num_replaced
        return counts

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop intake, wake waiters, cancel, gather.

        Cancelled groups stay `issued` in the ledger: a resumed run issues them again.
        """
        self._closed = True
        self._wake()
        self._submitted.close()
        if self._outcomes:
            self._runner.call(self._settle)
        self._runner.cancel_tasks(timeout_s)

    # Trainer thread, holding `changed`.

    def _take(self) -> Batch | None:
        self._raise_if_stopped()
        self._drop_stale()
        while (results := self._buffer.take(self._version)) is not None:
            self._dropped += [result.task_id for result in results if result.trajectory is None]
            kept = {r.task_id: r.trajectory for r in results if r.trajectory is not None}
            if kept:
                dropped, self._dropped = self._dropped, []
                enter_stage(map(prompt_lane, kept), "trained")
                return Batch(self._version, list(kept), list(kept.values()), dropped)
            # A dynamic batch of rejected groups only: nothing to train on, so sample more.
            self._buffer.give_back(results)
            self._runner.call(self._admit)
        return None

    def _drop_stale(self) -> None:
        """Second check, independent of admission: no token older than the bound is trained on."""
        stale = self._buffer.find_stale(self._version)
        if stale:
            logger.warning("dropped %d groups too old for version %d", len(stale), self._version)
            self._ledger.stale(stale, self._version)
            enter_stage(map(prompt_lane, stale), None)
            self._buffer.remove_stale(stale)
            self._runner.call(self._admit)

    def _wait(self, wait_began: float) -> None:
        """One bounded wait for a change; raises if no change can come."""
        stuck = self._buffer.why_stuck(self._version, paused=self._paused)
        if stuck is not None:
            raise RuntimeError(f"prepare_batch: {stuck}")
        quiet_s = time.monotonic() - max(wait_began, self._buffer.progress_at)
        if quiet_s >= self._limits.timeout_s:
            raise RuntimeError(
                f"no group finished for {quiet_s:.1f} s "
                f"(rollout.request_timeout={self._limits.timeout_s:g}): "
                f"{self._buffer.describe_wait(self._version)}; episode errors: "
                f"{dict(self._failures.attempts)}. Check the inference server and the reward "
                "function"
            )
        self._changed.wait(min(1.0, self._limits.timeout_s - quiet_s))

    def _raise_if_stopped(self) -> None:
        if self._closed:
            raise RuntimeError("prepare_batch: the executor is closed")
        if self._failures.error is not None:
            raise self._failures.error
        self._runner.raise_if_failed()

    # Loop thread.

    def _admit(self) -> None:
        """Start as many groups as the gate allows, in prompt order."""
        version = self._version  # if it grows meanwhile, set_version calls again
        count = self._gate.get_capacity(version)
        stopped = self._paused or self._closed or self._failures.error is not None
        source = self._source
        if count <= 0 or stopped or source is None:
            return
        prompts = [source.prompt(self._next_id()) for _ in range(count)]
        self._ledger.issue(prompts, version)
        now = time.monotonic()
        groups = [Running(prompt, version, now) for prompt in prompts]
        enter_stage([prompt_lane(prompt.task_id) for prompt in prompts], "queued")
        with self._changed:
            self._buffer.start(groups)
        for group in groups:
            self._runner.spawn(self._run(group), name=f"task-{group.prompt.task_id}")

    def _next_id(self) -> int:
        if self._reissue:
            return self._reissue.popleft()
        self._next_task_id += 1
        return self._next_task_id - 1

    async def _run(self, group: Running) -> None:
        """Run one group to its outcome. Boundary: a workflow's exception becomes a failed group."""
        enter_stage([prompt_lane(group.prompt.task_id)], "rollout")
        try:
            trajectory = await self._groups.run(group.prompt.task_id, group.prompt.data)
            span = None if trajectory is None else version_span(trajectory)
            self._check_newest(span)
            outcome = judge(group, trajectory, span, self._should_accept, version=self._version)
        except EngineLostError:
            raise  # fails the loop; the prompt stays `issued`, for the resumed run
        except Exception as error:
            outcome = failed(group, error, version=self._version)
        self._settle_soon(outcome)

    def _check_newest(self, span: tuple[int, int] | None) -> None:
        """Checked here because engine copies in workers do not know the newest version sent."""
        newest = self._engine.newest_version
        if span is not None and newest is not None and span[1] > newest:
            raise RuntimeError(
                f"a token has version {span[1]} of the weights, the newest that was sent is "
                f"{newest}: check the inference servers"
            )

    def _settle_soon(self, outcome: Outcome) -> None:
        """At once if it may complete the batch that the trainer waits for."""
        self._outcomes.append(outcome)
        if self._is_awaited and self._buffer.holds_a_batch_with(len(self._outcomes)):
            self._runner.call(self._settle)  # after the outcomes of the same tick
        elif len(self._outcomes) == 1:
            self._runner.call_later(self._next_settle - time.monotonic(), self._settle)

    def _settle(self) -> None:
        """Make outcomes durable, then visible to the trainer, then admit."""
        outcomes, self._outcomes = self._outcomes, []
        if not outcomes:
            return
        began = time.monotonic()
        self._ledger.settle(outcomes, self._version)
        with self._changed:
            for outcome in outcomes:
                self._buffer.end(outcome)
                self._count(outcome)
                waits = "waiting" if outcome.state == "finished" else None
                enter_stage([prompt_lane(outcome.task_id)], waits)
            # Waking the trainer for less than a batch would only contend for the GIL.
            if self._buffer.holds_a_batch_with(0) or self._failures.error is not None:
                self._changed.notify_all()
        for outcome in outcomes:
            self._show(outcome.task_id, outcome.trajectory, outcome.tail_version, False)
        self._admit()
        ended = time.monotonic()
        self._next_settle = ended + min(_PAUSE * (ended - began), _MAX_PAUSE_S)

    def _count(self, outcome: Outcome) -> None:
        if outcome.error is not None:
            return self._failures.on_group_failed(outcome.error)
        self._failures.on_group_succeeded()
        if outcome.state == "rejected":
            self._rejections.on_rejected(outcome.why)
        else:
            self._rejections.on_kept()

    def _show(
        self, task_id: int, trajectory: Trajectory | None, version: int, is_eval: bool
    ) -> None:
        if trajectory is not None and self._on_trajectory is not None:
            self._on_trajectory(task_id, trajectory, version, is_eval)

    def _result(self, task: Task) -> Trajectory | None:
        self._show(task.task_id, task.trajectory, self._version, task.groups.is_eval)
        return task.trajectory

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _new_tasks(self) -> SubmittedTasks:
        return SubmittedTasks(
            self._runner,
            max_concurrent=self._gate.max_concurrent_rollouts,
            timeout_s=self._limits.timeout_s,
        )

    def _group_runner(
        self, workflow: RolloutWorkflow | WorkflowRecipe, failures: FailureMeter, **options: Any
    ) -> Groups:
        options |= {"run_seed": self._run_seed, "limits": self._limits}
        if isinstance(workflow, WorkflowRecipe):
            assert self._workers is not None, "a recipe needs workers"
            return self._workers.place(workflow, failures.on_attempt_failed, **options)
        return GroupRunner(
            engine=self._engine,
            workflow=workflow,
            on_attempt_failed=failures.on_attempt_failed,
            **options,
        )
