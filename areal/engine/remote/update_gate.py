"""Barrier between requests and weight updates, for servers that cannot tell versions apart.

An update waits for in-flight requests and blocks new ones, so every token of a request is of the
version at which it entered.

    event loop:       entry = await gate.enter(timeout_s)  ... one request ...  gate.leave()
    trainer's thread: gate.close();  gate.wait_empty(s);  gate.begin_load();  <load>;  gate.open(v)

Copies of the gate in other processes share its state in a `file`, which is used from the first copy
on: whoever updates writes it, and all read it. An update does not wait for requests of other
processes. They are aborted, or reach the servers too late and run with the new weights; hence
`is_void`: a reply counts only if it was complete before the weights changed, or was aborted by that
one update, the first that closed the gate since it entered.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from areal.engine.remote.router import SingleFlight
from areal.utils.fs import atomic_write_text

_POLL_S = 0.02


class GateState(NamedTuple):
    version: int = 0
    num_loads: int = 0
    num_closes: int = 0
    is_open: bool = True
    failure: str | None = None
    closed_at: float = 0.0  # `time.time()` when it was last closed


class UpdateGate:
    def __init__(self, file: Path | None = None, *, is_shared: bool = False) -> None:
        self._file = file
        self._is_shared = is_shared
        self._changed = threading.Condition()  # guards all below
        self._state = GateState()
        self._num_inside = 0  # of this process
        self._polls = SingleFlight()

    def __reduce__(self) -> tuple[Callable[[Path], UpdateGate], tuple[Path]]:
        if self._file is None:
            raise RuntimeError(
                "a copy of this engine would not learn of weight updates: give it an address_file"
            )
        with self._changed:
            if not self._is_shared:
                self._is_shared = True
                self._set(self._state)
        return partial(UpdateGate, is_shared=True), (self._file,)

    @property
    def version(self) -> int:
        return self._read().version

    @property
    def closed_at(self) -> float | None:
        """`time.time()` since when it is closed; None while it is open."""
        state = self._read()
        return None if state.is_open else state.closed_at

    async def enter(self, timeout_s: float) -> GateState:
        """Waits while the gate is closed. TimeoutError after `timeout_s`.

        RuntimeError if an update has failed: no version is live then.
        """
        async with asyncio.timeout(timeout_s):
            while (entry := self._try_enter()) is None:
                # One poll for all that wait on this event loop.
                await self._polls.do(asyncio.get_running_loop(), asyncio.sleep, _POLL_S)
        return entry

    def leave(self) -> None:
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    def is_void(self, entry: GateState, *, aborted: bool) -> bool:
        """Whether the tokens of a complete reply may be of another version than `entry`."""
        state = self._read()
        if state.num_loads == entry.num_loads:
            return False
        return not aborted or state.num_closes - entry.num_closes > 1

    def serves(self, version: int) -> bool:
        """Whether the gate is open at `version`."""
        state = self._read()
        return state.is_open and state.version == version

    def wait_empty(self, timeout_s: float) -> bool:
        """Whether all requests of this process left in time. Blocking: not for the event loop."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_inside == 0, timeout_s)

    def close(self) -> None:
        state = self._read()
        since = time.time() if state.is_open else state.closed_at
        closes = state.num_closes + 1
        self._set(state._replace(num_closes=closes, is_open=False, closed_at=since))

    def begin_load(self) -> None:
        """The weights of the servers change from now on."""
        state = self._read()
        self._set(state._replace(num_loads=state.num_loads + 1))

    def open(self, version: int) -> None:
        self._set(self._read()._replace(version=version, is_open=True, failure=None))

    def fail(self, reason: str) -> None:
        """Current and future callers of `enter` get RuntimeError with `reason`."""
        self._set(self._read()._replace(is_open=True, failure=reason))

    def _try_enter(self) -> GateState | None:
        with self._changed:
            state = self._read()
            if state.failure is not None:
                raise RuntimeError(state.failure)
            if not state.is_open:
                return None
            self._num_inside += 1
            return state

    def _read(self) -> GateState:
        if self._file is not None and self._is_shared:
            return GateState(*json.loads(self._file.read_text(encoding="utf-8")))
        return self._state

    def _set(self, state: GateState) -> None:
        with self._changed:
            self._state = state
            if self._file is not None and self._is_shared:
                # No other run reads it, so it need not survive a power failure.
                atomic_write_text(self._file, json.dumps(state), durable=False)
