"""Episodes know who they are, and their seeds depend on nothing else."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from areal.api.workflow_context import episode, sampling_seed, workflow_context


def test_outside_an_episode():
    assert workflow_context.get() is None
    assert workflow_context.task_id is None
    assert workflow_context.next_seed() is None
    assert workflow_context.stat_scope() == "rollout"


def test_seeds_repeat_per_episode_and_differ_within_it():
    def draw(**changes):
        identity = {"task_id": 4, "sample": 2, "is_eval": False, "run_seed": 1} | changes
        with episode(**identity):
            return [workflow_context.next_seed() for _ in range(3)]

    first = draw()
    assert first == draw() and len(set(first)) == 3
    for other in ({"task_id": 5}, {"sample": 3}, {"is_eval": True}, {"run_seed": 2}):
        assert not set(first) & set(draw(**other))


def test_seed_value_is_fixed_for_all_time():
    assert sampling_seed(1, 2, 3, 4) == 7597657864365363701


@given(st.tuples(*[st.integers(0, 2**31)] * 4))
def test_seeds_fit_in_63_bits(identity):
    assert 0 <= sampling_seed(*identity) < 2**63


async def test_concurrent_episodes_do_not_mix_and_their_tasks_inherit():
    async def run(task_id, is_eval):
        with episode(task_id=task_id, sample=0, is_eval=is_eval, run_seed=0):
            await asyncio.sleep(0)
            inner = await asyncio.create_task(look())
            return inner, workflow_context.stat_scope()

    async def look():
        await asyncio.sleep(0)
        return workflow_context.task_id

    results = await asyncio.gather(run(1, False), run(2, True))
    assert results == [(1, "rollout"), (2, "eval-rollout")]
    assert workflow_context.get() is None
