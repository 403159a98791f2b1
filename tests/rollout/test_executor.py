"""The executor on real threads, database and gate; engine and workflow stand for a user's code."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_world import FakeWorkflow, World, open_world

from areal.rollout.executor import Batch
from areal.rollout.failures import RolloutFailedError


def train(world: World, steps: int, first: int = 0) -> list[Batch]:
    """A trainer's loop, less the training."""
    batches = []
    for step in range(first, first + steps):
        batch = world.executor.take_batch() or world.executor.prepare_batch()
        batches.append(batch)
        world.executor.mark_trained(batch, step)
        world.set_version(step + 1)
    return batches


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def task_ids(batches: list[Batch]) -> list[list[int]]:
    return [batch.task_ids for batch in batches]


def test_on_policy_batches_are_the_prompts_in_order(tmp_path):
    with open_world(tmp_path, batch_size=3) as world:
        world.start(FakeWorkflow(act=lambda i, *_: (0.001 * (i % 3), "ok")), group_size=2)
        batches = train(world, 4)
        assert task_ids(batches) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
        for step, batch in enumerate(batches):
            assert batch.version == step
            for task_id, group in zip(batch.task_ids, batch.trajectories, strict=True):
                assert group["input_ids"].shape == (2, 3)
                assert set(group["input_ids"][:, 0].tolist()) == {task_id}
                assert set(group["versions"][:, 1:].flatten().tolist()) == {step}
        assert world.ledger.balance()["trained"] == 12


def test_generation_runs_ahead_up_to_the_bound_and_no_further(tmp_path):
    with open_world(tmp_path, batch_size=2, max_staleness=2) as world:
        world.start(FakeWorkflow())
        world.executor.prepare_batch()
        time.sleep(0.1)  # the trainer is busy: backpressure must hold the rest
        assert world.ledger.balance()["total"] == (2 + 0 + 1) * 2
        assert world.executor.stats()["finished"] == 4


def test_a_batch_is_taken_without_waiting_only_when_it_is_there(tmp_path):
    with open_world(tmp_path, batch_size=2, max_staleness=1) as world:
        world.start(FakeWorkflow(act=lambda i, *_: (0.0 if i < 4 else 60.0, "ok")))
        wait_until(lambda: world.executor.stats()["finished"] == 4)
        for step in range(2):
            batch = world.executor.take_batch()
            assert batch is not None and batch.task_ids == [2 * step, 2 * step + 1]
            world.executor.mark_trained(batch, step)
            world.set_version(step + 1)
        assert world.executor.take_batch() is None


def test_max_concurrent_rollouts_bounds_the_groups_in_flight(tmp_path):
    with open_world(tmp_path, batch_size=8, max_concurrent=3) as world:
        world.start(FakeWorkflow(act=lambda *_: (0.002, "ok")), group_size=2)
        train(world, 2)
        assert world.engine.most_in_flight == 3 * 2


def test_a_slow_group_is_waited_for_not_overtaken(tmp_path):
    """Task 1 runs through two weight updates; it is in the last batch that may hold it."""
    with open_world(tmp_path, batch_size=2, max_staleness=2) as world:

        def act(task_id, sample, attempt):
            return (0.0, "ok") if task_id != 1 else (0.25, "ok")

        world.start(FakeWorkflow(act=act))
        early = train(world, 2)
        assert 1 not in sum(task_ids(early), [])
        last = train(world, 1, first=2)[0]
        assert 1 in last.task_ids
        assert world.executor.stats()["stale"] == 0


def test_tokens_past_the_bound_are_never_returned(tmp_path):
    """A trainer that jumps ahead breaks what admission promised; the check at the end holds."""
    with open_world(tmp_path, batch_size=2, max_staleness=1) as world:
        world.start(FakeWorkflow())
        wait_until(lambda: world.executor.stats()["finished"] == 4)
        world.set_version(5)
        batch = world.executor.prepare_batch()
        assert all(int(group["versions"][:, 1:].min()) >= 4 for group in batch.trajectories)
        assert world.executor.stats()["stale"] == world.ledger.balance()["stale"] == 4


def test_tokens_of_weights_that_nobody_sent_are_no_data(tmp_path):
    """Copies of the engine in workers cannot know what was sent: here is the last look."""
    with open_world(tmp_path, batch_size=2) as world:
        world.engine.version, world.engine.newest_version = 3, 2
        world.start(FakeWorkflow())
        with pytest.raises(RolloutFailedError, match="has version 3 .* newest that was sent is 2"):
            world.executor.prepare_batch()
        assert world.executor.stats()["finished"] == 0


