"""Work that several wait for is done once, and outlives any one of them."""

from __future__ import annotations

import asyncio
import gc

import pytest

from areal.engine.remote.router import SingleFlight


async def test_all_get_what_was_done_once():
    shared, calls = SingleFlight(), []

    async def work(value: int) -> int:
        calls.append(value)
        await asyncio.sleep(0)
        return value

    assert await asyncio.gather(*(shared.do("key", work, n) for n in (1, 2, 3))) == [1, 1, 1]
    assert await shared.do("other", work, 4) == 4
    assert await shared.do("key", work, 5) == 5  # the first has ended
    assert calls == [1, 4, 5]


async def test_it_goes_on_when_one_who_waits_is_cancelled():
    shared, go = SingleFlight(), asyncio.Event()

    async def work() -> bool:
        return await go.wait()

    first, second = (asyncio.create_task(shared.do("key", work)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    go.set()
    assert await second
    assert first.cancelled()


async def test_a_failure_is_raised_to_all_who_wait_and_to_nobody_else():
    shared, complaints = SingleFlight(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))

    async def fail() -> None:
        raise ValueError("broken")

    for waits in await asyncio.gather(
        shared.do("key", fail), shared.do("key", fail), return_exceptions=True
    ):
        assert isinstance(waits, ValueError)
    shared.start("key", fail)
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    assert complaints == []


async def test_close_ends_what_runs():
    shared = SingleFlight()
    task = shared.start("key", asyncio.sleep, 3600)
    await shared.close()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_task_that_has_just_ended_is_not_shared():
    """Else a caller that asks again and again would never let the event loop forget it."""
    flight, runs = SingleFlight(), []

    async def work():
        runs.append(len(runs))
        return runs[-1]

    first = flight.start("key", work)
    while not first.done():
        await asyncio.sleep(0)
    results = [await flight.do("key", work) for _ in range(3)]
    assert results == [1, 2, 3] and await flight.do("key", work) == 4
