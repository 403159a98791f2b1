"""The books the trainer thread and the loop thread share: which groups run, which wait for a batch.

In: groups that start and outcomes that end them. Out: batches, the groups that turned too old, and
sentences about who waits for whom. It keeps the gate's counts in step with its own.

No lock inside: the executor's condition guards every call. Invariant: a task is running, or waiting
in the pool, or gone to exactly one of batch, rejection, failure or staleness.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal.rollout.outcome import Finished, Outcome, Running
from areal.rollout.selection import select_batch

if TYPE_CHECKING:
    from areal.rollout.staleness import StalenessManager


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