def test_rejected_groups_are_replaced(tmp_path):
    def reject_odd(group):
        return int(group["rewards"][0]) % 2 == 0

    with open_world(tmp_path, batch_size=2) as world:
        world.start(FakeWorkflow(), should_accept_fn=reject_odd)
        assert task_ids(train(world, 2)) == [[0, 2], [4, 6]]
        stats = world.executor.stats()
        assert stats["rejected/should_accept_fn"] == stats["rejected"] >= 3


def test_none_is_a_rejection_with_its_reason(tmp_path):
    with open_world(tmp_path, batch_size=1) as world:
        world.start(FakeWorkflow(act=lambda i, *_: (0.0, "none" if i == 0 else "ok")))
        assert task_ids(train(world, 1)) == [[1]]
        row = world.db.query("SELECT why FROM tasks WHERE state = 'rejected'")[0]
        assert row["why"] == "workflow returned None"


def test_a_filter_sees_the_rewards_as_they_were_given(tmp_path):
    def accept(group):
        return float(group["rewards"].mean()) >= 2  # normalised ones: 0 for every group

    with open_world(tmp_path, batch_size=2) as world:
        options = {"group_size": 2, "reward_normalization": True}
        world.start(FakeWorkflow(), should_accept_fn=accept, **options)
        batch = world.executor.prepare_batch()
        assert batch.task_ids == [2, 3]
        assert batch.trajectories[0]["rewards"].tolist() == [0.0, 0.0]
        assert batch.trajectories[0]["original_rewards"].tolist() == [2.0, 2.0]


def test_a_group_without_one_of_its_samples_is_dropped_when_asked(tmp_path):
    def act(task_id, sample, attempt):
        return 0.0, "none" if (task_id, sample) == (0, 1) else "ok"

    for drop, ids in ((True, [1, 2]), (False, [0, 1])):
        folder = tmp_path / str(drop)
        folder.mkdir()
        with open_world(folder, batch_size=2) as world:
            world.start(FakeWorkflow(act=act), group_size=2, drop_incomplete_group=drop)
            assert world.executor.prepare_batch().task_ids == ids


def test_dynamic_batches_shrink_instead(tmp_path):
    """Tasks 0-3 accept two; 4-7 accept none, so that batch goes on to 8-11."""

    def accept(group):
        return int(group["rewards"][0]) in (1, 3, 10)

    with open_world(tmp_path, batch_size=4) as world:
        world.start(FakeWorkflow(), should_accept_fn=accept, dynamic_bs=True)
        first, second = train(world, 2)
        assert (first.task_ids, first.dropped) == ([1, 3], [0, 2])
        assert (second.task_ids, second.dropped) == ([10], [4, 5, 6, 7, 8, 9, 11])


def test_a_failing_workflow_stops_the_run_with_its_cause(tmp_path):
    with open_world(tmp_path, batch_size=2) as world:
        world.start(FakeWorkflow(act=lambda *_: (0.0, ZeroDivisionError("reward broke"))))
        with pytest.raises(RolloutFailedError, match="ZeroDivisionError: reward broke"):
            world.executor.prepare_batch()
        stats = world.executor.stats()
        assert stats["failed/ZeroDivisionError"] == 10
        assert stats["retried"] >= 10, "each was tried twice"
        row = world.db.query("SELECT why FROM tasks WHERE state = 'failed'")[0]
        assert row["why"] == "ZeroDivisionError: reward broke"
        time.sleep(0.02)
        assert world.ledger.balance()["total"] < 14, "no more prompts are burnt after the stop"


