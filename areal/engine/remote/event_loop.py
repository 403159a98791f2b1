"""Closing what lives on an event loop, from whichever thread the owner is on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

_CLOSE_S = 10.0  # for an event loop that is alive, a matter of milliseconds


def close_on_its_loop(
    events: asyncio.AbstractEventLoop, close: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Runs `close()` on `events`; waits for it, unless this is the loop's own thread."""
    if events.is_closed():
        return
    if not events.is_running():
        events.run_until_complete(close())
    elif runs_here(events):
        events.create_task(close(), name="client-close")
    else:
        asyncio.run_coroutine_threadsafe(close(), events).result(_CLOSE_S)


def runs_here(events: asyncio.AbstractEventLoop) -> bool:
    """Whether the caller is on `events`."""
    try:
        return asyncio.get_running_loop() is events
    except RuntimeError:
        return False
