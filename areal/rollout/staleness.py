"""The staleness gate: how many prompts may start now, so that no result is too old to train on?

In: counts of groups submitted, accepted, rejected, released. Out: a capacity in groups (one prompt
with all its samples is one unit). With B = consumer_batch_size, eta = max_staleness, v = version:

    capacity = min(max_concurrent_rollouts - running, (eta + v + 1) * B - (accepted + running))

Why it bounds staleness: the step of version v trains on B groups, so v * B are trained before it,
and at most (eta + 1) * B live groups are not. Those admitted while the weights were at u can be
trained in the steps up to u + eta; `select_batch` (buffer.py) ensures that they fit into these.
eta = 0 admits exactly the B groups of the current step.
"""

from __future__ import annotations

import threading

from areal.api.io_struct import RolloutStat


class StalenessManager:
    """Counts groups under one lock; never waits, and knows counts only, not tasks."""

    def __init__(
        self,
        *,
        max_concurrent_rollouts: int,
        consumer_batch_size: int,
        max_staleness: int,
        total_steps: int | None = None,
    ) -> None:
        """With `total_steps`, no group is admitted beyond the batch of the last step."""
        _require(max_concurrent_rollouts >= 1, "max_concurrent_rollouts", max_concurrent_rollouts)
        _require(consumer_batch_size >= 1, "consumer_batch_size", consumer_batch_size)
        if max_staleness < 0:
            raise ValueError(f"rollout.max_head_offpolicyness must be >= 0, got {max_staleness}")
        self.max_concurrent_rollouts = max_concurrent_rollouts
        self.consumer_batch_size = consumer_batch_size
        self.max_staleness = max_staleness
        self.total_steps = total_steps
        self._lock = threading.Lock()
        self._enqueued = self._running = self._accepted = self._rejected = 0

    def get_capacity(self, version: int) -> int:
        """Groups that may start while the weights are at `version`; 0 or less means none."""
        with self._lock:
            steps_ahead = self.max_staleness + version + 1
            if self.total_steps is not None:
                steps_ahead = min(steps_ahead, self.total_steps)
            budget = steps_ahead * self.consumer_batch_size
            return min(
                self.max_concurrent_rollouts - self._running,
                budget - (self._accepted + self._running),
            )

    @property
    def most_waiting(self) -> int:
        """Upper bound of untrained groups; with more, some would become stale."""
        return (self.max_staleness + 1) * self.consumer_batch_size

    def oldest_fresh(self, version: int) -> int:
        """The oldest token version that a step of `version` may train on."""
        return version - self.max_staleness

    def is_stale(self, head_version: int, version: int) -> bool:
        """`head_version` is the oldest token version of a group."""
        return head_version < self.oldest_fresh(version)

    def on_submitted(self, count: int = 1) -> None:
        with self._lock:
            self._enqueued += count
            self._running += count

    def on_accepted(self, count: int = 1) -> None:
        """Finished; the group keeps its slot in the budget for good."""
        with self._lock:
            self._finish(count)
            self._accepted += count

    def on_rejected(self, count: int = 1) -> None:
        """Filtered or failed; releases its slot, so another prompt starts instead."""
        with self._lock:
            self._finish(count)
            self._rejected += count

    def on_stale(self, count: int = 1) -> None:
        """Accepted, but never trained on: releases its slot."""
        with self._lock:
            assert self._accepted >= count, f"{count} groups released, {self._accepted} accepted"
            self._accepted -= count
            self._rejected += count

    def restore(self, version: int, waiting: int) -> None:
        """After recovery: `version` full batches are trained and `waiting` groups are kept."""
        with self._lock:
            self._running = self._rejected = 0
            self._accepted = version * self.consumer_batch_size + waiting
            self._enqueued = self._accepted

    def get_stats(self) -> RolloutStat:
        with self._lock:
            return RolloutStat(
                enqueued=self._enqueued,
                running=self._running,
                accepted=self._accepted,
                rejected=self._rejected,
            )

    def _finish(self, count: int) -> None:
        assert self._running >= count, f"{count} groups ended, {self._running} were running"
        self._running -= count


def _require(ok: bool, key: str, found: int) -> None:
    if not ok:
        raise ValueError(f"rollout.{key} must be at least 1, got {found}")
