"""A clock that is stopped costs nobody his time."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time

import pytest

from areal.engine.remote.deadlines import Deadlines


async def seconds_until_timeout(deadlines: Deadlines) -> float:
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        async with deadlines.limit():
            await asyncio.sleep(60)
    return time.monotonic() - began


async def test_a_limit_ends_what_takes_longer():
    deadlines = pickle.loads(pickle.dumps(Deadlines(0.1)))
    async with deadlines.limit():
        await asyncio.sleep(0)
    assert await seconds_until_timeout(deadlines) >= 0.1


async def test_time_stands_still_for_those_inside_and_those_who_come():
    deadlines = Deadlines(0.3)
    inside = asyncio.create_task(seconds_until_timeout(deadlines))
    await asyncio.sleep(0.01)
    thread = threading.Thread(target=deadlines.stop)
    thread.start()
    thread.join()
    deadlines.stop()  # twice is once
    came = asyncio.create_task(seconds_until_timeout(deadlines))
    done, _ = await asyncio.wait([inside, came], timeout=0.6)
    assert not done
    deadlines.resume()
    assert await inside >= 0.9 and await came >= 0.9


async def test_the_past_of_the_clock_is_nobodys_time():
    deadlines = Deadlines(0.2)
    deadlines.stop()
    await asyncio.sleep(0.3)
    deadlines.resume()
    assert await seconds_until_timeout(deadlines) >= 0.2
