"""One prompt, several episodes: concatenation, rejection, retries, cancellation."""

from __future__ import annotations

import asyncio

import pytest
import torch
from rollout_world import FakeEngine, FakeWorkflow, trajectory

from areal.api.engine_api import EngineLostError
from areal.api.interaction import InteractionWithTokenLogpReward
from areal.api.io_struct import ModelResponse
from areal.api.workflow_api import GroupResult, RolloutWorkflow
from areal.api.workflow_context import workflow_context
from areal.rollout.failures import FailureLimits
from areal.rollout.group import GroupRunner, copy_row
from areal.sandbox.pool import RewardError
from areal.utils.data import concat_padded_tensors


def group_runner(
    workflow,
    group_size,
    *,
    max_retries=1,
    on_attempt_failed=lambda error, retried: None,
    is_eval=False,
    **options,
):
    return GroupRunner(
        engine=FakeEngine(),
        workflow=workflow,
        group_size=group_size,
        run_seed=0,
        is_eval=is_eval,
        limits=FailureLimits(max_retries=max_retries, retry_delay_s=0.0),
        on_attempt_failed=on_attempt_failed,
        **options,
    )


async def test_samples_run_at_once_and_are_concatenated():
    runner = group_runner(FakeWorkflow(act=lambda *_: (0.01, "ok")), 4)
    group = await runner.run(3, {"i": 5})
    assert group["input_ids"].tolist() == [[3, 7, 7]] * 4
    assert group["rewards"].tolist() == [5.0] * 4
    assert runner.engine.most_in_flight == 4


async def test_none_is_filtered_and_all_none_rejects_the_group():
    def some_none(task_id, sample, attempt):
        return 0.0, "none" if sample % 2 else "ok"

    group = await group_runner(FakeWorkflow(act=some_none), 4).run(0, {"i": 0})
    assert len(group["input_ids"]) == 2
    assert await group_runner(FakeWorkflow(act=lambda *_: (0.0, "none")), 4).run(0, {}) is None


async def test_an_incomplete_group_can_be_dropped():
    def one_none(task_id, sample, attempt):
        return 0.0, "none" if sample == 1 and task_id == 0 else "ok"

    runner = group_runner(FakeWorkflow(act=one_none), 3, drop_incomplete_group=True)
    assert await runner.run(0, {"i": 0}) is None
    assert len((await runner.run(1, {"i": 0}))["input_ids"]) == 3


