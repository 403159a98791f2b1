"""A pool of sandbox sessions: some are started ahead, and a bound holds for all.

    pool = SessionPool(SessionLimits(), num_warm=4, max_sessions=64)
    async with pool.session() as session:
        await session.shell("make")
        files, argv = {"test.py": b"..."}, ["python3", "test.py"]
        result = await pool.grade(session, ["answer.py"], files, argv)

A session is used once and then ended. `grade` runs in a session of its own, which the graded code
never touched: only the named files come over, and the grader's files are laid over them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from areal.sandbox.limits import SessionLimits
from areal.sandbox.session import Result, Session


class SessionPool:
    """Used on one event loop."""

    def __init__(self, limits: SessionLimits, *, num_warm: int = 2, max_sessions: int = 64) -> None:
        self._limits = limits
        self._num_warm = num_warm
        self._room = asyncio.Semaphore(max_sessions)
        self._warm: deque[asyncio.Task[Session]] = deque()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A fresh session, ended at the end of the block."""
        async with self._room:
            session = await self._take()
            try:
                yield session
            finally:
                await session.close()

    async def grade(
        self,
        session: Session,
        paths: Sequence[str],
        files: Mapping[str, bytes],
        argv: Sequence[str],
    ) -> Result:
        """Copy `paths` out of `session` into a clean one, write `files`, and run `argv` there.

        A path that `session` cannot read is left out: then the grader does not find it.
        """
        copies: dict[str, bytes] = {}
        for path in paths:
            try:
                copies[path] = await session.read_file(path)
            except OSError:
                continue
        # Not of `self._room`: the holder of one session may not wait for another.
        async with await Session.start(self._limits) as clean:
            for path, data in {**copies, **files}.items():
                await clean.write_file(path, data)
            return await clean.run(argv)

    async def close(self) -> None:
        """End the sessions that were started ahead."""
        started = await asyncio.gather(*self._warm, return_exceptions=True)
        self._warm.clear()
        for session in started:
            if isinstance(session, Session):
                await session.close()

    async def _take(self) -> Session:
        starting = self._warm.popleft() if self._warm else self._start()
        while len(self._warm) < self._num_warm:
            self._warm.append(self._start())
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._warm.append(starting)
            raise

    def _start(self) -> asyncio.Task[Session]:
        return asyncio.create_task(Session.start(self._limits), name="sandbox-start")
