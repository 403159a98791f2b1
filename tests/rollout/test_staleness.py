"""The gate's formula, and the proof that it keeps every answer fresh without throwing any away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_world import trajectory

from areal.rollout.buffer import GroupBuffer, Outcome, Running, select_batch
from areal.rollout.source import Prompt
from areal.rollout.staleness import StalenessManager


def test_capacity_by_hand():
    gate = StalenessManager(max_concurrent_rollouts=5, consumer_batch_size=4, max_staleness=1)
    assert gate.get_capacity(0) == 5  # concurrency; the budget is (1 + 0 + 1) * 4 = 8
    gate.on_submitted(5)
    assert gate.get_capacity(0) == 0
    gate.on_accepted(4)
    assert gate.get_capacity(0) == 3  # budget: 8 - (4 + 1); concurrency: 4
    gate.on_rejected()
    assert gate.get_capacity(0) == 4
    assert gate.get_capacity(1) == 5
    gate.on_stale(2)
    stats = gate.get_stats()
    assert (stats.enqueued, stats.running, stats.accepted, stats.rejected) == (5, 0, 2, 3)


def test_restore_counts_the_trained_batches():
    gate = StalenessManager(max_concurrent_rollouts=99, consumer_batch_size=4, max_staleness=1)
    gate.restore(version=10, waiting=3)
    assert gate.get_capacity(10) == 12 * 4 - 43


def test_nothing_runs_ahead_of_the_last_step():
    gate = StalenessManager(
        max_concurrent_rollouts=99, consumer_batch_size=4, max_staleness=3, total_steps=2
    )
    assert gate.get_capacity(0) == 2 * 4
    gate.on_submitted(8)
    assert gate.get_capacity(1) == 0


def test_stale_is_older_than_the_bound():
    gate = StalenessManager(max_concurrent_rollouts=1, consumer_batch_size=1, max_staleness=2)
    assert not gate.is_stale(3, 5)
    assert gate.is_stale(2, 5)


@pytest.mark.parametrize(
    "bad", [{"max_concurrent_rollouts": 0}, {"consumer_batch_size": 0}, {"max_staleness": -1}]
)
def test_bad_bounds_are_refused(bad):
    good = {"max_concurrent_rollouts": 1, "consumer_batch_size": 1, "max_staleness": 0}
    with pytest.raises(ValueError, match="rollout"):
        StalenessManager(**(good | bad))


def test_selection_waits_for_the_one_that_would_turn_stale():
    finished = {4: 3, 5: 3, 2: 2}
    assert select_batch(finished, {1: 1}, count=2, oldest_fresh=1) is None
    assert select_batch(finished, {1: 2}, count=2, oldest_fresh=1) == [2, 4]
    assert select_batch(finished, {}, count=4, oldest_fresh=1) is None


def test_selection_waits_for_slow_ones_that_would_not_find_room_together():
    """Step 1, eta 2: what version 0 admitted has this step and the next, which takes two."""
    overtaking = {6: 1, 7: 1}
    four, two = dict.fromkeys((2, 3, 4, 5), 0), dict.fromkeys((4, 5), 0)
    assert select_batch(overtaking, four, count=2, oldest_fresh=-1) is None
    assert select_batch(overtaking, two, count=2, oldest_fresh=-1) == [6, 7]
    # A finished one is taken first, and then the rest fits.
    assert select_batch(overtaking | {2: 0}, {3: 0, 4: 0}, count=2, oldest_fresh=-1) == [2, 6]


@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 12),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_random_schedules_keep_the_bounds(
    batch_size, eta, max_concurrent, keep_rejected, newest_first, data
):
    """Any order of finish / reject / fail / new version, on the real gate, buffer and selection;
    also one in which the answers that began last come first."""
    gate = StalenessManager(
        max_concurrent_rollouts=max_concurrent, consumer_batch_size=batch_size, max_staleness=eta
    )
    buffer = GroupBuffer(gate)
    buffer.restore(0, [], keep_rejected=keep_rejected)
    version, next_id = 0, 0
    running: dict[int, Running] = {}
    ended: dict[int, str] = {}

    def admit():
        nonlocal next_id
        count = max(0, gate.get_capacity(version))
        new = [Running(Prompt(next_id + i, 0, 0, {}), version, 0.0) for i in range(count)]
        next_id += count
        buffer.start(new)
        running.update((group.prompt.task_id, group) for group in new)
        assert len(running) <= max_concurrent

    def end(task_id, state):
        group = running.pop(task_id)
        kept = trajectory([group.issued_version, version]) if state == "finished" else None
        buffer.end(
            Outcome(task_id, state, group.issued_version, group.issued_version, version, "", kept)
        )
        if state == "failed" or (state == "rejected" and not keep_rejected):
            ended[task_id] = state

    admit()
    while version < 6:
        assert buffer.find_stale(version) == [], "nothing turns stale by being overtaken"
        results = buffer.take(version) if data.draw(st.booleans()) or not running else None
        if results is not None:
            assert len(results) == batch_size
            for result in results:
                assert result.head_version >= version - eta
                assert result.task_id not in ended
                ended[result.task_id] = "taken"
            version += 1
        else:
            assert running, "with nothing running a batch must be ready: the gate would deadlock"
            states = st.sampled_from(["finished", "finished", "rejected", "failed"])
            one = max(running) if newest_first else data.draw(st.sampled_from(sorted(running)))
            end(one, data.draw(states))
        admit()
    waiting = int(buffer.counts()["finished"])
    assert next_id == len(ended) + len(running) + waiting, "every prompt is in one place"
    assert buffer.num_stale == 0
