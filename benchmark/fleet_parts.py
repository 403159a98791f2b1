"""Starts the stand-in servers of benchmark/fleet.py, in Ray's workers; loads no torch there.

A stand-in is a thread of its worker, not a child: dozens of interpreters more would need the memory
and the start-up time of the machine that all of them share. It ends with its worker, as the server
of a killed node does.
"""

from __future__ import annotations

import asyncio
import threading

from generation_stand_in import StandIn, listen

NUM_TOKENS = 256


class StandInThread:
    """What a worker asks of the process of a server."""

    def __init__(self, mean_s: float) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_open = threading.Event()
        self._port = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._serve, args=(mean_s,), name="stand-in", daemon=True
        )
        self._thread.start()

    def _serve(self, mean_s: float) -> None:
        async def serve() -> None:
            stand_in = StandIn(mean_s, NUM_TOKENS)
            self._port = await listen(stand_in)
            self._is_open.set()
            await stand_in.step_for_ever()

        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(serve())
        except BaseException as error:  # told by describe_end: the thread has nobody else to tell
            self._error = error
            raise

    def wait_address(self, timeout_s: float) -> str:
        if not self._is_open.wait(timeout_s):
            raise RuntimeError(f"the stand-in did not listen within {timeout_s:g} s")
        return f"127.0.0.1:{self._port}"

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 1

    def wait(self, timeout_s: float) -> int | None:
        self._thread.join(timeout_s)
        return self.poll()

    def describe_end(self) -> str:
        return f"the stand-in ended: {self._error!r}"

    def terminate(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


def launch_stand_in(
    *, token: str, host: str, mean_s: float, setup_timeout_s: float
) -> tuple[StandInThread, str]:
    """As the functions that start real servers; it wants no token and listens on loopback."""
    stand_in = StandInThread(mean_s)
    return stand_in, stand_in.wait_address(setup_timeout_s)