def test_rare_failures_are_retried_counted_and_survived(tmp_path):
    def act(task_id, sample, attempt):
        return 0.0, OSError("flaky") if attempt == 1 and task_id % 2 else "ok"

    with open_world(tmp_path, batch_size=4, max_failure_ratio=0.0) as world:
        world.start(FakeWorkflow(act=act))
        assert task_ids(train(world, 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert world.executor.stats()["retried/OSError"] >= 4
        assert world.executor.stats()["failed"] == 0


def test_a_filter_that_raises_is_a_failure_too(tmp_path):
    with open_world(tmp_path, batch_size=2) as world:
        world.start(FakeWorkflow(), should_accept_fn=lambda group: group["no such key"])
        with pytest.raises(RolloutFailedError, match="KeyError: 'no such key'"):
            world.executor.prepare_batch()


def test_silence_ends_at_the_deadline_and_says_who_waits(tmp_path):
    with open_world(tmp_path, batch_size=2, timeout_s=0.2) as world:
        world.start(FakeWorkflow(act=lambda i, *_: (3600.0 if i == 1 else 0.0, "ok")))
        with pytest.raises(RuntimeError, match=r"request_timeout=0.2.*1 of 2 .*1 running.*task 1"):
            world.executor.prepare_batch()


def test_a_second_batch_of_one_version_is_refused_at_once(tmp_path):
    with open_world(tmp_path, batch_size=2) as world:
        world.start(FakeWorkflow())
        world.executor.prepare_batch()
        with pytest.raises(RuntimeError, match=r"set_version\(\) after training"):
            world.executor.prepare_batch()


def test_pause_stops_admission_and_resume_goes_on(tmp_path):
    with open_world(tmp_path, batch_size=2) as world:
        world.executor.pause()
        world.start(FakeWorkflow())
        with pytest.raises(RuntimeError, match="paused"):
            world.executor.prepare_batch()
        world.executor.resume()
        assert world.executor.prepare_batch().task_ids == [0, 1]


def test_version_never_goes_back(tmp_path):
    with open_world(tmp_path) as world:
        world.start(FakeWorkflow())
        train(world, 2)
        with pytest.raises(ValueError, match="must not go back"):
            world.executor.set_version(1)


def test_a_database_that_cannot_be_written_stops_the_run(tmp_path):
    with open_world(tmp_path, batch_size=2) as world:
        world.start(FakeWorkflow())
        train(world, 1)
        world.db.query("PRAGMA query_only=ON")  # stands for a full disk
        world.set_version(2)
        with pytest.raises(RuntimeError, match="cannot write run database"):
            world.executor.prepare_batch()


def test_close_wakes_the_waiting_trainer_and_keeps_tasks_for_later(tmp_path):
    with open_world(tmp_path, batch_size=2) as world:
        world.start(FakeWorkflow(act=lambda *_: (3600.0, "ok")), group_size=2)
        threading.Timer(0.1, world.executor.close).start()
        with pytest.raises(RuntimeError, match="closed"):
            world.executor.prepare_batch()
        wait_until(lambda: world.engine.in_flight == 0)
        assert world.ledger.balance()["issued"] == 2


def test_evaluation_runs_beside_training_and_leaves_no_trace(tmp_path):
    shown = []

    def show(*seen):
        shown.append(seen)

    with open_world(tmp_path, batch_size=2, max_concurrent=3, on_trajectory=show) as world:
        world.start(FakeWorkflow(act=lambda *_: (3600.0, "ok")))
        rows = [{"i": i} for i in range(8)]
        evaluation = FakeWorkflow(act=lambda i, *_: (0.001, "none" if i == 3 else "ok"))
        results = world.executor.rollout_batch(rows, evaluation, group_size=2)
        assert results[3] is None
        rest = [i for i in range(8) if i != 3]
        assert [results[i]["rewards"].tolist() for i in rest] == [[i, i] for i in rest]
        assert [(task_id, is_eval) for task_id, _, _, is_eval in shown] == [(i, True) for i in rest]
        assert world.ledger.balance()["total"] == 2
        assert world.executor.rollout_batch([], evaluation) == []


def test_evaluation_fails_with_its_cause(tmp_path):
    with open_world(tmp_path, timeout_s=0.2) as world:
        broken = FakeWorkflow(act=lambda i, *_: (0.0, ValueError("bad row") if i == 1 else "ok"))
        with pytest.raises(RolloutFailedError, match="1 of the last 3.*ValueError: bad row"):
            world.executor.rollout_batch([{"i": 0}] * 3, broken)
        # One sample of each row: every row has a result, and too many samples have none.
        part = FakeWorkflow(act=lambda i, sample, *_: (0.0, OSError("no") if sample else "ok"))
        with pytest.raises(RolloutFailedError, match="3 of 6 episodes failed.*OSError"):
            world.executor.rollout_batch([{"i": 0}] * 3, part, group_size=2)
        hung = FakeWorkflow(act=lambda *_: (3600.0, "ok"))
        with pytest.raises(RuntimeError, match="0 of 1 rows are done"):
            world.executor.rollout_batch([{"i": 0}], hung)


def test_every_trajectory_is_shown(tmp_path):
    shown = []

    def show(task_id, group, version, is_eval):
        shown.append((task_id, version, is_eval))

    with open_world(tmp_path, batch_size=2, on_trajectory=show) as world:
        world.start(FakeWorkflow())
        train(world, 2)
    assert sorted(shown)[:4] == [(0, 0, False), (1, 0, False), (2, 1, False), (3, 1, False)]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    batch_size=st.integers(1, 4),
    eta=st.integers(0, 3),
    max_concurrent=st.integers(1, 9),
    group_size=st.integers(1, 3),
)
def test_random_schedules(seed, batch_size, eta, max_concurrent, group_size):
    """Random delays and ends of episodes against a trainer with random pauses."""
    rng = random.Random(seed)

    def act(task_id, sample, attempt):
        result = rng.choices(["ok", "none", OSError("flaky")], [8, 1, 1])[0]
        return rng.choice([0.0, 0.0, 0.001, 0.004]), result

    with (
        tempfile.TemporaryDirectory() as folder,
        open_world(
            Path(folder),
            batch_size=batch_size,
            max_staleness=eta,
            max_concurrent=max_concurrent,
            max_failure_ratio=1.0,
        ) as world,
    ):
        world.start(
            FakeWorkflow(act=act),
            group_size=group_size,
            should_accept_fn=lambda group: rng.random() < 0.8,
        )
        trained: list[int] = []
        for step in range(6):
            batch = world.executor.prepare_batch()
            assert len(batch.task_ids) == batch_size
            for group in batch.trajectories:
                assert int(group["versions"][:, 1:].min()) >= step - eta
                assert int(group["versions"].max()) <= step
            trained += batch.task_ids
            time.sleep(rng.choice([0.0, 0.003]))
            world.executor.mark_trained(batch, step)
            world.set_version(step + 1)
        world.executor.close(2.0)
        assert world.engine.most_in_flight <= max_concurrent * group_size
        assert len(set(trained)) == len(trained) == 6 * batch_size
        assert world.executor.stats()["stale"] == 0
        balance = world.ledger.balance()
        assert balance["trained"] == len(trained)
        assert balance["issued"] + balance["finished"] <= (eta + 1) * batch_size


def test_a_dynamic_batch_that_was_dropped_whole_leaves_nothing_stale_after_a_rewind(tmp_path):
    """Its places were given to other groups; after the rewind both would want them."""

    def act(task_id, sample, attempt):
        return (0.3 if task_id in (2, 5) else 0.0), "ok"

    def start(world, **options):
        rejects_3_and_4 = {"should_accept_fn": lambda group: int(group["rewards"][0]) not in (3, 4)}
        world.start(FakeWorkflow(act=act), dynamic_bs=True, **rejects_3_and_4, **options)

    with open_world(tmp_path, batch_size=2, max_staleness=2) as world:
        start(world)
        train(world, 1)
        lost = world.executor.prepare_batch()
        assert (lost.task_ids, lost.dropped) == ([6, 7], [3, 4])
        wait_until(lambda: world.executor.stats()["finished"] == 4)  # 2 and 5; 8 and 9 for 3 and 4
    with open_world(tmp_path, batch_size=2, max_staleness=2) as world:
        start(world, resume=world.ledger.rewind(step=0, version=1))
        train(world, 5, first=1)
        assert world.ledger.balance()["stale"] == 0


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    eta=st.sampled_from([0, 0, 2]),
    dynamic_bs=st.booleans(),
    lost_steps=st.integers(0, 2),
)
def test_a_run_that_dies_and_resumes_trains_every_prompt_once(seed, eta, dynamic_bs, lost_steps):
    """Death at any moment, recovery `lost_steps` back. On-policy, the batches are the same ones."""
    rng = random.Random(seed)
    options = {
        "group_size": 2,
        "should_accept_fn": lambda group: int(group["rewards"][0]) % 3 != 1,
        "dynamic_bs": dynamic_bs,
    }

    def workflow():
        return FakeWorkflow(act=lambda *_: (rng.choice([0.0, 0.001, 0.003]), "ok"))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with open_world(folder / "whole", batch_size=3, max_staleness=eta) as world:
            world.start(workflow(), **options)
            whole = train(world, 7)
        with open_world(folder / "torn", batch_size=3, max_staleness=eta) as world:
            world.start(workflow(), **options)
            torn = train(world, 4)
            time.sleep(rng.choice([0.0, 0.002, 0.006]))
        version = 4 - lost_steps
        with open_world(folder / "torn", batch_size=3, max_staleness=eta) as world:
            resume = world.ledger.rewind(step=version - 1, version=version)
            world.start(workflow(), resume=resume, **options)
            torn = torn[:version] + train(world, 7 - version, first=version)
            balance = world.ledger.balance()

        trained = sum(task_ids(torn), [])
        assert len(set(trained)) == len(trained) == balance["trained"]
        assert balance["stale"] == 0
        if eta == 0:
            assert task_ids(torn) == task_ids(whole)
            assert [b.dropped for b in torn] == [b.dropped for b in whole]
