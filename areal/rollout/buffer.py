"""Which groups run, which wait for a batch, and which of them form the next batch?

In: groups that start and outcomes that end them. Out: batches, stale groups, and descriptions of
a wait. `GroupBuffer` is shared by the trainer thread and the loop thread without a lock of its own:
the executor's condition guards every call. Invariant: a task is running, or waiting in the buffer,
or has left by exactly one of batch, rejection, failure or staleness; the gate's counts agree.

`select_batch` is pure: the version that admitted each task in, the task ids of the batch out, or
None for "wait". Two rules. (1) No task may become stale. A task admitted at version u can be
trained up to the step of version u + eta, and each step takes one batch; so the remaining tasks up
to u, finished and running, must fit into the steps until then. While they would not, because newer
results overtook slow ones, the step waits for the slow ones: they are never overtaken and then
discarded, so long answers are not under-represented. (2) The oldest admission goes first, then
prompt order; the batch itself is in prompt order.

`judge` and `failed` are pure too: a trajectory, None or an exception in, an `Outcome` out, which
the ledger records and the buffer counts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from areal.rollout.failures import describe

if TYPE_CHECKING:
    import torch

    from areal.rollout.source import Prompt
    from areal.rollout.staleness import StalenessManager

    Trajectory = dict[str, torch.Tensor]


class GroupBuffer:
    """Running and finished groups. The gate bounds both: at most (eta + 1) * B finished ones."""

    def __init__(self, gate: StalenessManager) -> None:
        self._gate = gate
        self._running: dict[int, Running] = {}
        self._finished: dict[int, FinishedGroup] = {}
        self._keep_rejected = False
        self.rejections: Counter[str] = Counter()
        self.num_stale = 0
        self.progress_at = time.monotonic()  # when a group was last added to `_finished`
        self._idle_s = 0.0  # without a running group, until the last one started
        self._idle_since: float | None = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Seconds without a running group: the gate admitted none."""
        since = self._idle_since
        return self._idle_s + (0.0 if since is None else time.monotonic() - since)

    def restore(
        self, version: int, waiting: Sequence[FinishedGroup], *, keep_rejected: bool
    ) -> list[int]:
        """Set the initial state. `keep_rejected`: rejected groups count towards a batch too.

        Returns the tasks beyond capacity, to be issued again. There are some if the repeated step
        had dropped a batch of rejected groups only (`give_back`): these wait again, and so do the
        groups that were admitted instead of them, the newest of all.
        """
        self._keep_rejected = keep_rejected
        oldest_first = sorted(waiting, key=lambda result: (result.issued_version, result.task_id))
        room = self._gate.most_waiting
        self._finished = {result.task_id: result for result in oldest_first[:room]}
        self._gate.restore(version, len(self._finished))
        return [result.task_id for result in oldest_first[room:]]

    def start(self, groups: Sequence[Running]) -> None:
        if groups and self._idle_since is not None:
            self._idle_s += time.monotonic() - self._idle_since
            self._idle_since = None
        self._gate.on_submitted(len(groups))
        self._running.update((group.prompt.task_id, group) for group in groups)

    def end(self, outcome: Outcome) -> None:
        del self._running[outcome.task_id]
        if not self._running:
            self._idle_since = time.monotonic()
        if outcome.state == "rejected":
            self.rejections[outcome.why] += 1
        if outcome.state == "finished" or (outcome.state == "rejected" and self._keep_rejected):
            self._gate.on_accepted()
            self._finished[outcome.task_id] = FinishedGroup(
                outcome.task_id,
                outcome.issued_version,
                outcome.head_version,
                outcome.trajectory if outcome.state == "finished" else None,
            )
            self.progress_at = time.monotonic()
        else:
            self._gate.on_rejected()

    def holds_a_batch_with(self, more: int) -> bool:
        """Whether it would with so many `more` finished groups. Necessary, not sufficient: `take`
        may still wait for an older group."""
        return len(self._finished) + more >= self._gate.consumer_batch_size

    def take(self, version: int) -> list[FinishedGroup] | None:
        """The groups for the step of `version`, or None while it has to wait."""
        chosen = select_batch(
            {task_id: result.issued_version for task_id, result in self._finished.items()},
            {task_id: group.issued_version for task_id, group in self._running.items()},
            count=self._gate.consumer_batch_size,
            oldest_fresh=self._gate.oldest_fresh(version),
        )
        return None if chosen is None else [self._finished.pop(task_id) for task_id in chosen]

    def find_stale(self, version: int) -> list[int]:
        """Groups with a token too old for a step of `version`; independent of admission."""
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

    def give_back(self, taken: Sequence[FinishedGroup]) -> None:
        """Release the slots of groups that were taken but belong to no step."""
        self._gate.on_stale(len(taken))

    def why_stuck(self, version: int, *, paused: bool) -> str | None:
        """Why no batch can come any more, or None while one can."""
        if self._running:
            return None
        if paused:
            return "nothing runs because the executor is paused; call resume() first"
        if self._gate.get_capacity(version) <= 0:
            return (
                f"nothing runs and nothing may start at version {version}: its last batch was "
                "taken; call set_version() after training on it"
            )
        return None

    def describe_wait(self, version: int) -> str:
        text = (
            f"{len(self._finished)} of {self._gate.consumer_batch_size} groups are ready at "
            f"version {version}, {len(self._running)} running"
        )
        if self._running:
            # A copy: the watchdog calls this without the lock, which a stuck thread may hold.
            oldest = min(list(self._running.values()), key=lambda group: group.since)
            age_s = time.monotonic() - oldest.since
            text += f", the oldest is task {oldest.prompt.task_id} since {age_s:.1f} s"
        return f"{text}; rejected: {dict(self.rejections)}"

    def counts(self) -> dict[str, float]:
        """Totals since the start; `running` and `finished` are current values."""
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
    """Both mappings are task id -> version at admission; `count` is the batch size.

    `oldest_fresh` is the oldest admission this step may use; the next step may not.
    """
    if len(finished) < count:
        return None
    oldest_first = sorted(finished, key=lambda task_id: (finished[task_id], task_id))
    left = [finished[task_id] for task_id in oldest_first[count:]]
    if _must_wait(left, running.values(), count, oldest_fresh):
        return None
    return sorted(oldest_first[:count])


