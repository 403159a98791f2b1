"""What a call uses is counted, wherever it hides it."""

from __future__ import annotations

import ctypes

import pytest
from sample_session_attacks import GREEDY
from sandbox_support import needs_sandbox

from areal.sandbox.cpu_clock import CpuClock
from areal.sandbox.limits import SessionLimits
from areal.sandbox.session import Session

pytestmark = needs_sandbox

needs_a_clock = pytest.mark.skipif(
    CpuClock.start(ctypes.CDLL(None)) is None, reason="this system lets users count no events"
)
FIFOS = (
    "import os, time\nkept = []\nfor i in range(250):\n    os.mkfifo(f'f{i}')\n"
    "    kept.append(os.open(f'f{i}', os.O_RDWR))\n    os.write(kept[-1], bytes(1 << 16))\n"
    "time.sleep(900)"
)


@needs_a_clock
async def test_children_that_nobody_waits_for_take_the_time_of_the_call():
    attack, limit = GREEDY["processor time of children nobody waits for"]
    async with await Session.start(SessionLimits(wall_s=900, cpu_s=0.5)) as session:
        assert (await session.python(attack)).limit == limit


async def test_many_short_processes_are_not_counted_twice():
    # Each takes about a millisecond; counted again in all later ones, they would take minutes.
    loop = "i=0; while [ $i -lt 200 ]; do /bin/true; i=$((i+1)); done; echo done"
    async with await Session.start(SessionLimits(wall_s=900, cpu_s=60)) as session:
        result = await session.shell(loop)
        assert (result.output, result.limit) == ("done\n", None)


@pytest.mark.parametrize("code", [GREEDY["pipe buffers"][0], FIFOS], ids=["pipes", "fifos"])
async def test_what_pipes_hold_is_memory_of_the_call(code):
    limits = SessionLimits(wall_s=900, cpu_s=60, memory_mb=12, max_processes=4)
    async with await Session.start(limits) as session:
        assert (await session.python(code)).limit == "memory_mb"


async def test_a_few_pipes_fit_into_little_memory():
    async with await Session.start(SessionLimits(wall_s=900, memory_mb=32)) as session:
        result = await session.shell("echo abc | tr a-z A-Z | cat | rev")
        assert (result.output, result.limit) == ("CBA\n", None)
