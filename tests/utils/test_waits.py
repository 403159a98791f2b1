"""Who waits for whom: chains by owner, equal chains counted once, the oldest first."""

from __future__ import annotations

import asyncio
import re
import threading
import time

import pytest

from areal.utils import waits
from areal.utils.waits import waiting


def described() -> list[str]:
    """Without the seconds, which a busy machine decides."""
    return [re.sub(r" since \d+ s$", "", line) for line in waits.describe()]


def test_a_chain_belongs_to_its_thread():
    assert waits.describe() == []
    number = 1
    with waiting("phase rollout"), waiting(lambda: f"{number} of 8 groups"):
        number = 3
        (line,) = described()
    assert line == "the trainer waits for phase rollout > 3 of 8 groups"
    assert waits.describe() == []


def test_a_wait_ends_with_its_block_also_by_an_error():
    with pytest.raises(KeyError), waiting("anything"):
        raise KeyError
    assert waits.describe() == []


async def test_tasks_that_wait_for_the_same_are_counted_and_the_oldest_is_named():
    async def episode(for_: str) -> None:
        with waiting("workflow W"), waiting(for_):
            await asyncio.sleep(60)

    tasks = [
        asyncio.create_task(episode(for_), name=f"task-{i}")
        for i, for_ in enumerate(["reward r", "server s", "reward r", "reward r"])
    ]
    await asyncio.sleep(0)
    lines = described()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert lines == [
        "task-0 and 2 others wait for workflow W > reward r",
        "task-1 waits for workflow W > server s",
    ]
    assert waits.describe() == []


def test_other_threads_are_named():
    release, entered = threading.Event(), threading.Event()

    def work() -> None:
        with waiting("a lock"):
            entered.set()
            release.wait(900)

    thread = threading.Thread(target=work, name="recover_0")
    thread.start()
    assert entered.wait(900)
    assert described() == ["recover_0 waits for a lock"]
    release.set()
    thread.join()


def test_progress_ends_the_quiet():
    time.sleep(0.02)
    assert waits.quiet_s() >= 0.02
    waits.progress()
    assert waits.quiet_s() < 0.02
