"""The books the trainer thread and the loop thread share: which groups run, which wait for a batch.

In: groups that start and outcomes that end them. Out: batches, the groups that turned too old, and
sentences about who waits for whom. It keeps the gate's counts in step with its own.

No lock inside: the executor's condition guards every call. Invariant: a task is running, or waiting
in the pool, or gone to exactly one of batch, rejection, failure or staleness.

Which finished groups form the next batch: a pure function of what is finished and running.

In: the version that admitted each task. Out: the task ids of the batch, or None for "wait".

Two rules. (1) Nothing may turn too old. A task admitted at version u can be trained up to the step
of version u + eta, and each step has room for one batch; so what is left of the tasks up to u,
finished and running, must fit into the steps until then. While it would not, because newer answers
overtook slow ones, the slow ones are waited for: they are never overtaken and then thrown away, so
long answers are not under-represented. (2) The oldest admission goes first, then the prompt order;
the batch itself is in prompt order.

How a group ends: the verdict on what its workflow returned or raised.

In: a trajectory, None, or an exception. Out: an `Outcome`, which the ledger records and the pool
counts. Pure: nothing is written or counted here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from areal.rollout.failures import describe
from areal.rollout.trajectory import version_span

if TYPE_CHECKING:
    import torch

    from areal.rollout.source import Prompt
    from areal.rollout.staleness import StalenessManager

    Trajectory = dict[str, torch.Tensor]


class GroupPool:
    """Sizes are bounded by the gate: at most (eta + 1) * B groups wait."""

    def __init__(self, gate: StalenessManager) -> None:
        self._gate = gate
        self._running: dict[int, Running] = {}
        self._finished: dict[int, Finished] = {}
        self._keep_rejected = False
        self.rejections: Counter[str] = Counter()
        self.num_stale = 0
        self.progress_at = time.monotonic()  # when a group last came to wait for its batch

    def restore(
        self, version: int, waiting: Sequence[Finished], *, keep_rejected: bool
    ) -> list[int]:
        """Begin. `keep_rejected`: rejected groups wait for a batch too, and make it smaller.

        Returns the tasks that have no room, to be issued again. There are some when the step that
        is done again had dropped a batch of nothing but rejected groups (`give_back`): these wait
        again, and so do the groups that got their places, the newest of all.
        """
        self._keep_rejected = keep_rejected
        oldest_first = sorted(waiting, key=lambda result: (result.issued_version, result.task_id))
        room = self._gate.most_waiting
        self._finished = {result.task_id: result for result in oldest_first[:room]}
        self._gate.restore(version, len(self._finished))
        return [result.task_id for result in oldest_first[room:]]

    def start(self, groups: Sequence[Running]) -> None:
        self._gate.on_submitted(len(groups))
        self._running.update((group.prompt.task_id, group) for group in groups)

    def end(self, outcome: Outcome) -> None:
        del self._running[outcome.task_id]
        if outcome.state == "rejected":
            self.rejections[outcome.why] += 1
        if outcome.state == "finished" or (outcome.state == "rejected" and self._keep_rejected):
            self._gate.on_accepted()
            self._finished[outcome.task_id] = Finished(
                outcome.task_id,
                outcome.issued_version,
                outcome.head_version,
                outcome.trajectory if outcome.state == "finished" else None,
            )
            self.progress_at = time.monotonic()
        else:
            self._gate.on_rejected()

    @property
    def holds_a_batch(self) -> bool:
        """Enough groups for one; whether it must still wait for an old one, `take` knows."""
        return len(self._finished) >= self._gate.consumer_batch_size

    def take(self, version: int) -> list[Finished] | None:
        """The groups of the step of `version`, or None while it has to wait."""
        chosen = select_batch(
            {task_id: result.issued_version for task_id, result in self._finished.items()},
            {task_id: group.issued_version for task_id, group in self._running.items()},
            count=self._gate.consumer_batch_size,
            oldest_fresh=self._gate.oldest_fresh(version),
        )
        return None if chosen is None else [self._finished.pop(task_id) for task_id in chosen]

    def find_stale(self, version: int) -> list[int]:
        """The strict check: groups with a token too old for a step of `version`."""
        return [
            result.task_id
            for result in self._finished.values()
            if result.trajectory is not None and self._gate.is_stale(result.head_version, version)
        ]

    def remove_stale(self, task_ids: Sequence[int]) -> None:
        for task_id in task_ids:
            del self._finished[task_id]
        self.num_stale += len(task_ids)
        self._gate.on_stale(len(task_ids))

    def give_back(self, taken: Sequence[Finished]) -> None:
        """Groups that were taken but no step will count: others may start instead."""
        self._gate.on_stale(len(taken))

    def why_stuck(self, version: int, *, paused: bool) -> str | None:
        """Why no batch can ever come from here, or None while something still moves."""
        if self._running:
            return None
        if paused:
            return "nothing runs because the executor is paused; call resume() first"
        if self._gate.get_capacity(version) <= 0:
            return (
                f"nothing runs and nothing may start at version {version}: its last batch is out; "
                "call set_version() after training on it"
            )
        return None

    def describe_wait(self, version: int) -> str:
        text = (
            f"{len(self._finished)} of {self._gate.consumer_batch_size} groups wait at version "
            f"{version}, {len(self._running)} running"
        )
        if self._running:
            # A copy: the watchdog reads this without the lock, which may be what is held.
            oldest = min(list(self._running.values()), key=lambda group: group.since)
            age_s = time.monotonic() - oldest.since
            text += f", the oldest is task {oldest.prompt.task_id} since {age_s:.1f} s"
        return f"{text}; rejected: {dict(self.rejections)}"

    def counts(self) -> dict[str, float]:
        """Groups since the start; running and finished: now."""
        gate = self._gate.get_stats()
        return {
            "running": gate.running,
            "finished": len(self._finished),
            "accepted": gate.accepted,
            "stale": self.num_stale,
            "rejected": self.rejections.total(),
            **{f"rejected/{why}": count for why, count in self.rejections.items()},
        }


def select_batch(
    finished: Mapping[int, int],
    running: Mapping[int, int],
    *,
    count: int,
    oldest_fresh: int,
) -> list[int] | None:
    """Both mappings are task id -> version at admission; `count` tasks are wanted.

    `oldest_fresh` is the oldest admission this step may still use, so a task as old as that is
    useless to the next step.
    """
    if len(finished) < count:
        return None
    oldest_first = sorted(finished, key=lambda task_id: (finished[task_id], task_id))
    left = [finished[task_id] for task_id in oldest_first[count:]]
    if _must_wait(left, running.values(), count, oldest_fresh):
        return None
    return sorted(oldest_first[:count])


def _must_wait(left: Iterable[int], running: Iterable[int], count: int, oldest_fresh: int) -> bool:
    """Whether running tasks and those `left`, given by their admission, would not all find room in
    later steps, and it helps to wait: some that run would be in time for this one."""
    num_running, num_finished = Counter(running), Counter(left)
    num_left, some_run = 0, False
    for version in sorted(num_running | num_finished):
        num_left += num_running[version] + num_finished[version]
        some_run = some_run or version in num_running
        if some_run and num_left > count * max(0, version - oldest_fresh):
            return True
    return False


@dataclass(frozen=True, slots=True)
class Running:
    """A group between its admission and its outcome."""

    prompt: Prompt
    issued_version: int  # policy version at its admission
    since: float  # time.monotonic()


@dataclass(frozen=True, slots=True)
class Outcome:
    """`rejected` may carry the trajectory that was turned down."""

    task_id: int
    state: Literal["finished", "rejected", "failed"]
    issued_version: int
    head_version: int  # oldest token version
    tail_version: int  # newest token version
    why: str = ""
    trajectory: Trajectory | None = None
    error: Exception | None = None  # of a failed group


@dataclass(frozen=True, slots=True)
class Finished:
    """A result that waits for its batch. Without a trajectory: a rejected group that counts."""

    task_id: int
    issued_version: int
    head_version: int
    trajectory: Trajectory | None


def judge(
    group: Running,
    trajectory: Trajectory | None,
    should_accept: Callable[[Trajectory], bool] | None,
    *,
    version: int,
) -> Outcome:
    """`version` is the policy version now. Exceptions of `should_accept` are the caller's."""
    state, why = "finished", ""
    if trajectory is None:
        state, why = "rejected", "workflow returned None"
    elif not accepts(should_accept, trajectory):
        state, why = "rejected", "should_accept_fn"
    # Without recorded versions the safe bounds are: as old as its admission, as new as now.
    span = None if trajectory is None else version_span(trajectory)
    head, tail = span or (group.issued_version, version)
    task_id = group.prompt.task_id
    return Outcome(task_id, state, group.issued_version, head, tail, why, trajectory)


def accepts(
    should_accept: Callable[[Trajectory], bool] | None, trajectory: Trajectory | None
) -> bool:
    """Whether the user's filter keeps a group. It sees the rewards as the workflow gave them:
    normalised ones have a mean of 0 in every group, so there would be nothing to tell by."""
    if trajectory is None or should_accept is None:
        return True
    raw = trajectory.get("original_rewards")
    return bool(should_accept(trajectory if raw is None else {**trajectory, "rewards": raw}))


def failed(group: Running, error: Exception, *, version: int) -> Outcome:
    return Outcome(
        task_id=group.prompt.task_id,
        state="failed",
        issued_version=group.issued_version,
        head_version=group.issued_version,
        tail_version=version,
        why=describe(error),
        error=error,
    )
