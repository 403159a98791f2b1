"""UpdateGate: who is inside when it closes leaves before it opens, and sees one version."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from areal.engine.remote.update_gate import UpdateGate


async def test_closing_holds_those_who_come_and_waits_for_those_inside():
    gate = UpdateGate()
    assert (await gate.enter(1)).version == 0
    gate.close()
    late = asyncio.create_task(gate.enter(10))
    await asyncio.sleep(0.01)
    assert not gate.wait_empty(0.01) and not late.done()
    emptied = asyncio.create_task(asyncio.to_thread(gate.wait_empty, 10))
    gate.leave()
    assert await emptied
    await asyncio.to_thread(gate.open, 3)
    assert (await late).version == 3
    assert gate.serves(3) and not gate.serves(2)
    assert not gate.wait_empty(0)


async def test_the_wait_has_an_end_and_leaves_nothing_behind():
    gate = UpdateGate()
    gate.close()
    with pytest.raises(TimeoutError):
        await gate.enter(0.01)
    task = asyncio.create_task(gate.enter(10))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gate.wait_empty(0)
    gate.open(1)
    assert (await gate.enter(1)).version == 1


async def test_a_failure_reaches_who_waits_and_who_comes_until_it_is_mended():
    gate = UpdateGate()
    gate.close()
    waiting = asyncio.create_task(gate.enter(10))
    await asyncio.sleep(0.01)
    gate.fail("no weights")
    with pytest.raises(RuntimeError, match="no weights"):
        await waiting
    with pytest.raises(RuntimeError, match="no weights"):
        await gate.enter(1)
    gate.open(2)
    assert (await gate.enter(1)).version == 2


async def test_copies_share_one_state(tmp_path):
    gate = UpdateGate(tmp_path / "gate.json")
    gate.open(4)
    copy = pickle.loads(pickle.dumps(gate))
    entry = await copy.enter(1)
    assert entry.version == copy.version == 4
    gate.close()
    late = asyncio.create_task(copy.enter(10))
    await asyncio.sleep(0.05)
    assert gate.wait_empty(0) and not late.done()
    assert not copy.is_void(entry, aborted=False)  # its reply came before the weights changed
    gate.begin_load()
    assert copy.is_void(entry, aborted=False)  # it may have run with either
    assert not copy.is_void(entry, aborted=True)
    gate.open(5)
    assert (await late).version == 5 and copy.serves(5)
    copy.close()  # a copy updates, too
    assert gate.is_void(entry, aborted=True)  # it may have run with version 5
    copy.begin_load()
    copy.open(6)
    assert gate.version == 6 and gate.is_void(entry, aborted=True)
    copy.fail("no weights")
    with pytest.raises(RuntimeError, match="no weights"):
        await gate.enter(1)


def test_without_a_file_there_are_no_copies():
    with pytest.raises(RuntimeError, match="would not learn of weight updates"):
        pickle.dumps(UpdateGate())
