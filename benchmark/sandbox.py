"""How long a sandbox session takes to start, and how many run at once.

    python benchmark/sandbox.py [--starts 30] [--at-once 50] [--json report.json]

A start is timed until `Session.start` returns, cold and from a pool that has
sessions ready. The session imports what calls need after that: `first_result` is timed
until a line of Python has run in a session that was not there before. Then
`--at-once` sessions are open together, and each runs a line.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from contextlib import AsyncExitStack
from pathlib import Path

from report import Row, print_table, write_json

from areal.sandbox.limits import SessionLimits
from areal.sandbox.session import Session
from areal.sandbox.sessions import SessionPool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=30)
    parser.add_argument("--at-once", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = asyncio.run(_measure(args.starts, args.at_once))
    print_table(rows)
    if args.json is not None:
        write_json(args.json, rows)


async def _measure(starts: int, at_once: int) -> list[Row]:
    cold = [await _cold_start() for _ in range(starts)]
    first = [await _first_result() for _ in range(starts)]
    warm = await _warm_starts(starts)
    calls = await _calls(starts)
    began = time.perf_counter()
    num_alive = await _many(at_once)
    many_s = time.perf_counter() - began
    return [
        Row("cold_start_p50", 1e3 * statistics.median(cold), "ms"),
        Row("cold_start_max", 1e3 * max(cold), "ms"),
        Row("first_result_p50", 1e3 * statistics.median(first), "ms"),
        Row("warm_start_p50", 1e3 * statistics.median(warm), "ms"),
        Row("python_call_p50", 1e3 * statistics.median(calls), "ms"),
        Row("sessions_at_once", num_alive, "sessions"),
        Row("sessions_at_once_time", many_s, "s"),
    ]


async def _cold_start() -> float:
    began = time.perf_counter()
    async with await Session.start():
        return time.perf_counter() - began


async def _first_result() -> float:
    began = time.perf_counter()
    async with await Session.start() as session:
        await session.python("print(1)")
        return time.perf_counter() - began


async def _warm_starts(count: int) -> list[float]:
    """One after another, with time in between to start the next."""
    pool, found = SessionPool(SessionLimits(), num_warm=4), []
    for _ in range(count):
        began = time.perf_counter()
        async with pool.session() as session:
            found.append(time.perf_counter() - began)
            await session.python("print(1)")
            await asyncio.sleep(0.1)
    await pool.close()
    return found[4:]  # the first ones found the pool empty


async def _calls(count: int) -> list[float]:
    found = []
    async with await Session.start() as session:
        for _ in range(count):
            began = time.perf_counter()
            await session.python("print(1)")
            found.append(time.perf_counter() - began)
    return found


async def _many(count: int) -> int:
    """Sessions that answered while all were open."""
    async with AsyncExitStack() as stack:
        sessions = await asyncio.gather(*(Session.start() for _ in range(count)))
        for session in sessions:
            stack.push_async_callback(session.close)
        results = await asyncio.gather(*(session.python("print(6 * 7)") for session in sessions))
        return sum(result.output == "42\n" for result in results)


if __name__ == "__main__":
    main()