async def test_rewards_can_be_normalised_within_the_group():
    class Graded(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            return trajectory([0], float(workflow_context.get().sample))

    group = await group_runner(Graded(), 2, reward_normalization=True).run(0, {})
    assert group["rewards"].tolist() == pytest.approx([-1.0, 1.0])
    assert group["original_rewards"].tolist() == [0.0, 1.0]


async def test_an_agents_episodes_are_rows_of_one_group():
    class Agent(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            replies = [ModelResponse([1], [5] * n, [-0.5] * n, [0] * n, "stop") for n in (1, 2)]
            return {
                f"chatcmpl-{n}": InteractionWithTokenLogpReward(reply, reward=float(n))
                for n, reply in enumerate(replies)
            }

    group = await group_runner(Agent(), 2).run(0, {})
    assert group["input_ids"].tolist() == [[1, 5, 0], [1, 5, 5]] * 2
    assert group["rewards"].tolist() == [0.0, 1.0] * 2
    assert group["episode_ids"].tolist() == [0, 0, 1, 1]


async def test_an_episode_keeps_its_number_when_another_is_rejected():
    def some_none(task_id, sample, attempt):
        return 0.0, "none" if sample == 1 else "ok"

    group = await group_runner(FakeWorkflow(act=some_none), 3).run(0, {"i": 0})
    assert group["episode_ids"].tolist() == [0, 2]


async def test_a_raising_episode_is_retried_with_the_same_seed():
    seeds, errors = [], []

    class Flaky(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            seeds.append(workflow_context.next_seed())
            if len(seeds) == 1:
                raise OSError("connection reset")
            return trajectory([0])

    runner = group_runner(Flaky(), 1, on_attempt_failed=lambda error, retried: errors.append(error))
    assert await runner.run(0, {}) is not None
    assert seeds[0] == seeds[1] and len(seeds) == 2
    assert [type(error) for error in errors] == [OSError]


async def test_past_the_retries_the_group_fails_and_its_siblings_end():
    def act(task_id, sample, attempt):
        return (0.0, ValueError("bad")) if sample == 0 else (60.0, "ok")

    workflow = FakeWorkflow(act=act)
    runner = group_runner(workflow, 3, max_retries=2)
    with pytest.raises(ValueError, match="bad"):
        await runner.run(0, {"i": 0})
    assert workflow.attempts[0, 0] == 3
    assert runner.engine.in_flight == 0


async def test_cancelling_a_group_ends_its_episodes():
    runner = group_runner(FakeWorkflow(act=lambda *_: (60.0, "ok")), 3)
    task = asyncio.create_task(runner.run(0, {"i": 0}))
    await asyncio.sleep(0.01)
    assert runner.engine.in_flight == 3
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert runner.engine.in_flight == 0


async def test_each_episode_and_attempt_has_its_own_copy_of_the_row():
    class Spoiler(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            data["messages"].append("answer")
            assert len(data["messages"]) == 1
            return trajectory([0])

    row = {"messages": []}
    assert await group_runner(Spoiler(), 4).run(0, row) is not None
    assert row == {"messages": []}


@pytest.mark.parametrize("result", [1.0, {"input_ids": torch.zeros(1, 2)}])
async def test_what_is_no_trajectory_is_a_failure(result):
    class Wrong(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            return result

    with pytest.raises((TypeError, ValueError)):
        await group_runner(Wrong(), 2).run(0, {})


def test_copy_row_is_deep_for_any_value():
    row = {"a": [1, {"b": "c"}], "t": torch.zeros(2), "s": {1, 2}}
    twin = copy_row(row)
    twin["a"][1]["b"] = "d"
    twin["t"][0] = 1
    twin["s"].add(3)
    assert row["a"] == [1, {"b": "c"}] and row["t"].sum() == 0 and row["s"] == {1, 2}


def test_empty_group_is_refused():
    with pytest.raises(ValueError, match="n_samples"):
        group_runner(FakeWorkflow(), 0)


class AtOnce(RolloutWorkflow):
    """Makes groups in one call; sample 1 of it fails as often as `num_failures` says."""

    def __init__(self, num_failures=0, error=None):
        self.left, self.error = num_failures, error or OSError("connection reset")
        self.episodes, self.seeds = [], []

    async def arun_episode(self, engine, data):
        sample = workflow_context.get().sample
        self.episodes.append(sample)
        self.seeds.append(workflow_context.next_seed())
        if self.left:
            self.left -= 1
            raise self.error
        return trajectory([5], reward=float(sample))

    async def arun_group(self, engine, data, num_samples):
        self.seeds += workflow_context.next_seeds(num_samples)
        failures = {1: self.error} if self.left else {}
        self.left -= len(failures)
        rows = [trajectory([5], reward=float(i)) for i in range(num_samples) if i not in failures]
        return GroupResult(concat_padded_tensors(rows), failures)


async def test_a_group_that_runs_at_once_is_the_group_of_its_episodes():
    class OneByOne(AtOnce):
        async def arun_episode(self, engine, data):
            return await super().arun_episode(engine, data)

    at_once, one_by_one = AtOnce(), OneByOne()
    for options in ({}, {"reward_normalization": True}):
        group = await group_runner(at_once, 3, **options).run(4, {})
        same = await group_runner(one_by_one, 3, **options).run(4, {})
        assert group.keys() == same.keys()
        for key, value in group.items():
            assert torch.equal(value, same[key]) and value.dtype == same[key].dtype
    assert at_once.episodes == [] and one_by_one.episodes == [0, 1, 2] * 2  # a subclass has its own
    assert at_once.seeds == one_by_one.seeds


async def test_a_failed_sample_of_a_group_is_retried_alone_with_its_seed():
    errors = []
    workflow = AtOnce(num_failures=2)
    runner = group_runner(
        workflow, 3, max_retries=2, on_attempt_failed=lambda *failure: errors.append(failure)
    )
    group = await runner.run(0, {})
    assert workflow.episodes == [1, 1] and [retried for _, retried in errors] == [True, True]
    assert workflow.seeds[3:] == [workflow.seeds[1]] * 2
    assert group["rewards"].tolist() == [0.0, 1.0, 2.0]
    assert group["episode_ids"].tolist() == [0, 1, 2]


async def test_retries_of_a_group_end_as_those_of_episodes():
    errors = []
    runner = group_runner(
        AtOnce(num_failures=9),
        3,
        max_retries=2,
        on_attempt_failed=lambda *failure: errors.append(failure),
    )
    with pytest.raises(OSError, match="connection reset"):
        await runner.run(0, {})
    assert [retried for _, retried in errors] == [True, True, False]
    for error in (RewardError("no"), EngineLostError("gone")):
        workflow = AtOnce(num_failures=9, error=error)
        with pytest.raises(type(error)):
            await group_runner(workflow, 3, max_retries=2).run(0, {})
        assert workflow.episodes == []


@pytest.mark.parametrize("error", [OSError("connection reset"), RewardError("no")])
async def test_an_evaluation_loses_only_the_episode_that_fails(error):
    by_episode = FakeWorkflow(act=lambda _, sample, *rest: (0.0, error if sample == 1 else "ok"))
    for workflow in (AtOnce(num_failures=9, error=error), by_episode):
        failed = []
        runner = group_runner(
            workflow,
            3,
            is_eval=True,
            on_attempt_failed=lambda *failure, failed=failed: failed.append(failure),
        )
        group = await runner.run(0, {"i": 5})
        assert len(group["rewards"]) == 2 and group["episode_ids"].tolist() == [0, 2]
        assert sum(not retried for _, retried in failed) == 1
    broken = FakeWorkflow(act=lambda *_: (0.0, error))
    with pytest.raises(type(error)):  # none is left
        await group_runner(broken, 3, is_eval=True).run(0, {"i": 5})
    for workflow in (
        AtOnce(num_failures=9, error=EngineLostError("gone")),
        FakeWorkflow(act=lambda *_: (0.0, EngineLostError("gone"))),
    ):
        with pytest.raises(EngineLostError):
            await group_runner(workflow, 3, is_eval=True).run(0, {"i": 5})


async def test_an_exception_of_a_group_fails_each_sample_once():
    class Broken(AtOnce):
        async def arun_group(self, engine, data, num_samples):
            raise OSError("down")

    errors, workflow = [], Broken()
    workflow.arun_episode = AtOnce.arun_episode.__get__(workflow)
    runner = group_runner(workflow, 3, on_attempt_failed=lambda *failure: errors.append(failure))
    assert (await runner.run(0, {}))["rewards"].tolist() == [0.0, 1.0, 2.0]
    assert len(errors) == 3 and workflow.episodes == [0, 1, 2]


@pytest.mark.parametrize("failures", [{}, {1: OSError("connection reset")}])
async def test_a_group_without_all_its_rows_is_refused(failures):
    class Short(RolloutWorkflow):
        async def arun_group(self, engine, data, num_samples):
            return GroupResult(trajectory([5]), failures)

        async def arun_episode(self, engine, data):
            raise AssertionError

    expected = f"each of {3 - len(failures)} samples that did not fail, got 1 rows"
    with pytest.raises(ValueError, match=expected):
        await group_runner(Short(), 3).run(0, {})


async def test_a_group_may_reject_all_samples_that_did_not_fail():
    class Rejecting(AtOnce):
        async def arun_group(self, engine, data, num_samples):
            return GroupResult(None, {1: self.error} if self.left else {})

    for num_failures, rewards in ((0, None), (1, [1.0])):
        workflow = Rejecting(num_failures)
        workflow.arun_episode = AtOnce.arun_episode.__get__(workflow)
        workflow.left = num_failures
        group = await group_runner(workflow, 3, max_retries=2).run(0, {})
        assert (group and group["rewards"].tolist()) == rewards
