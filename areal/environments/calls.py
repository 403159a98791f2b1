"""Calls of an environment's code: deadlines, threads for plain functions, a bound on open episodes.

In: functions that we did not write. Out: their results, or EnvError with name and cause. A plain
function that hangs cannot be interrupted: its episode fails, and its daemon thread is left behind.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from areal.environments.interface import EnvError
from areal.environments.tools import ToolError
from areal.utils import logging
from areal.utils.perf_tracer import episode_scope
from areal.utils.threads import in_thread
from areal.utils.waits import waiting

logger = logging.getLogger("Environment")


class Calls:
    """`name` is that of the environment in errors; `timeout_s` holds for each call."""

    def __init__(self, name: str, timeout_s: float, max_concurrent: int) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._max_concurrent = max_concurrent
        self._slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}

    def slot(self) -> asyncio.Semaphore:
        """Held as long as an episode is open."""
        loop = asyncio.get_running_loop()
        return self._slots.setdefault(loop, asyncio.Semaphore(self._max_concurrent))

    def name_of(self, method: str) -> str:
        return f"environment {self._name}: {method}"

    async def run(self, method: str, function: Callable[..., Any], *args: Any) -> Any:
        """The result of `function`; EnvError on an exception or a time-out."""
        what = self.name_of(method)
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                with waiting(what), episode_scope("tool"):
                    return await _start(what, function, args)
        except (EnvError, ToolError):
            raise
        except Exception as error:  # boundary: foreign code; the episode fails with its cause
            if deadline.expired():
                raise EnvError(f"{what} took longer than {self._timeout_s:g} s") from error
            raise EnvError(f"{what} raised {type(error).__name__}: {error}") from error

    async def run_tool(
        self, name: str, function: Callable[..., Any], arguments: dict[str, Any]
    ) -> Any:
        return await self.run(f"tool {name}", partial(function, **arguments))

    async def close(self, environment: Any) -> None:
        """The episode's outcome stands, whatever closing says."""
        function = getattr(environment, "close", None)
        if callable(function):
            try:
                await asyncio.shield(self.run("close", function))
            except EnvError as error:
                logger.warning("%s", error)


async def _start(what: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    inner = function.func if isinstance(function, partial) else function
    if inspect.iscoroutinefunction(inner):
        return await function(*args)
    # Shielded: a thread goes on after a time-out, and must find its future open.
    return await asyncio.shield(asyncio.wrap_future(in_thread(what, function, *args)))