def _must_wait(left: Iterable[int], running: Iterable[int], count: int, oldest_fresh: int) -> bool:
    """Whether running tasks and those `left`, given by admission version, exceed the capacity of
    later steps, and waiting helps because some running task could still join this batch."""
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
    """How a group ended; a rejected one may carry its trajectory."""

    task_id: int
    state: Literal["finished", "rejected", "failed"]
    issued_version: int
    head_version: int  # oldest token version
    tail_version: int  # newest token version
    why: str = ""
    trajectory: Trajectory | None = None
    error: Exception | None = None  # of a failed group


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """A result waiting for its batch. Trajectory None: a rejected group of a dynamic batch."""

    task_id: int
    issued_version: int
    head_version: int
    trajectory: Trajectory | None


def judge(
    group: Running,
    trajectory: Trajectory | None,
    span: tuple[int, int] | None,
    should_accept: Callable[[Trajectory], bool] | None,
    *,
    version: int,
) -> Outcome:
    """`span` is that of the trajectory's token versions, None if they are not recorded; `version`
    is the current policy version. Exceptions of `should_accept` propagate."""
    state, why = "finished", ""
    if trajectory is None:
        state, why = "rejected", "workflow returned None"
    elif not accepts(should_accept, trajectory):
        state, why = "rejected", "should_accept_fn"
    # Without recorded versions, admission and now are safe bounds.
    head, tail = span or (group.issued_version, version)
    task_id = group.prompt.task_id
    return Outcome(task_id, state, group.issued_version, head, tail, why, trajectory)


def accepts(
    should_accept: Callable[[Trajectory], bool] | None, trajectory: Trajectory | None
) -> bool:
    """Whether the user's filter keeps a group. It gets unnormalized rewards: normalized ones have
    mean 0 in every group and would carry no information."""
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
